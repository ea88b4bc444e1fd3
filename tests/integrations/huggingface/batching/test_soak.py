"""Random requests of tenants from several threads with few blocks: cancelled, streamed, failing."""

from __future__ import annotations

import gc
import random
import threading
import time
from itertools import pairwise
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from batching_cases import GEMMA3, LLAMA, Sharp, alone, assert_nothing_held, config, tokens  # noqa: E402

from pc.integrations.huggingface import ContinuousBatching, enable_continuous_batching  # noqa: E402

NEW = 12
DOCUMENTS = [tokens(n, n) for n in (20, 33, 48)]
PROMPTS = [document + tokens(n, n) for document in DOCUMENTS for n in (1, 6, 15)] + [tokens(n, 9) for n in (1, 16, 31)]
BAD: list[list[Any]] = [[], tokens(2000), [8, -3], ["text"]]


class Client(threading.Thread):
    """Submits requests of a tenant and cancels some; remembers which it asked for."""

    def __init__(self, manager: Any, batching: ContinuousBatching, seed: int, count: int) -> None:
        super().__init__()
        self.manager, self.batching, self.count = manager, batching, count
        self.random = random.Random(seed)
        self.asked: dict[str, tuple[int, int]] = {}
        self.cancelled: set[str] = set()

    def awaited(self) -> set[str]:
        """Return the requests that must be answered."""
        return set(self.asked) - self.cancelled

    def run(self) -> None:
        draw = self.random
        for number in range(self.count):
            request_id = f"{self.name}-{number}"
            which = draw.randrange(-1, len(PROMPTS))
            new = draw.randint(1, NEW)
            prompt = PROMPTS[which] if which >= 0 else draw.choice(BAD)
            self.asked[request_id] = (which, new)
            with self.batching.salt(draw.choice(["a", "b"])):
                self.manager.add_request(prompt, request_id, max_new_tokens=new, streaming=draw.random() < 0.3)
            if draw.random() < 0.2:
                request_id = draw.choice(list(self.asked))
                self.cancelled.add(request_id)
                self.manager.cancel_request(request_id)
            if draw.random() < 0.3:
                time.sleep(draw.random() / 50)


def serve(model: Any, batching: ContinuousBatching, want: list[list[int]], seed: int, count: int = 20) -> int:
    """Run a session, compare each answer, and return the number of answers."""
    with model.continuous_batching_context_manager(generation_config=config(NEW)) as manager:
        clients = [Client(manager, batching, seed + n, count) for n in range(2)]
        for client in clients:
            client.start()
        answers: dict[str, Any] = {}
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if not any(client.is_alive() for client in clients) and all(c.awaited() <= set(answers) for c in clients):
                break
            result = manager.get_result(timeout=0.1)
            batching.manager.check()
            if result is not None and result.is_finished():
                assert result.request_id not in answers
                answers[result.request_id] = result
    asked = {k: v for client in clients for k, v in client.asked.items()}
    for request_id, result in answers.items():
        which, new = asked[request_id]
        assert (result.error is None) == (which >= 0), (which, result.error)
        if which >= 0:
            assert result.generated_tokens == want[which][:new]
    assert all(client.awaited() <= set(answers) for client in clients)
    return len(answers)


@pytest.mark.parametrize("sharp", [LLAMA, GEMMA3], ids=["full", "mixed"])
@pytest.mark.slow
def test_random_requests(sharp: Sharp) -> None:
    model = sharp.build()
    want = alone(model, PROMPTS, new=NEW)
    objects: list[int] = []
    with enable_continuous_batching(model, num_blocks=8) as batching:
        for turn in range(7):
            assert serve(model, batching, want, 10 * turn) > 10
            assert_nothing_held(batching)
            gc.collect()
            objects.append(len(gc.get_objects()))
        assert batching.stats().evictions > 0
        assert batching.stats().hit_tokens > 0
    # No memory of a request is kept; each turn makes 40. Hashes of prompts are kept up to a limit, reached by then.
    assert min(later - earlier for earlier, later in pairwise(objects)) < 40, objects
