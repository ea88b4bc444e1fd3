"""An eviction policy of `pc.cache` behind another engine's blocks: what it may read of them, and what it is told.

One class for vLLM's pool, its tier in host memory and SGLang's pages. The policy is told at once: those that defer
their work keep a log of their own, and a second one in front of it saved nothing. Only what engines say one by one is
gathered: fresh and completed blocks, until something else happens.
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
"""Blocks by number, none twice; an `array("i")` is read in place."""

FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that its powers never vanish."""


class PolicyPool:
    """A `PoolView` over `num_blocks` blocks of an engine, in which `num_held` says how many requests hold.

    An lru is told of hits and releases alone, all it looks at; the arrays are not kept up for it then.
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
        """Blocks with a reference count above 0."""
        return self._num_held()

    def keys_of(self, ids: Ids) -> npt.NDArray[np.uint64]:
        """64 bits of the hash of each block, its group of layers counted in; 0 for one that has lost its hash."""
        keys: npt.NDArray[np.uint64] = self.keys.take(ids)
        return keys

    def acquire(self, sequence: TokenIds | Sequence[bytes]) -> list[Block]:
        """Refused: the engine takes blocks, the policy only chooses."""
        raise NotImplementedError("acquire: blocks are taken by the engine, whose policy only chooses")

    def took(self, numbers: Numbers, references: int = 1) -> None:
        """A request took fresh blocks; 0 references where the engine counts them apart, as locks of SGLang's tree."""
        if len(numbers) and not self.is_lru:
            self._references = references
            self._fresh.extend(numbers)

    def completed(self, numbers: Numbers, places: Numbers, hashes: list[bytes]) -> None:
        """These blocks got hashes as vLLM has them; each is at this place of its sequence, from 1 on."""
        if len(numbers) and not self.is_lru:
            self._completed.append((numbers, places, hashes))

    def flush(self) -> None:
        """Tells the policy of fresh and completed blocks."""
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
        """A request holds cached blocks that it found, in the order of their sequence.

        Of them the policy had chosen those `returned` as victims: to it they are blocks that were filled again.
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
        """So many references to each of these blocks are gone; it has others, or no content."""
        if len(numbers) and not self.is_lru:
            self.flush()
            self.ref_count[_ids(numbers)] -= references

    def released(self, numbers: Numbers) -> None:
        """Nobody refers to these cached blocks any more; in the order of their sequence."""
        if len(numbers):
            self.flush()
            ids = _ids(numbers)
            self.clock += 1
            if not self.is_lru:
                self.ref_count[ids] = 0
                self.last_access[ids] = self.clock
            self.policy.released(ids)

    def lost(self, numbers: Numbers) -> None:
        """Blocks have lost their hashes."""
        self.flush()
        self.keys[_ids(numbers)] = 0

    def hinted(self, numbers: Numbers, priority: int, ttl: float | None) -> None:
        """A request asked to keep these blocks."""
        self.flush()
        self.policy.hinted(_ids(numbers), priority, ttl)

    def finished(self, output_tokens: int, returns: float | None) -> None:
        """A request has ended; its releases follow."""
        self.flush()
        if returns is not None:
            self.policy.returning(returns)
        self.policy.finished(output_tokens)

    def victims(self, count: int) -> Ids:
        """The policy's choice, checked."""
        self.flush()
        return choose(self.policy, count)

    def removed(self, numbers: Numbers) -> None:
        """Released blocks are gone, which the policy did not choose."""
        self.flush()
        self.policy.removed(_ids(numbers))

    def clear(self) -> None:
        """The engine has forgotten every content."""
        self._fresh, self._completed = array("i"), []
        for field in (self.ref_count, self.access_count, self.prefix_length, self.keys):
            field.fill(0)
        self.policy.clear()


def _ids(numbers: Numbers) -> Ids:
    if isinstance(numbers, np.ndarray):
        return numbers
    ids: Ids = np.frombuffer(numbers if isinstance(numbers, array) else array("i", numbers), np.int32)
    return ids


@functools.cache
def _key_type(size: int) -> np.dtype[Any]:
    """The last bytes of vLLM's key are the group: layers of one group do not stand for those of another."""
    fields = {"names": ["hash", "group"], "formats": ["<u8", ">u4"], "offsets": [0, size - 4], "itemsize": size}
    return np.dtype(fields)  # type: ignore[call-overload,no-any-return]


def _keys(hashes: list[bytes]) -> npt.NDArray[np.uint64]:
    size, raw = len(hashes[0]), b"".join(hashes)
    if len(raw) != size * len(hashes):  # they are longer where blocks are larger
        size, raw = 12, b"".join([key[:8] + key[-4:] for key in hashes])
    parts = np.frombuffer(raw, _key_type(size))
    keys: npt.NDArray[np.uint64] = parts["hash"] ^ parts["group"].astype(np.uint64) * FACTOR
    return keys
