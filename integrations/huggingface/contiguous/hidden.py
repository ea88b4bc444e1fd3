"""Hidden states of cached tokens: kept along the slots of their blocks, so that a result has those of every token."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from ....cache.tensors.step import Step
from ....cache.tensors.tensor_cache import TensorCache
from ..store import AnyManager
from .prompts import Prompt

Rows = list[torch.Tensor]
"""Of each layer, the embeddings first, `[num_tokens, width]`."""


class HiddenRows:
    """Rows of every layer by block of a manager's first group; they go with their blocks.

    Args:
        manager: Of the blocks.
        max_bytes: Bytes of all rows; where blocks have more, none are kept.
    """

    def __init__(self, manager: AnyManager, max_bytes: int) -> None:
        self._manager = manager
        self._max_bytes = max_bytes
        self._cache: TensorCache | None = None
        self._lock = threading.Lock()

    def available(self, table: np.ndarray, num_tokens: int) -> int:
        """How many of the first tokens of a block table have rows."""
        with self._lock:
            if self._cache is None or not num_tokens:
                return 0
            return self._cache.available(table, num_tokens=num_tokens)

    def load(self, table: np.ndarray, num_tokens: int) -> Rows:
        """The rows of the first tokens of a block table, all of them available and their blocks held."""
        with self._lock:
            assert self._cache is not None
            rows = self._cache.load(table, num_tokens=num_tokens)
            return [rows[name] for name in self._cache.names]

    def before(self, new: Sequence[torch.Tensor], prompts: Sequence[Prompt], start: int) -> tuple[torch.Tensor, ...]:
        """Hidden states of all tokens of a batch, `[batch, tokens, width]` by layer.

        Args:
            new: Of the tokens from `start` on.
            prompts: Of the batch, without padding, the first `start` tokens of each available.
            start: How many are read.
        """
        rows = {row: loaded for p in prompts for loaded in [self.load(p.tables[0], start)] for row in p.rows}
        order = sorted(rows)
        return tuple(
            torch.cat([torch.stack([rows[row][number] for row in order]).to(layer.device), layer], 1)
            for number, layer in enumerate(new)
        )

    def keep(self, prompt: Prompt, table: np.ndarray, start: int, steps: Sequence[Sequence[torch.Tensor]]) -> None:
        """Keeps rows of a prompt, and of its answer, whose blocks are written.

        Args:
            prompt: Without padding.
            table: Its blocks.
            start: Its first tokens, of which rows are there.
            steps: Of each pass and layer `[batch, tokens, width]`, all of the prompt in the first.
        """
        length, size = len(prompt.tokens), self._manager.block_size
        if any(layer.dim() != 3 or layer.shape[1] != length for layer in steps[0]):
            return
        begin, end = start // size * size, min(prompt.written * size, length + len(steps) - 1)
        if begin < end:
            row = prompt.rows[0]
            parts = [[step[number][row] for step in steps] for number in range(len(steps[0]))]
            self._store(table, begin, [torch.cat(part)[begin:end] for part in parts])

    def _store(self, table: np.ndarray, begin: int, rows: Sequence[torch.Tensor]) -> None:
        size = self._manager.block_size
        positions = np.arange(begin, begin + len(rows[0]))
        slots = table[positions // size].astype(np.int64) * size + positions % size
        named = {f"hidden {number}": row.detach() for number, row in enumerate(rows)}
        with self._lock:
            if self._cache is None:
                self._cache = self._made(named)
            if self._cache is not None and tuple(named) == self._cache.names:
                self._cache.store(Step(named, slots))

    def _made(self, named: dict[str, torch.Tensor]) -> TensorCache | None:
        num_blocks, size = self._manager.pools[0].num_blocks, self._manager.block_size
        cache = TensorCache(self._manager, num_blocks, size, max_bytes=self._max_bytes)
        if sum(cache.cost(row.shape[1:], row.dtype) for row in named.values()) > self._max_bytes:
            return None
        with torch.inference_mode(False):  # else nobody could write to them outside of it
            for name, row in named.items():
                cache.register(name, row.shape[1:], row.dtype)
        return cache
