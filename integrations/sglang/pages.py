"""What an eviction policy may read of the pages that SGLang's tree holds, and what it is notified of.

Pages have numbers of their own here: where a page lies in the pool only the device knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...cache.hashing import TokenIds
from ...cache.policies import Block, EvictionPolicy
from ...cache.table import Ids

FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that its powers never vanish."""


class PageState:
    """A `PoolView` over pages of the tree, and the notifications to the policy."""

    def __init__(self, num_blocks: int, page_size: int, policy: EvictionPolicy) -> None:
        self.num_blocks = num_blocks
        self.num_held = 0
        self.clock = 0
        self.last_access = np.zeros(num_blocks, np.int64)
        self.access_count = np.zeros(num_blocks, np.int32)
        self.prefix_length = np.zeros(num_blocks, np.int32)
        self.ref_count = np.zeros(num_blocks, np.int32)
        self.num_waiting = 0
        """Pages that the policy may choose."""
        self._sums = np.zeros(num_blocks, np.uint64)
        self._free = np.arange(num_blocks, dtype=np.int32)
        self._num_free = num_blocks
        rows = np.arange(1, page_size + 1, dtype=np.uint64)
        self._of_token = _mixed(rows) | np.uint64(1)
        self.policy = policy
        self._trusted = type(policy).__module__.startswith("pc.cache.")
        policy.bind(self)

    def keys_of(self, ids: Ids) -> npt.NDArray[np.uint64]:
        """64 bits of the tokens up to and including each page, and of what keeps its tree apart; alike on all ranks."""
        return _mixed(self._sums.take(ids))

    def acquire(self, sequence: TokenIds | Sequence[bytes]) -> list[Block]:
        """Refused: SGLang takes pages, the policy only chooses."""
        raise NotImplementedError("acquire: pages are taken by SGLang's allocator")

    def fill(self, tokens: npt.NDArray[np.int64], before: int | None, seed: int) -> Ids:
        """New pages of these tokens, `[pages, page_size]`, behind the page `before` (None: the first of their tree)."""
        count = len(tokens)
        if count > self._num_free:
            raise RuntimeError(
                f"pages: got {self.num_blocks - self._num_free + count}, needs at most {self.num_blocks}"
            )
        ids: Ids = self._free[self._num_free - count : self._num_free].copy()
        self._num_free -= count
        begin = 0 if before is None else self.prefix_length.item(before)
        total = np.uint64(seed) if before is None else self._sums[before]
        places = np.arange(begin + 1, begin + 1 + count)
        of_page = _mixed((tokens.view(np.uint64) * self._of_token).sum(axis=1, dtype=np.uint64))
        self._sums[ids] = total + (of_page * (places.astype(np.uint64) * FACTOR | np.uint64(1))).cumsum(dtype=np.uint64)
        self.prefix_length[ids] = places
        self.refill(ids)
        return ids

    def refill(self, ids: Ids) -> None:
        """To the policy these pages are filled anew: so are those that it chose and that stayed after all."""
        self.clock += 1
        self.access_count[ids] = 1
        self.last_access[ids] = self.clock
        self.policy.accessed(ids, False)
        self.policy.completed(ids)

    def hit(self, ids: Ids, num_waiting: int) -> None:
        """A request found these pages, in the order of their sequence; so many of them the policy might have chosen."""
        self.clock += 1
        self.access_count[ids] += 1
        self.last_access[ids] = self.clock
        self.num_waiting -= num_waiting
        self.policy.accessed(ids, True)

    def hold(self, ids: Ids, change: int, num_changed: int) -> None:
        """A lock more or less on these pages, and so many more or fewer of them that have one."""
        self.ref_count[ids] += change
        self.num_held += num_changed

    def release(self, ids: Ids) -> None:
        """These pages have no locks any more, in the order of their sequence."""
        self.clock += 1
        self.last_access[ids] = self.clock
        self.num_waiting += len(ids)
        self.policy.released(ids)

    def victims(self, count: int) -> Ids:
        """The policy's choice of up to so many pages, checked."""
        count = min(count, self.num_waiting)
        if not count:
            return np.zeros(0, np.int32)
        ids = self.policy.victims(count)
        self.num_waiting -= count
        name = type(self.policy).__name__
        if len(ids) != count or (not self._trusted and len(np.unique(ids)) != count):
            raise RuntimeError(f"{name}.victims: got {len(np.unique(ids))} pages, needs {count}")
        if self.ref_count[ids].any():
            raise RuntimeError(f"{name}.victims: got a page that is locked")
        return ids

    def empty(self, ids: Ids, waiting: Ids) -> None:
        """These pages have left the tree; of them the policy had not chosen those `waiting`."""
        if len(waiting):
            self.num_waiting -= len(waiting)
            self.policy.removed(waiting)
        self._free[self._num_free : self._num_free + len(ids)] = ids
        self._num_free += len(ids)

    def check(self, pages: Any) -> None:
        """Asserts that numbers are conserved; `pages` are all that are in the tree."""
        assert self._num_free + len(pages) == self.num_blocks, (self._num_free, len(pages), self.num_blocks)
        assert len(set(pages)) == len(pages)
        assert not set(pages) & set(self._free[: self._num_free].tolist())
        assert self.num_held == np.count_nonzero(self.ref_count)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spreads each bit over the whole word (the finalizer of MurmurHash3)."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        values = (values ^ (values >> np.uint64(33))) * np.uint64(factor)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(33))
    return mixed
