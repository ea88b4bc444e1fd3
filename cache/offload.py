"""The transfer of evicted blocks to a lower tier, without the manager's lock, before the verb returns.

By then the verb is complete and its request has the blocks. The blocks still hold the KV of their hashes, because the
caller does not know its new slots before the verb returns. A hidden holder, counted like a request, keeps them from
being reused if the request ends meanwhile.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from .hashing import split_digests
from .table import Ids

State = Any  # a `ManagerState`, whose module imports this one

OnEvict = Callable[[int, Ids, list[bytes]], "Collection[bytes] | object | None"]

log = logging.getLogger("pc.cache")


_current = threading.local()


def _mark() -> set[None]:
    """Return an object that lives exactly as long as the current thread.

    `sys._current_frames` would also show which threads have ended. But that function may collect garbage while it holds
    a lock of the interpreter. Two threads that call it can then wait for each other forever (CPython 3.11).
    """
    mark: set[None] = _current.__dict__.setdefault("mark", set())
    return mark


class Evicted:
    """A hidden holder of evicted blocks during the call of `on_evict`.

    Attributes:
        victims: For each group that evicted blocks: the group, the blocks, and their hashes.
        taken: Number of blocks that the tier took.
        failed: Number of calls of `on_evict` that raised.
    """

    def __init__(self, victims: list[tuple[int, Ids, list[bytes]]]) -> None:
        self.victims = victims
        self.taken = self.failed = 0
        self._thread, self._inside = weakref.ref(_mark()), threading.Lock()

    @property
    def is_over(self) -> bool:
        """Whether no thread passes these blocks to a tier any more.

        True if the thread that evicted them has ended, or if that same thread reads this property outside of
        `on_evict`.
        """
        return not self._inside.locked() if self._thread() is _mark() else self._thread() is None

    def hand_over(self, state: State) -> None:
        """Call `on_evict` with the blocks of each group."""
        with self._inside: self._hand_over(state)  # fmt: skip  # noqa: E701  on one line, so no interrupt comes between

    def _hand_over(self, state: State) -> None:
        for group, blocks, hashes in self.victims:
            on_evict = state.on_evict
            # If an interrupt's handler called the manager, that call has ended this transfer.
            if on_evict is None or self not in state.offloading:
                return
            try:
                kept = on_evict(group, blocks.copy(), list(hashes))
            except Exception:
                self.failed += 1
                log.exception("on_evict raised; %d blocks are lost, the manager continues", len(hashes))
            else:
                if isinstance(kept, (list, tuple, set, frozenset, dict)):
                    self.taken += sum(1 for block_hash in hashes if block_hash in kept)


def run(state: State, lock: Any, verb: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a verb under the lock. Then, without the lock, pass the blocks that it evicted to `on_evict`."""
    with lock: result, evicted = state.run(_hold_evicted, (verb, args))  # fmt: skip  # noqa: E701  see `hand_over`
    if evicted is not None:
        try:
            evicted.hand_over(state)
        finally:
            with lock: state.settle()  # fmt: skip  # noqa: E701  releases the holder's blocks
    return result


def _hold_evicted(state: State, verb: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Evicted | None]:
    """Run a verb; return its result, and a holder of the blocks that it evicted."""
    result = verb(state, *args)
    gone = state.log.evicted
    if not gone:
        return result, None
    victims = []
    for group, pool in enumerate(state.pools):
        mine = [(ids, split_digests(words)) for of, ids, words, *_ in gone if of is pool]
        if mine:
            blocks = np.concatenate([ids for ids, _ in mine])
            victims.append((group, blocks, [block_hash for _, hashes in mine for block_hash in hashes]))
            pool.share(blocks)
    evicted = Evicted(victims)
    state.offloading = [*state.offloading, evicted]
    return result, evicted
