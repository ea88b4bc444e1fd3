"""What the manager hands out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .runs import Run, Slots, slot_runs, slots_of_runs
from .table import Ids

Span = tuple[int, int]


class Allocation:
    """Blocks for some tokens of a request, and what is left to compute.

    Attributes:
        cached_spans: Token ranges [start, end) whose KV is there, ascending.
        compute_spans: Token ranges [start, end) to compute, ascending; together they cover the tokens.
        num_cached_tokens: Tokens in `cached_spans`.
        copies: (source block, target block) to be copied, in order, before anything is written; with several groups
            one list per group.
        loads: (host slot, block) to be copied before anything is written, with several groups one list per group;
            only `resume` has any.
        wait_for: Id of a request that is computing the next block of this prompt at this moment, or None. Waiting for
            its commit and allocating anew saves the work; going on is right too.
    """

    __slots__ = (
        "_block_size",
        "_first_block",
        "_new_block",
        "_slots",
        "_tables",
        "_written",
        "cached_spans",
        "compute_spans",
        "copies",
        "loads",
        "num_cached_tokens",
        "wait_for",
    )

    def __init__(
        self,
        tables: list[Ids],
        first_block: int,
        block_size: int,
        cached_spans: list[Span],
        compute_spans: list[Span],
        written: bool = False,
        copies: list[list[tuple[int, int]]] | None = None,
        wait_for: Any = None,
        new_block: int = 0,
        loads: list[list[tuple[int, int]]] | None = None,
    ) -> None:
        self._tables = tables
        self._first_block = first_block
        self._new_block = new_block
        self._block_size = block_size
        self._written = written
        self._slots: tuple[Slots, ...] | None = None
        self.cached_spans = cached_spans
        self.compute_spans = compute_spans
        self.num_cached_tokens = sum([end - start for start, end in cached_spans]) if cached_spans else 0
        self.wait_for = wait_for
        self.copies: Any
        self.loads: Any
        if len(tables) == 1:
            self.copies = copies[0] if copies else []
            self.loads = loads[0] if loads else []
        else:
            self.copies = copies or [[] for _ in tables]
            self.loads = loads or [[] for _ in tables]

    @property
    def block_ids(self) -> Any:
        """Block numbers [n] int32, in the order of the sequence, -1 for a hole; a tuple of arrays with several groups.

        Of `append` those newly taken.
        """
        skip = max(self._new_block - self._first_block, 0)
        ids = tuple([table[skip:] for table in self._tables]) if skip else tuple(self._tables)
        return ids if len(ids) > 1 else ids[0]

    @property
    def slot_mapping(self) -> Any:
        """Slot of every token of `compute_spans`, in order: [num_tokens] int64, -1 where KV is already there.

        A tuple of arrays with several groups. Computed when it is first read.
        """
        if self._slots is None:
            count = sum([end - start for start, end in self.compute_spans])
            self._slots = tuple([slots_of_runs(self.slot_runs(group), count) for group in range(len(self._tables))])
        return self._slots[0] if len(self._slots) == 1 else self._slots

    def slot_runs(self, group: int = 0) -> list[Run]:
        """`slot_mapping` of a group as runs of consecutive slots; tokens whose slot is -1 are in none."""
        size, base, table = self._block_size, self._first_block, self._tables[group]
        runs: list[Run] = []
        done = 0
        for start, end in self.compute_spans:
            first = start // size
            blocks = table[first - base : -(-end // size) - base]
            found = slot_runs(blocks, size, start - first * size, end - start)
            runs += [(done + token, slot, behind) for token, slot, behind in found] if done else found
            done += end - start
        if self._written and runs:
            token, slot, behind = runs[-1]
            if token + behind - slot == done:
                runs[-1:] = [(token, slot, behind - 1)] if behind - slot > 1 else []
        return runs

    def __repr__(self) -> str:
        return (
            f"Allocation(num_cached_tokens={self.num_cached_tokens}, compute_spans={self.compute_spans}, "
            f"block_ids={self.block_ids}, copies={self.copies}, wait_for={self.wait_for!r})"
        )


@dataclass(frozen=True)
class CacheStats:
    """Counters of a manager; tokens and blocks since it was made or reset, blocks of all groups together."""

    num_blocks: int
    free_blocks: int
    """Without content."""
    cached_blocks: int
    """Complete, held by nobody: findable until evicted."""
    held_blocks: int
    num_requests: int
    """Running now."""
    total_requests: int
    queried_tokens: int
    """Tokens of all prompts that `allocate` was given."""
    hit_tokens: int
    """Of those, tokens that need not be computed."""
    hit_tokens_by_cause: dict[str, int]
    """`hit_tokens` split: prefix, gap (behind a missing block), partial (part of a block, copied)."""
    evictions: int
    merged_blocks: int
    """Blocks that another request had completed first."""
    residency: tuple[int, ...]
    """Evicted blocks by the ticks they had been there: up to 1, 4, 16 ... 2**20, and longer."""
    residency_sum: int
    """Ticks (accesses and releases of a pool) that evicted blocks had been there, summed up."""
    preemptions: int
    host_blocks: int
    """Host slots in use."""

    @property
    def hit_rate(self) -> float:
        """`hit_tokens / queried_tokens`, 0 before the first request."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0
