"""Questions over documents get the same tokens as alone, among threads, salts, evictions and interrupted calls."""

from __future__ import annotations

import contextlib
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from compression_cases import ask  # noqa: E402
from generate_cases import LLAMA, assert_nothing_held, plain, prompt  # noqa: E402

from pc.integrations.huggingface import CompressedDocument, PrefixCaching, enable_prefix_caching  # noqa: E402
from pc.integrations.huggingface.compression import document as document_module  # noqa: E402

pytestmark = pytest.mark.slow

TEXTS = (prompt(120), prompt(120), prompt(90, 1))
PRESSES = ("snapkv", "knorm", "snapkv")
SALTS = ("one", "other")
NEW = 5


class StopError(Exception):
    """The exception that ends a call in the middle."""


class GoesAway(transformers.LogitsProcessor):  # type: ignore[misc]
    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise StopError
        return scores


def compress(handle: PrefixCaching, number: int) -> CompressedDocument:
    return handle.compress(TEXTS[number], PRESSES[number], budget=0.3)


def conversations(model: Any, documents: int = len(TEXTS)) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return pairs of a prompt and its answer for each document, computed alone: conversations of three turns."""
    asked = []
    for number, text in enumerate(TEXTS[:documents]):
        with enable_prefix_caching(model, num_blocks=64) as handle:
            document, found = compress(handle, number), []
            for begin in range(3):  # conversations that share their first tokens
                ids = torch.cat([text, prompt(40, 9), prompt(11 * begin + 3, begin)], 1)
                for turn in range(3):
                    handle.reset()
                    answer = ask(model, document, ids, max_new_tokens=NEW).sequences
                    found.append((ids, answer))
                    ids = torch.cat([answer, prompt(7 + turn, turn)], 1)
            rows = torch.cat([torch.cat([text, prompt(40, 9), prompt(20, row)], 1) for row in range(2)])
            handle.reset()
            found.append((rows, ask(model, document, rows, max_new_tokens=NEW).sequences))
        asked.append(found)
    return asked


def test_tokens_are_those_of_each_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LLAMA.build()
    alone = conversations(model)
    whole = [(ids, plain(model, input_ids=ids, max_new_tokens=NEW)) for found in alone for ids, _ in found[:3]]
    failures: list[BaseException] = []
    options = {"num_blocks": 40, "host_blocks": 8, "disk": tmp_path}
    with enable_prefix_caching(model, **options) as handle:
        bound = compress(handle, 0).nbytes
        monkeypatch.setattr(document_module, "memory_budget", lambda model: bound)  # two of three are in lower tiers

        def work(seed: int) -> None:
            chance = random.Random(seed)
            try:
                for _ in range(12):
                    with handle.salt(chance.choice(SALTS)):
                        if chance.random() < 0.2:
                            ids, expected = chance.choice(whole)
                            assert torch.equal(model.generate(ids, max_new_tokens=NEW), expected)
                            continue
                        number = chance.randrange(len(TEXTS))
                        document, (ids, expected) = compress(handle, number), chance.choice(alone[number])
                        if chance.random() < 0.3:
                            away = GoesAway(chance.randrange(NEW))
                            with contextlib.suppress(StopError):
                                ask(model, document, ids, max_new_tokens=NEW, logits_processor=[away])
                        else:
                            assert torch.equal(ask(model, document, ids, max_new_tokens=NEW).sequences, expected)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for failure in failures:
            raise failure
        assert_nothing_held(handle)
        stats = handle.stats()
        assert stats.evictions > 0
        assert stats.hit_tokens > 0
