"""An eviction policy of `pc.cache` for the blocks of another engine.

`PolicyPool` serves vLLM's block pool, vLLM's tier in host memory and SGLang's pages. Engines report allocated and
completed blocks one by one, so `PolicyPool` collects these and passes them on with the next notification of another
kind. It passes on all other notifications at once.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..cache.hashing import TokenIds
from ..cache.policies import LRU, Block, EvictionPolicy, choose
from ..cache.table import Ids

Numbers = Ids | Sequence[int]
"""Block numbers without duplicates. An `array("i")` is read without a copy."""

FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Multiplier that combines a hash with its group. It is odd, so multiplication loses no bits."""


class PolicyPool:
    """The blocks of an engine as an eviction policy sees them: the arrays that it reads, and its notifications.

    The class implements `pc.cache.policies.PoolView`. The adapter calls its methods when the engine allocates, hits or
    releases blocks. A plain lru needs only hits and releases, so the arrays are not updated for it.

    Args:
        num_blocks: Number of blocks of the engine.
        policy: The policy that chooses victims.
        num_held: Called without arguments; returns the number of blocks that requests hold.
    """

    def __init__(self, num_blocks: int, policy: EvictionPolicy, num_held: Callable[[], int]) -> None:
        self.num_blocks = num_blocks
        self.clock = 0
        self.last_access = np.zeros(num_blocks, np.int64)
        self.access_count = np.zeros(num_blocks, np.int32)
        self.prefix_length = np.zeros(num_blocks, np.int32)
        self.ref_count = np.zeros(num_blocks, np.int32)
        self.keys = np.zeros(num_blocks, np.uint64)
        self._num_held = num_held
        self._fresh = array("i")
        self._completed: list[tuple[Numbers, Numbers, list[bytes]]] = []
        self._references = 1
        self.policy = policy
        self.is_lru = type(policy) is LRU
        policy.bind(self)

    @property
    def num_held(self) -> int:
        """Number of blocks with a reference count above 0."""
        return self._num_held()

    def keys_of(self, ids: Ids) -> npt.NDArray[np.uint64]:
        """Return 64 bits of each block's hash, combined with its group of layers; 0 for a block without a hash."""
        keys: npt.NDArray[np.uint64] = self.keys.take(ids)
        return keys

    def acquire(self, sequence: TokenIds | Sequence[bytes]) -> list[Block]:
        """Raise NotImplementedError: the engine allocates blocks, and the policy only chooses victims."""
        raise NotImplementedError("acquire: the engine allocates blocks; this policy only chooses victims")

    def took(self, numbers: Numbers, references: int = 1) -> None:
        """Record that a request allocated fresh blocks. `references` is 0 if the engine counts references itself."""
        if len(numbers) and not self.is_lru:
            self._references = references
            self._fresh.extend(numbers)

    def completed(self, numbers: Numbers, places: Numbers, hashes: list[bytes]) -> None:
        """Record the hashes of blocks, in vLLM's format, and each block's index in its sequence, counted from 1."""
        if len(numbers) and not self.is_lru:
            self._completed.append((numbers, places, hashes))

    def flush(self) -> None:
        """Notify the policy of the batched fresh and completed blocks."""
        if self._fresh:
            ids, self._fresh = _ids(self._fresh), array("i")
            self.clock += 1
            self.ref_count[ids] = self._references
            self.access_count[ids] = 1
            self.last_access[ids] = self.clock
            self.keys[ids] = 0
            self.policy.accessed(ids, False)
        if self._completed:
            done, self._completed = self._completed, []
            ids = np.concatenate([_ids(numbers) for numbers, _, _ in done])
            self.prefix_length[ids] = np.concatenate([_ids(places) for _, places, _ in done])
            self.keys[ids] = np.concatenate([_keys(hashes) for _, _, hashes in done])
            self.policy.completed(ids)

    def accessed(self, numbers: Numbers, returned: Sequence[int] = (), references: int = 1) -> None:
        """Record a hit: a request holds these cached blocks, in the order of their sequence.

        Args:
            numbers: The cached blocks.
            returned: Those of the blocks that the policy has chosen as victims, but that the engine has not overwritten
                yet. The policy has forgotten them, so it is notified as if they were filled again.
            references: Number of references that each block gains; 0 if the engine counts references itself.
        """
        self.flush()
        ids = _ids(numbers)
        self.clock += 1
        if not self.is_lru:
            self.ref_count[ids] += references
            self.access_count[ids] += 1
            self.last_access[ids] = self.clock
        if not len(returned):
            self.policy.accessed(ids, True)
            return
        back = _ids(returned)
        others = ids[~np.isin(ids, back)]
        if others.size:
            self.policy.accessed(others, True)
        self.policy.accessed(back, False)
        self.policy.completed(back)

    def dropped(self, numbers: Numbers, references: int = 1) -> None:
        """Decrease the reference counts of blocks that keep other references, or that have no content to evict.

        For cached blocks that lose their last reference, call `released`.
        """
        if len(numbers) and not self.is_lru:
            self.flush()
            self.ref_count[_ids(numbers)] -= references

    def released(self, numbers: Numbers) -> None:
        """Record that no request refers to these cached blocks any more, in the order of their sequence."""
        if len(numbers):
            self.flush()
            ids = _ids(numbers)
            self.clock += 1
            if not self.is_lru:
                self.ref_count[ids] = 0
                self.last_access[ids] = self.clock
            self.policy.released(ids)

    def lost(self, numbers: Numbers) -> None:
        """Record that the engine removed the hashes of blocks, so that no request can hit them."""
        self.flush()
        self.keys[_ids(numbers)] = 0

    def hinted(self, numbers: Numbers, priority: int, ttl: float | None) -> None:
        """Record a request's hint to keep these blocks."""
        self.flush()
        self.policy.hinted(_ids(numbers), priority, ttl)

    def finished(self, output_tokens: int, returns: float | None) -> None:
        """Record that a request has ended. The release of its blocks follows.

        Args:
            output_tokens: Number of tokens that the request generated.
            returns: Probability that its conversation resumes soon, 0 to 1; None: unknown.
        """
        self.flush()
        if returns is not None:
            self.policy.returning(returns)
        self.policy.finished(output_tokens)

    def victims(self, count: int) -> Ids:
        """Let the policy choose `count` blocks to evict, check that they are distinct and released, and return them."""
        self.flush()
        return choose(self.policy, count)

    def removed(self, numbers: Numbers) -> None:
        """Record that the engine removed released blocks which the policy had not chosen as victims."""
        self.flush()
        self.policy.removed(_ids(numbers))

    def clear(self) -> None:
        """Forget the contents of all blocks, after the engine has emptied its cache."""
        self._fresh, self._completed = array("i"), []
        for field in (self.ref_count, self.access_count, self.prefix_length, self.keys):
            field.fill(0)
        self.policy.clear()


def _ids(numbers: Numbers) -> Ids:
    """Return block numbers as an int32 array."""
    if isinstance(numbers, np.ndarray):
        return numbers
    ids: Ids = np.frombuffer(numbers if isinstance(numbers, array) else array("i", numbers), np.int32)
    return ids


@functools.cache
def _key_type(size: int) -> np.dtype[Any]:
    """Return the dtype of vLLM's keys, each of `size` bytes.

    The last four bytes are the group, which distinguishes blocks of different groups of layers.
    """
    fields = {"names": ["hash", "group"], "formats": ["<u8", ">u4"], "offsets": [0, size - 4], "itemsize": size}
    return np.dtype(fields)  # type: ignore[call-overload,no-any-return]


def _keys(hashes: list[bytes]) -> npt.NDArray[np.uint64]:
    """Return 64 bits for each of vLLM's hashes, combined with its group."""
    size, raw = len(hashes[0]), b"".join(hashes)
    if len(raw) != size * len(hashes):  # groups with larger blocks have longer keys
        size, raw = 12, b"".join([key[:8] + key[-4:] for key in hashes])
    parts = np.frombuffer(raw, _key_type(size))
    keys: npt.NDArray[np.uint64] = parts["hash"] ^ parts["group"].astype(np.uint64) * FACTOR
    return keys
