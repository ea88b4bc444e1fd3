"""Handing blocks that are about to be evicted to a lower tier, outside the manager's lock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from .pool import EMPTY
from .state import ManagerState, Saving, Shortage
from .table import Ids

Batch = list[tuple[int, Ids, list[bytes]]]
"""Blocks and their hashes, and of which group they are."""


def save_and_run(
    state: ManagerState,
    lock: AbstractContextManager[object],
    verb: Callable[..., Any],
    args: tuple[Any, ...],
    shortage: Shortage,
) -> Any:
    """Runs a verb that has returned a shortage: what it has to evict is handed to `on_evict` first, without the lock.

    Meanwhile other verbs may come and go, so it is run again from its start, under the lock and with a `Saving`, until
    it finds enough. If the callback raises, the blocks are published again and the verb has changed nothing.
    """
    saving = Saving(len(state.pools))

    def locked(function: Callable[..., Any], *arguments: Any) -> Any:
        with lock: return state.run(function, arguments)  # fmt: skip  # noqa: E701  in one line no interrupt is between

    try:
        result: Any = shortage
        while type(result) is Shortage:
            taken = _save(state, locked(_choose, saving, result))
            saving.offered = [np.concatenate(pair) for pair in zip(saving.offered, result.leaving, strict=True)]
            locked(_evict, saving, taken)
            result = locked(verb, *args, saving)
        locked(end, saving)
        return result
    except BaseException:
        locked(end, saving)
        raise


def _choose(state: ManagerState, saving: Saving, shortage: Shortage) -> Batch:
    """Takes victims out of the table, pins what must not be among them; they and what is to be released are saved."""
    leaving: Batch = []
    _note(state, saving)
    if saving not in state.saving:
        state.saving.append(saving)
    for group, (pool, count, held) in enumerate(zip(state.pools, shortage.counts, shortage.held, strict=True)):
        fresh = held[~np.isin(held, saving.pinned[group])]
        if fresh.size:
            pool.hold(fresh)
            saving.pinned[group] = np.concatenate((saving.pinned[group], fresh))
        if count:
            victims, hashes = pool.remove_victims(count)
            saving.batch.append((group, victims, hashes))
            saving.hashes[group] = frozenset(hashes)
        if (blocks := shortage.leaving[group]).size:
            leaving.append((group, blocks, pool.digests_of(blocks)))
    return saving.batch + leaving


def _note(state: ManagerState, saving: Saving) -> None:
    """Notes how to undo what is about to be done with a saving."""
    before = list(saving.batch), list(saving.hashes), list(saving.pinned), state.offloaded
    state.changes.append((_undo, state, saving, before))


def _undo(state: ManagerState, saving: Saving, before: Any) -> None:
    saving.batch, saving.hashes, saving.pinned, state.offloaded = before
    if saving not in state.saving:
        state.saving.append(saving)


def _save(state: ManagerState, batch: Batch) -> int:
    """Hands blocks over; how many the tier took."""
    taken = 0
    for group, blocks, hashes in batch:
        if state.on_evict is not None:
            kept = state.on_evict(group, blocks.copy(), list(hashes))
            if isinstance(kept, (list, tuple, set, frozenset, dict)):
                taken += sum(1 for block_hash in hashes if block_hash in kept)
    return taken


def _evict(state: ManagerState, saving: Saving, taken: int) -> None:
    """Frees the blocks that were saved."""
    _note(state, saving)
    batch, saving.batch, saving.hashes = saving.batch, [], [frozenset()] * len(saving.hashes)
    state.offloaded += taken
    for group, blocks, lost in batch:
        pool = state.pools[group]
        pool.evict(blocks)
        back = pool.table.find(np.frombuffer(b"".join(lost), np.uint64).reshape(len(lost), -1)) >= 0
        state.removed(group, [block_hash for block_hash, there in zip(lost, back, strict=True) if not there])


def end(state: ManagerState, saving: Saving) -> None:
    """Ends the saving for a verb: what is still in hand is published again, and nothing is pinned any more."""
    if saving not in state.saving:
        return
    _note(state, saving)
    batch, pinned = saving.batch, saving.pinned
    saving.batch, saving.hashes, saving.pinned = [], [frozenset()] * len(pinned), [EMPTY] * len(pinned)
    state.saving.remove(saving)
    for group, blocks, hashes in batch:
        state.pools[group].restore(blocks, hashes)
    for pool, ids in zip(state.pools, pinned, strict=True):
        if ids.size:
            pool.release(ids)
