"""Runs: queries at consecutive positions of a sequence, each over one KV head, that share their blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .call import AttentionCall
from .cpu_blocks import Blocks, Reach, Rows
from .cpu_cache import Cache


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of queries, each `[runs]`.

    Attributes:
        token: First query of each in the packed batch.
        count: Queries of each.
        position: Of the first.
        length: Of its sequence.
        sequence: Its index.
        head: KV head.
    """

    token: np.ndarray
    count: np.ndarray
    position: np.ndarray
    length: np.ndarray
    sequence: np.ndarray
    head: np.ndarray

    def __len__(self) -> int:
        return len(self.token)

    def __getitem__(self, which: np.ndarray | slice) -> Runs:
        columns = (self.token, self.count, self.position, self.length, self.sequence, self.head)
        return Runs(*(column[which] for column in columns))

    @classmethod
    def of(cls, call: AttentionCall, kv_heads: int) -> Runs:
        """Those of sequences that have a key, as long as can be, and for each KV head."""
        starts, lens = call.query_start_loc.numpy().astype(np.int64), call.seq_lens.numpy().astype(np.int64)
        counts = starts[1:] - starts[:-1]
        sequence = ((counts > 0) & (lens > 0)).nonzero()[0]
        token, count = starts[sequence], counts[sequence]
        position = lens[sequence] - count
        if call.query_positions is not None:
            positions = call.query_positions.numpy().astype(np.int64)
            if len(token) < starts[-1]:
                rows, sequence = np.flatnonzero(np.repeat(lens > 0, counts)), np.repeat(sequence, count)
                begins = _begins((np.diff(positions[rows]) != 1) | (np.diff(sequence) != 0), len(rows))
                token, count, sequence = rows[begins], np.diff(begins, append=len(rows)), sequence[begins]
            position = positions[token]
        head = np.arange(len(token) * kv_heads) % kv_heads
        columns = (token, count, position, lens[sequence], sequence)
        token, count, position, length, sequence = (column.repeat(kv_heads) for column in columns)
        return cls(token, count, position, length, sequence, head)

    def cut(self, lists: np.ndarray | None) -> Runs:
        """The same where lists `[num_tokens, kv_heads, top_k]` are equal in a run; None: each query alone."""
        if int(self.count.max(initial=0)) <= 1:
            return self
        nth = np.arange(int(self.count.sum())) - np.repeat(np.cumsum(self.count) - self.count, self.count)
        token, position, *others = (
            np.repeat(x, self.count) for x in (self.token, self.position, self.length, self.sequence, self.head)
        )
        begins = np.arange(len(nth))
        if lists is not None:
            own = lists[token + nth, others[-1]]
            begins = _begins((nth[1:] == 0) | (own[1:] != own[:-1]).any(axis=1), len(nth))
        first, position, *others = (column[begins] for column in (token + nth, position + nth, *others))
        return Runs(first, np.diff(begins, append=len(nth)), position, *others)

    def whole(self, call: AttentionCall) -> np.ndarray:
        """Which are served as rows: those of one query, and those whose own blocks are all there, or none."""
        whole: np.ndarray = self.count == 1
        if whole.all() or call.mask.BOUNDED:
            return whole
        if not call.causal:
            return np.ones_like(whole)
        many = np.flatnonzero(~whole)
        some, size = self[many], call.block_size
        first, last = some.position // size, (some.position + some.count - 1) // size
        logical, numbers = some.blocks(call)
        inside = ((logical >= first[:, None]) & (logical <= last[:, None]) & (numbers >= 0)).sum(axis=1)
        whole[many] = (inside == 0) | (inside == last - first + 1) & (some.position + some.count <= some.length)
        return whole

    def own_keys(self, call: AttentionCall) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Which runs of one count, all whole, attend to their own keys; block numbers and slots `[those, count]`."""
        size, tables = call.block_size, call.block_tables.numpy()
        first = self.position // size
        # A query may stand behind the last key.
        there = self.position < self.length
        there &= self._numbers(tables, np.minimum(first, tables.shape[-1] - 1)) >= 0
        if call.query_blocks is not None:
            there &= (call.query_blocks.numpy()[self.token, self.head] == first[:, None]).any(axis=1)
        some = there.nonzero()[0]
        position = self.position[some, None] + np.arange(int(self.count[0]))
        return some, self[some]._numbers(tables, position // size), position % size

    def blocks(self, call: AttentionCall) -> tuple[np.ndarray, np.ndarray]:
        """Logical blocks, `[runs, n]` of lists, -1 for none, or `[n]` of tables; their numbers `[runs, n]`."""
        tables = call.block_tables.numpy()
        if call.query_blocks is None:
            width = -(-int(self.length.max(initial=0)) // call.block_size)
            return np.arange(width), tables[self.sequence, self.head, :width]
        logical = call.query_blocks.numpy()[self.token, self.head].astype(np.int64)
        return logical, np.where(logical >= 0, self._numbers(tables, logical), -1)

    def _numbers(self, tables: np.ndarray, logical: np.ndarray) -> np.ndarray:
        """Numbers of logical blocks `[runs]` or `[runs, n]`."""
        sequence, head = (
            (self.sequence, self.head) if logical.ndim == 1 else (self.sequence[:, None], self.head[:, None])
        )
        return np.asarray(tables[sequence, logical] if tables.ndim == 2 else tables[sequence, head, logical])

    def rows(self, call: AttentionCall, cache: Cache) -> Rows:
        """Runs of one count as rows over the keys that all queries of a run attend to."""
        count = int(self.count[0])
        if count == 1:
            reach = Reach.of(self.position, self.length, call)
        else:
            reach = Reach(np.minimum(self.length, self.position) if call.causal else self.length)
        return Rows(self.token, count, cache.kv_heads, Blocks(self.head, reach, *self.blocks(call), call.block_size))


def _begins(new: np.ndarray, count: int) -> np.ndarray:
    """Indices where something new begins, the first of `count` included."""
    return np.concatenate(([0], new.nonzero()[0] + 1))[:count]
