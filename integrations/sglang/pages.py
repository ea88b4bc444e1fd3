"""The pages in SGLang's tree, as an eviction policy sees them.

Pages are numbered by this module, because only the device knows the place of a page in the pool.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...cache.policies import EvictionPolicy
from ...cache.table import Ids
from ..policy_pool import FACTOR, PolicyPool


class PageState(PolicyPool):
    """Pages of the tree. `keys` has for each page a hashed, weighted sum of the tokens up to its end."""

    def __init__(self, num_blocks: int, page_size: int, policy: EvictionPolicy) -> None:
        self.num_locked = 0
        super().__init__(num_blocks, policy, lambda: self.num_locked)
        self.num_waiting = 0
        """Number of pages that the policy may choose as victims."""
        self._free = np.arange(num_blocks, dtype=np.int32)
        self._num_free = num_blocks
        self._of_token = _mixed(np.arange(1, page_size + 2, dtype=np.uint64)) | np.uint64(1)

    def keys_of(self, ids: Ids) -> npt.NDArray[np.uint64]:
        """Return 64 bits for each page: a hash of the tokens up to its end and of the seed, the same on all ranks."""
        return _mixed(self.keys.take(ids))

    def fill(self, tokens: npt.NDArray[np.int64], before: int | None, seed: int) -> Ids:
        """Add pages after the page `before` (None: at a tree's start), and return them.

        `tokens` is `[pages, page_size]`, or `[pages, page_size + 1]` with the token after each page.
        """
        count = len(tokens)
        if count > self._num_free:
            raise RuntimeError(
                f"pages: got {self.num_blocks - self._num_free + count}, needs at most {self.num_blocks}"
            )
        ids: Ids = self._free[self._num_free - count : self._num_free].copy()
        self._num_free -= count
        begin = 0 if before is None else self.prefix_length.item(before)
        total = np.uint64(seed) if before is None else self.keys[before]
        places = np.arange(begin + 1, begin + 1 + count)
        of_page = _mixed((tokens.view(np.uint64) * self._of_token[: tokens.shape[1]]).sum(axis=1, dtype=np.uint64))
        sums = total + (of_page * (places.astype(np.uint64) * FACTOR | np.uint64(1))).cumsum(dtype=np.uint64)
        self.prefix_length[ids] = places
        self._fill(ids, sums)
        return ids

    def refill(self, ids: Ids) -> None:
        """Record that victims stay cached after all. To the policy they are newly filled pages."""
        self._fill(ids, self.keys.take(ids))

    def _fill(self, ids: Ids, sums: npt.NDArray[np.uint64]) -> None:
        """Notify the policy of filled pages, whose hashes come from `sums`."""
        self.took(ids, references=0)
        self.flush()
        self.keys[ids] = sums
        self.policy.completed(ids)

    def hit(self, ids: Ids, num_waiting: int) -> None:
        """Record that a request found these pages, in sequence order; `num_waiting` of them could have been evicted."""
        self.num_waiting -= num_waiting
        self.accessed(ids, references=0)

    def hold(self, ids: Ids, change: int, num_changed: int) -> None:
        """Add `change` to the locks of pages, and `num_changed` to the number of locked pages."""
        self.ref_count[ids] += change
        self.num_locked += num_changed

    def release(self, ids: Ids) -> None:
        """Record that these pages, in sequence order, have no locks any more."""
        self.num_waiting += len(ids)
        self.released(ids)

    def victims(self, count: int) -> Ids:
        """Return up to `count` victims that the policy chose, after a check. Some pages must be waiting."""
        count = min(count, self.num_waiting)
        self.num_waiting -= count
        return super().victims(count)

    def withdraw(self, ids: Ids) -> None:
        """Record that the policy may no longer choose these pages, which it had not chosen."""
        self.num_waiting -= len(ids)
        self.removed(ids)

    def empty(self, ids: Ids, waiting: Ids) -> None:
        """Record that pages left the tree. The policy had not chosen those in `waiting`."""
        if len(waiting):
            self.withdraw(waiting)
        self._free[self._num_free : self._num_free + len(ids)] = ids
        self._num_free += len(ids)

    def check(self, pages: Any) -> None:
        """Assert that the numbers of pages are consistent. `pages` are all pages in the tree."""
        assert self._num_free + len(pages) == self.num_blocks, (self._num_free, len(pages), self.num_blocks)
        assert len(set(pages)) == len(pages)
        assert not set(pages) & set(self._free[: self._num_free].tolist())
        assert self.num_held == np.count_nonzero(self.ref_count)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix the bits of each word (the finalizer of MurmurHash3)."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        values = (values ^ (values >> np.uint64(33))) * np.uint64(factor)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(33))
    return mixed
