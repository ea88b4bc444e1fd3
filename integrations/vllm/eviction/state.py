"""What an eviction policy may read of vLLM's blocks, and what it is notified of, in runs."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ....cache.hashing import TokenIds
from ....cache.policies import LRU, Block, EvictionPolicy
from ....cache.table import Ids

MANY = 2048
"""Blocks of which the policy is notified at once, if no victims are needed before."""
Numbers: TypeAlias = "array[int]"


class PolicyState:
    """A `PoolView` over blocks of vLLM, of its pool (the null block is in no event) or of its tier in host memory.

    A policy decides when it is asked for victims, so events are logged, and drained to it then or when many have come
    together: its code, called once in a few steps for a few blocks, takes ten times as long as when its instructions
    and arrays are in the processor's caches. Fresh and completed blocks between two hits or releases are drained
    together. lru is notified of hits and releases alone, all it looks at.
    """

    def __init__(self, num_blocks: int, policy: EvictionPolicy, num_held: Callable[[], int]) -> None:
        self.num_blocks = num_blocks
        self.clock = 0
        self.last_access = np.zeros(self.num_blocks, np.int64)
        self.access_count = np.zeros(self.num_blocks, np.int32)
        self.prefix_length = np.zeros(self.num_blocks, np.int32)
        self.ref_count = np.zeros(self.num_blocks, np.int32)
        self._keys = np.zeros(self.num_blocks, np.uint64)
        self._log: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._num_logged = 0
        self._fresh = array("i")
        self._completed: list[tuple[Numbers, Numbers, bytes]] = []
        self._num_held = num_held
        self._held_then: int | None = None
        self.policy = policy
        self._trusted = type(policy).__module__.startswith("pc.cache.")
        self.order_only = type(policy) is LRU
        policy.bind(self)

    @property
    def num_held(self) -> int:
        """Blocks with a reference count above 0, vLLM's null block not counted."""
        return self._num_held() if self._held_then is None else self._held_then

    def keys_of(self, ids: Ids) -> npt.NDArray[np.uint64]:
        """64 bits of the hash of each block, its group counted in; 0 for one that has lost its hash."""
        keys: npt.NDArray[np.uint64] = self._keys.take(ids)
        return keys

    def acquire(self, sequence: TokenIds | Sequence[bytes]) -> list[Block]:
        """Refused: vLLM takes blocks, the policy only chooses."""
        raise NotImplementedError("acquire: blocks are taken by vLLM's scheduler")

    def _add(self, notify: Callable[..., None], *what: Any, count: int = 1) -> None:
        self._log.append((notify, what))
        self._num_logged += count
        if self._num_logged > MANY:
            self.flush()

    def took(self, numbers: Numbers) -> None:
        """Fresh blocks were taken."""
        if not self.order_only:
            self._add(self._take_fresh, numbers)

    def completed(self, blocks: list[Any], before: int, keys: list[bytes] | None = None) -> None:
        """Blocks from number `before` of their sequence on got hashes, or some did; `keys` where all have one."""
        if not self.order_only:
            # The property takes ten times as long.
            hashes = keys or [block._block_hash for block in blocks]
            if not keys and None in hashes:
                places = [n for n, key in enumerate(hashes, before + 1) if key is not None]
                blocks = [blocks[place - before - 1] for place in places]
                hashes = [key for key in hashes if key is not None]
            else:
                places = list(range(before + 1, before + 1 + len(blocks)))
            if hashes:
                noted = array("i", places), _numbers(blocks), _joined(hashes)
                self._add(self._take_completed, noted, count=len(blocks))

    def accessed(self, blocks: list[Any], returned: Sequence[Any] = ()) -> None:
        """Cached blocks were hit, in the order of their sequence; vLLM has raised their reference counts already.

        Of them the policy had chosen those `returned` as victims: to it they are blocks that were filled again.
        """
        self._add(self._notify_accessed, _numbers(blocks), _numbers(returned), self._num_held(), count=len(blocks))

    def shared(self, numbers: list[int]) -> None:
        """The reference count of each of these blocks fell, not to 0."""
        if numbers and not self.order_only:
            self._add(self._notify_shared, array("i", numbers))

    def released(self, numbers: Numbers) -> None:
        """The reference counts of these cached blocks fell to 0; in the order of their sequence."""
        self._add(self._notify_released, numbers, self._num_held(), count=len(numbers))

    def emptied(self, blocks: list[Any]) -> None:
        """The reference counts of these blocks without content fell to 0."""
        if not self.order_only:
            self._add(self._notify_emptied, _numbers(blocks))

    def lost(self, ids: Iterable[int]) -> None:
        """Blocks have lost their hashes."""
        if not self.order_only:
            self._add(self._notify_lost, array("i", ids))

    def finished(self, output_tokens: int, returns: float | None) -> None:
        """A request has ended; its releases follow."""
        self._add(self._notify_finished, output_tokens, returns)

    def hinted(self, ids: list[int], priority: int, ttl: float | None) -> None:
        """A request asked to keep these blocks; the policy hears it at once, since the time runs."""
        self.flush()
        self.policy.hinted(np.array(ids, np.int32), priority, ttl)

    def victims(self, count: int) -> Ids:
        """The policy's choice; RuntimeError for another number of blocks, or one twice."""
        self.flush()
        ids = self.policy.victims(count)
        name = type(self.policy).__name__
        if len(ids) != count:
            raise RuntimeError(f"{name}.victims: got {len(ids)}, needs {count} blocks")
        if not self._trusted and len(np.unique(ids)) != count:
            raise RuntimeError(f"{name}.victims: got a block twice")
        return ids

    def removed(self, numbers: list[int]) -> None:
        """Released blocks are gone, which the policy did not choose."""
        self.flush()
        self.policy.removed(np.array(numbers, np.int32))

    def flush(self) -> None:
        """Drains the log to the policy."""
        log, self._log, self._num_logged = self._log, [], 0
        try:
            for notify, what in log:
                notify(*what)
            self._notify_taken()
        finally:
            self._held_then = None

    def _take_fresh(self, numbers: Numbers) -> None:
        self._fresh += numbers

    def _take_completed(self, noted: tuple[Numbers, Numbers, bytes]) -> None:
        self._completed.append(noted)

    def _notify_taken(self) -> None:
        """Fresh and completed blocks since the last hit or release."""
        if self._fresh:
            ids, self._fresh = _ids(self._fresh), array("i")
            self.clock += 1
            self.ref_count[ids] = 1
            self.access_count[ids] = 1
            self.last_access[ids] = self.clock
            self._keys[ids] = 0
            self.policy.accessed(ids, False)
        if self._completed:
            places, numbers, hashes = (list(parts) for parts in zip(*self._completed, strict=True))
            self._completed = []
            ids = _ids(b"".join(numbers))
            self.prefix_length[ids] = _ids(b"".join(places))
            self._keys[ids] = _keys(hashes, list(map(len, numbers)))
            self.policy.completed(ids)

    def _notify_accessed(self, numbers: Numbers, returned: Numbers, held: int) -> None:
        self._notify_taken()
        self._held_then = held
        self.clock += 1
        ids = _ids(numbers)
        if not self.order_only:
            self.ref_count[ids] += 1
            self.access_count[ids] += 1
            self.last_access[ids] = self.clock
        if not returned:
            self.policy.accessed(ids, True)
            return
        back = _ids(returned)
        others = ids[~np.isin(ids, back)]
        if others.size:
            self.policy.accessed(others, True)
        self.policy.accessed(back, False)
        self.policy.completed(back)

    def _notify_shared(self, numbers: Numbers) -> None:
        self._notify_taken()
        self.ref_count[_ids(numbers)] -= 1

    def _notify_released(self, numbers: Numbers, held: int) -> None:
        self._notify_taken()
        self._held_then = held
        self.clock += 1
        ids = _ids(numbers)
        if not self.order_only:
            self.ref_count[ids] = 0
            self.last_access[ids] = self.clock
        self.policy.released(ids)

    def _notify_emptied(self, numbers: Numbers) -> None:
        self._notify_taken()
        self.ref_count[_ids(numbers)] = 0

    def _notify_lost(self, numbers: Numbers) -> None:
        self._notify_taken()
        self._keys[_ids(numbers)] = 0

    def _notify_finished(self, output_tokens: int, returns: float | None) -> None:
        self._notify_taken()
        if returns is not None:
            self.policy.returning(returns)
        self.policy.finished(output_tokens)

    def clear(self) -> None:
        """The prefix cache was emptied."""
        self._log, self._num_logged, self._completed, self._fresh = [], 0, [], array("i")
        for field in (self.ref_count, self.access_count, self.prefix_length, self._keys):
            field.fill(0)
        self.policy.clear()


def _numbers(blocks: Sequence[Any]) -> Numbers:
    """Numbers of blocks, taken while they are in the processor's caches."""
    return array("i", [block.block_id for block in blocks])


def _ids(numbers: Numbers | bytes) -> Ids:
    ids: Ids = np.frombuffer(numbers, np.int32)
    return ids


def _joined(hashes: list[bytes]) -> bytes:
    """Hashes of vLLM behind each other, those of several lengths cut to what `_keys` reads."""
    raw = b"".join(hashes)
    if hashes and len(raw) != len(hashes) * len(hashes[0]):
        raw = b"".join([key[:8] + key[-4:] for key in hashes])
    return raw


def _keys(parts: list[bytes], counts: list[int]) -> npt.NDArray[np.uint64]:
    """64 bits of each hash; they are of one length in each part, and longer where blocks are larger."""
    if len({len(raw) // count for raw, count in zip(parts, counts, strict=True)}) > 1:
        return np.concatenate([_keys([raw], [count]) for raw, count in zip(parts, counts, strict=True)])
    rows = np.frombuffer(b"".join(parts), np.uint8).reshape(sum(counts), -1)
    keys: npt.NDArray[np.uint64] = rows[:, :8].copy().view(np.uint64)[:, 0]
    # The last bytes of vLLM's key are the group: layers of one group do not stand for those of another.
    keys ^= rows[:, -4:].copy().view(">u4")[:, 0].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return keys
