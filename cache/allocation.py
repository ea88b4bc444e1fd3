"""The results of a manager's methods."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import numpy as np
import numpy.typing as npt
from typing_extensions import TypeVar

from .runs import MovedSpan, Run, Slots, Span, slot_runs, slots_of_runs
from .table import Ids

Pairs = list[tuple[int, int]]
"""Pairs of block numbers, or of a block number and a host slot."""

IdsT = TypeVar("IdsT", default=Ids)
SlotsT = TypeVar("SlotsT", default=Slots)
PairsT = TypeVar("PairsT", default=Pairs)


@dataclass(slots=True, eq=False, repr=False)
class Allocation(Generic[IdsT, SlotsT, PairsT]):
    """Blocks for some tokens of a request, and the spans to compute.

    With several groups, `block_ids`, `slot_mapping`, `copies` and `loads` have one entry for each group.

    Attributes:
        cached_spans: Token ranges [start, end) whose KV is cached, ascending.
        compute_spans: Token ranges [start, end) to compute, ascending. Together with `cached_spans` and `moved`, they
            cover all tokens.
        num_cached_tokens: Number of tokens in `cached_spans`.
        wait_for: Id of a request that is computing the next block of this prompt now, or None. The caller may wait for
            its commit and allocate again, which saves the work. Continuing at once is right too.
        junction: Length in tokens of the longest hit of the attention layers, if recurrent states allow only a shorter
            one; else None. After a `CacheManager.checkpoint` at this length, a later prompt with these tokens can
            start there.
        moved: Spans of tokens that are cached elsewhere, ascending; only with `reuse="anywhere"`. Before this step
            computes anything, the caller must copy their KV to `MovedSpan.targets` with keys rotated by `delta`
            positions (`pc.move_slots`). They are not in `compute_spans`. Their blocks are held until the next commit.
        approximate_from: Start of the first block with approximate KV: moved KV, or KV computed after it. None if all
            KV is exact.

    Examples:
        >>> manager = pc.CacheManager(num_blocks=8, block_size=4)
        >>> allocation = manager.allocate("a", range(6))
        >>> allocation.block_ids.tolist(), allocation.compute_spans, allocation.slot_mapping.tolist()
        ([0, 1], [(0, 6)], [0, 1, 2, 3, 4, 5])
    """

    _tables: list[Ids]
    _first_block: int
    _block_size: int
    cached_spans: list[Span]
    compute_spans: list[Span]
    _written: bool = False
    _copies: list[Pairs] | None = None
    wait_for: Hashable = None
    _new_block: int = 0
    _loads: list[Pairs] | None = None
    junction: int | None = None
    approximate_from: int | None = None
    moved: list[MovedSpan] = field(default_factory=list)
    num_cached_tokens: int = 0
    _slots: list[Slots] | None = None

    @property
    def block_ids(self) -> IdsT:
        """Block numbers [n] int32 in sequence order, -1 where the request holds none.

        After `append`, only the new blocks.
        """
        return self._of_groups(self.group_block_ids, tuple)

    @property
    def slot_mapping(self) -> SlotsT:
        """Slot of every token of `compute_spans`, in order: [num_tokens] int64, -1 if its KV is already cached.

        A recurrent group has -1 for all tokens.
        """
        return self._of_groups(self.group_slot_mapping, tuple)

    @property
    def copies(self) -> PairsT:
        """Pairs (source block, target block) to copy, in order, before anything is written."""
        return self._of_groups(self.group_copies, list)

    @property
    def loads(self) -> PairsT:
        """Pairs (host slot, block) to copy before anything is written. Only `resume` returns any."""
        return self._of_groups(self.group_loads, list)

    def _of_groups(self, get: Callable[[int], Any], kind: Callable[[list[Any]], Any]) -> Any:
        """Return the value of the only group, or the values of all groups."""
        count = len(self._tables)
        return get(0) if count == 1 else kind([get(group) for group in range(count)])

    def recompute_moved(self, fraction: float) -> Slots:
        """Choose the first tokens of each moved span to be computed again, which makes the result more exact.

        The first tokens of a span depend most on the text before it, so their KV is the least exact. Each span gives
        the same number of tokens; a shorter span gives all of its tokens (EPIC, arXiv:2410.15332).

        Args:
            fraction: Share of all moved tokens, 0 to 1. With 1 no moved KV is used.

        Returns:
            Their positions, ascending, [n] int64. Compute them together with the other tokens, in one pass.

        Raises:
            TypeError: `fraction` is not a number.
            ValueError: `fraction` is not between 0 and 1.

        Examples:
            >>> manager = pc.CacheManager(num_blocks=16, block_size=4)
            >>> allocation, merged = manager.allocate("a", range(12), reuse="anywhere"), manager.commit("a", 12)
            >>> allocation = manager.allocate("b", [50, *range(12), 51], reuse="anywhere")
            >>> allocation.compute_spans, allocation.recompute_moved(0.25).tolist()
            ([(0, 1), (13, 14)], [1, 2, 3])
        """
        from .reuse.moved import first_tokens

        return first_tokens(self.moved, fraction)

    def slots_at(self, positions: npt.NDArray[Any], group: int = 0) -> Slots:
        """Return the slots of the tokens at these positions, [n] int64, whether they are computed, cached or moved."""
        blocks = positions // self._block_size - self._first_block
        return self._tables[group][blocks].astype(np.int64) * self._block_size + positions % self._block_size

    def slot_runs(self, group: int = 0) -> list[Run]:
        """Return the slot mapping of a group as runs of consecutive slots. Tokens with slot -1 are in no run."""
        size, base, table = self._block_size, self._first_block, self._tables[group]
        runs: list[Run] = []
        done = 0
        for start, end in self.compute_spans:
            first = start // size
            blocks = table[first - base : -(-end // size) - base]
            found = slot_runs(blocks, size, start - first * size, end - start)
            runs += [(done + token, slot, behind) for token, slot, behind in found] if done else found
            done += end - start
        if self._written and runs:  # the last token's KV is cached, so the token is computed but not written
            token, slot, behind = runs[-1]
            if token + behind - slot == done:
                runs[-1:] = [(token, slot, behind - 1)] if behind - slot > 1 else []
        return runs

    def group_block_ids(self, group: int) -> Ids:
        """Return `block_ids` of a group."""
        return self._tables[group][max(self._new_block - self._first_block, 0) :]

    def group_slot_mapping(self, group: int) -> Slots:
        """Return `slot_mapping` of a group. It is computed on first use."""
        if self._slots is None:
            count = sum([end - start for start, end in self.compute_spans])
            self._slots = [slots_of_runs(self.slot_runs(g), count) for g in range(len(self._tables))]
        return self._slots[group]

    def group_copies(self, group: int) -> Pairs:
        """Return `copies` of a group."""
        return self._copies[group] if self._copies else []

    def group_loads(self, group: int) -> Pairs:
        """Return `loads` of a group."""
        return self._loads[group] if self._loads else []

    def __repr__(self) -> str:
        names = ("num_cached_tokens", "compute_spans", "block_ids", "copies")
        said = "".join(f"{name}={getattr(self, name)}, " for name in names)
        return f"{type(self).__name__}({said}wait_for={self.wait_for!r})"


AnyAllocation = Allocation[Any, Any, Any]
"""An allocation of a manager with any number of groups, for type annotations."""

GroupedAllocation = Allocation[tuple[Ids, ...], tuple[Slots, ...], list[Pairs]]
"""An allocation of a manager with several groups, for type annotations; see `GroupedCacheManager` for an example."""


class AppendedTokens(tuple[SlotsT, PairsT], Generic[SlotsT, PairsT]):
    """The slots and copies of `CacheManager.append_each`, with the attributes that a `Step` is made of.

    Attributes:
        slot_mapping: The slot of each new token, [n] int64. With several groups, an array for each group.
        copies: The same as `Allocation.copies`.
        requests: The requests, in order.
        positions: The position of each new token in its request, [n] int32.

    Examples:
        >>> manager = pc.CacheManager(num_blocks=8, block_size=4)
        >>> for request in ("a", "b"):
        ...     allocation = manager.allocate(request, range(6))
        >>> step = manager.append_each(["a", "b"], [7, 8])
        >>> step.slot_mapping.tolist(), step.positions.tolist(), step.query_start_loc.tolist()
        ([6, 14], [6, 6], [0, 1, 2])
    """

    requests: tuple[Hashable, ...]
    positions: npt.NDArray[np.int32]

    def __new__(  # noqa: D102
        cls, slot_mapping: SlotsT, copies: PairsT, requests: Sequence[Hashable], positions: Sequence[int]
    ) -> AppendedTokens[SlotsT, PairsT]:
        self = super().__new__(cls, (slot_mapping, copies))
        self.requests = tuple(requests)
        self.positions = np.array(positions, np.int32)
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:  # for pickle and copy, because a tuple passes itself to `__new__`
        return self[0], self[1], self.requests, self.positions

    @property
    def slot_mapping(self) -> SlotsT:  # noqa: D102  see Attributes
        return self[0]

    @property
    def copies(self) -> PairsT:  # noqa: D102
        return self[1]

    @property
    def query_start_loc(self) -> npt.NDArray[np.int32]:
        """The start of each request's tokens in the packed batch, then the number of all tokens: [n + 1] int32."""
        return np.arange(len(self.requests) + 1, dtype=np.int32)
