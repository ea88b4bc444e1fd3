"""Random requests with cancellations, exceptions and few blocks: right tokens, no held blocks, constant memory.

`python tests/integrations/huggingface/test_soak.py 2000` runs 2000 requests and 2000 interrupted calls.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from generate_cases import BY_NAME, assert_nothing_held, left_padded, plain, prompt  # noqa: E402
from runner_cases import RUNNERS, interrupted  # noqa: E402

from pc.integrations.huggingface import PrefixCaching, enable_prefix_caching  # noqa: E402

MODES: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "top_k": 50},
    {"num_beams": 2},
    {"num_return_sequences": 2, "do_sample": True},
    {"prompt_lookup_num_tokens": 3},
    {"return_dict_in_generate": True},
]


class StopError(Exception):
    """The exception of a caller that disconnects."""


class GoesAway:
    """A streamer, criterion and processor that raises after some tokens."""

    def __init__(self, after: int, kind: str) -> None:
        self.left, self.kind = after, kind

    def put(self, value: torch.Tensor) -> None:
        self(value, None)

    def end(self) -> None:
        return None

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise StopError
        return scores if self.kind == "processor" else torch.zeros(len(input_ids), dtype=torch.bool)


def _request(chance: random.Random) -> dict[str, Any]:
    """Return arguments of generate: rows that share documents, of random lengths."""

    def row() -> torch.Tensor:
        document = prompt(96, chance.randrange(6))[:, : chance.randint(1, 96)]
        return torch.cat([document, prompt(chance.randint(0, 20), chance.randrange(1000))], 1)

    mode = chance.choice(MODES)
    rows = [row() for _ in range(1 if "prompt_lookup_num_tokens" in mode else chance.randint(1, 3))]
    return {**left_padded(*rows), **mode, "max_new_tokens": chance.randint(1, 8), "eos_token_id": 7}


def _resident() -> int:
    """Return the bytes of memory that the process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def soak(handle: PrefixCaching, model: Any, requests: int, seed: int = 0) -> dict[str, int]:
    """Run random requests. Some are ended by exceptions; all others are compared with the model's own.

    Returns:
        Counts, and bytes of memory after a third and at the end.
    """
    chance, counts = random.Random(seed), {"compared": 0, "cut off": 0, "memory before": 0, "memory after": 0}
    for number in range(requests):
        call = _request(chance)
        cut = chance.choice([None, None, None, "streamer", "criterion", "processor"])
        if cut == "streamer" and (call.get("num_beams", 1) > 1 or len(call["input_ids"]) > 1):
            cut = "criterion"
        salt = chance.choice(["one", "other"])
        with handle.salt(salt), handle.hint(chance.choice([None, 0.0, 1.0])):
            if cut is not None:
                away: Any = GoesAway(chance.randint(0, 6), cut)
                name = {"streamer": "streamer", "criterion": "stopping_criteria", "processor": "logits_processor"}[cut]
                call[name] = away if cut == "streamer" else [away]
                counts["cut off"] += 1
                with contextlib.suppress(StopError):
                    model.generate(**call)
            else:
                torch.manual_seed(number)
                got = model.generate(**call)
                torch.manual_seed(number)
                want = plain(model, **call)
                if "return_dict_in_generate" in call:
                    got, want = got.sequences, want.sequences
                assert torch.equal(got, want), call
                counts["compared"] += 1
        if number % 16 == 0:
            assert_nothing_held(handle)
        if number in (requests // 3, requests - 1):
            gc.collect()
            counts["memory after" if number == requests - 1 else "memory before"] = _resident()
    assert_nothing_held(handle)
    return counts


@pytest.mark.parametrize(
    ("name", "options"),
    [("llama", {"reuse": "gap"}), ("gemma2", {"reuse": "gap"}), ("gemma2", {"window_blocks": 7}), ("lfm2", {})],
)
def test_random_requests(name: str, options: dict[str, Any]) -> None:
    model = BY_NAME[name].build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with enable_prefix_caching(model, num_blocks=30, host_blocks=8, **options) as handle:
            counts = soak(handle, model, 40)
            assert min(counts["compared"], counts["cut off"]) > 5
            assert handle.stats().evictions > 0
            assert handle.stats().hit_tokens > 0


def main(number: int) -> None:
    """Print the outcomes of `number` requests and of `number` interrupted calls."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for name, options in (("gemma2", {"window_blocks": 7}), ("gemma2", {}), ("llama", {}), ("lfm2", {})):
        model = BY_NAME[name].build()
        with enable_prefix_caching(model, num_blocks=30, reuse="gap", host_blocks=8, **options) as handle:
            print(name, soak(handle, model, number // 4), handle.stats(), flush=True)
    with RUNNERS[0].enable(BY_NAME["mistral-window"].build(), num_blocks=40) as caching:
        print("interrupted", interrupted(caching, number), caching.handle.stats(), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
