"""Rows of queries, the live blocks that each attends to, and where these lie in a cache."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from .call import AttentionCall
from .cpu_cache import Matrix
from .cpu_flash import Part


@dataclass(frozen=True, slots=True)
class Reach:
    """Key positions that count for rows, each `[rows]`: from begin to end, and those below sink_end; None for 0."""

    end: np.ndarray
    begin: np.ndarray | None = None
    sink_end: np.ndarray | None = None

    @classmethod
    def of(cls, positions: np.ndarray, lens: np.ndarray, call: AttentionCall) -> Reach:
        """Of single queries at positions of sequences that are `lens` long."""
        mask = call.mask
        if not mask.BOUNDED:
            return cls(np.minimum(lens, positions + 1) if mask.CAUSAL else lens)
        each = [mask.reach(p, p, n) for p, n in zip(positions.tolist(), lens.tolist(), strict=True)]
        sink_end, begin, end = np.array(each, dtype=np.int64).reshape(-1, 3).T
        return cls(end, begin, sink_end)

    def __getitem__(self, rows: np.ndarray) -> Reach:
        if self.begin is None or self.sink_end is None:
            return Reach(self.end[rows])
        return Reach(self.end[rows], self.begin[rows], self.sink_end[rows])

    def blocks(self, logical: np.ndarray, size: int) -> np.ndarray:
        """Which of blocks `[rows, n]` or `[n]` have a key that counts."""
        first = logical * size
        live = first < self.end[:, None]
        if self.begin is not None and self.sink_end is not None:
            live &= (first + size > self.begin[:, None]) | (first < self.sink_end[:, None])
        return np.asarray(live)

    def cuts(self, size: int) -> bool:
        """Whether a block may hold keys that count and others."""
        return self.begin is not None or bool((self.end % size).any())

    def dead(self, t: np.ndarray) -> np.ndarray:
        """Which of key positions `[rows, n, block_size]` do not count."""
        dead = t >= self.end[:, None, None]
        if self.begin is not None and self.sink_end is not None:
            dead |= (t < self.begin[:, None, None]) & (t >= self.sink_end[:, None, None])
        return np.asarray(dead)


class Blocks:
    """The blocks that rows attend to, over one KV head each or all.

    Attributes:
        heads: `[rows]`, the KV head of each; None: all of them.
        reach: The keys that count in the blocks.
        sizes: `[rows]`, how many blocks each has.
        numbers: `[sum(sizes)]`, block numbers, ascending by logical block in each row; all have a key that counts.
    """

    def __init__(
        self,
        heads: np.ndarray | None,
        reach: Reach,
        logical: np.ndarray,
        numbers: np.ndarray,
        block_size: int,
        is_inside: bool = False,
    ) -> None:
        """Of numbers `[rows, n]` those that are present and in reach, as all are where `is_inside`.

        Their logical blocks: `[rows, n]`, or [n]: 0, 1, ...
        """
        live = numbers >= 0
        if not is_inside:
            live &= reach.blocks(logical, block_size)
        self.heads, self.reach, self.sizes, self.numbers = heads, reach, live.sum(axis=1), numbers[live]
        self._logical, self._live, self._size = logical, live, block_size

    @functools.cached_property
    def logical(self) -> np.ndarray:
        """`[sum(sizes)]`, logical blocks."""
        if self._logical.ndim == 1:
            return self._live.nonzero()[1]
        return np.asarray(self._logical[self._live])

    def cells(self, matrix: Matrix) -> tuple[np.ndarray, np.ndarray]:
        """Rows of a matrix that hold the keys that count, and how many each row here has."""
        assert self.heads is not None
        size = self._size
        cells, lengths = matrix.cells(self.numbers, self.heads.repeat(self.sizes), size), self.sizes * size
        if not self.reach.cuts(size):
            return cells.reshape(-1), lengths
        if self.reach.begin is None:
            dead = self._dead_slots()
            lengths -= dead
            most = int(dead[0])
            if (dead == most).all() and (not most or (lengths == lengths[0]).all()):
                whole = cells.reshape(len(dead), -1) if most else cells
                return whole[:, : whole.shape[1] - most].reshape(-1), lengths
            own = dead.nonzero()[0]
            live = np.ones(cells.shape, dtype=bool)
            live[self.sizes.cumsum()[own] - 1] = np.arange(size) < size - dead[own, None]
            return cells[live], lengths
        row = np.arange(len(self.sizes)).repeat(self.sizes)
        live = ~self.reach[row].dead(self.logical[:, None, None] * size + np.arange(size))[:, 0]
        return cells[live], np.bincount(row, live.sum(axis=1), len(self.sizes)).astype(np.int64)

    def _dead_slots(self) -> np.ndarray:
        """Slots of each row's last block behind the last key that counts, where nothing before is out of reach."""
        whole, tail = np.divmod(self.reach.end, self._size)
        last = self.logical[np.maximum(self.sizes.cumsum() - 1, 0)] if len(self.numbers) else whole - 1
        return np.where((tail > 0) & (self.sizes > 0) & (last == whole), self._size - tail, 0)


@dataclass(frozen=True)
class Rows:
    """Runs of `count` queries, and the blocks that each run attends to.

    Attributes:
        tokens: `[rows]`, the first query of each in the packed batch.
        count: Queries of each.
        kv_heads: How many there are.
        blocks: What each attends to.
    """

    tokens: np.ndarray
    count: int
    kv_heads: int
    blocks: Blocks

    @property
    def heads(self) -> np.ndarray | None:
        """`[rows]`, the KV head of each; None: all of them."""
        return self.blocks.heads

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """`[rows, heads of a row, group * count, head_dim]`."""
        rows, width = len(self.tokens), query.shape[2]
        if self.heads is not None:
            return self.runs(query).reshape(rows, 1, -1, width)
        own = query[self._index()[:, 0] if self.slice is None else self.slice]
        return own.reshape(rows, self.kv_heads, -1, width)

    def runs(self, query: torch.Tensor) -> torch.Tensor:
        """`[rows, group, count, head_dim]` of rows of one KV head each; a view where they are one run's."""
        of_group: torch.Tensor = query.unflatten(1, (self.kv_heads, -1))
        every = self.slice
        if every is None:
            assert self.heads is not None
            return of_group[self._index(), torch.from_numpy(self.heads)[:, None]].transpose(1, 2)
        if self.count > 1:
            return of_group[every].permute(1, 2, 0, 3)
        return of_group[every].flatten(0, 1)[:, :, None]

    def write(self, part: Part, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Stores results, shaped as `queries` or `runs`, into those of the packed batch."""
        rows, group = len(self.tokens), out.shape[1] // self.kv_heads
        for whole, own in zip((out, lse), part, strict=True):
            if self.slice is None:
                of_group, own = whole.unflatten(1, (self.kv_heads, group)), own.to(whole.dtype)
                if self.heads is None:
                    of_group[self._index()[:, 0]] = own
                else:
                    own = own.reshape(rows, group, self.count, *whole.shape[2:]).transpose(1, 2)
                    of_group[self._index(), torch.from_numpy(self.heads)[:, None]] = own
            elif self.count > 1:
                target = whole[self.slice].unflatten(1, (self.kv_heads, group)).movedim(0, 2)
                target.copy_(own.reshape(target.shape))
            else:
                whole[self.slice].copy_(own.reshape(whole[self.slice].shape))

    @functools.cached_property
    def slice(self) -> slice | None:
        """Their tokens, where rows are all heads of tokens that follow each other, or of one run."""
        tokens, each = self.tokens, 1
        if self.heads is not None:
            each = self.kv_heads
            tokens = tokens * each + self.heads
        if len(tokens) % each or (self.count > 1 and len(tokens) != each):
            return None
        first = int(tokens[0])
        if first % each or int(tokens[-1]) != first + len(tokens) - 1 or (tokens[1:] <= tokens[:-1]).any():
            return None
        return slice(first // each, (first + len(tokens)) // each + self.count - 1)

    def _index(self) -> torch.Tensor:
        return torch.from_numpy(self.tokens[:, None] + np.arange(self.count))
