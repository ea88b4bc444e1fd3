"""Handing blocks that are about to be evicted to a lower tier, outside the manager's lock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from .pool import EMPTY
from .state import ManagerState, MustEvict
from .table import Ids

Batch = list[tuple[int, Ids, list[bytes]]]
"""Per group: its number, blocks and their hashes."""


def run_with_room(
    state: ManagerState, lock: AbstractContextManager[object], verb: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    """Runs a verb; what it has to evict is handed to `on_evict` first, without the lock.

    Blocks in hand are held by nobody else and keep their content. If the callback raises, they are findable again and
    the verb has changed nothing.

    Args:
        state: Of the manager.
        lock: The manager's.
        verb: Called with the state and `args`, under the lock; raises MustEvict before it changes anything.
        args: Its arguments.
    """
    pinned = [EMPTY for _ in state.pools]  # what the verb is about to hold must not be evicted for it
    with lock:
        state.pinned.append(pinned)
    try:
        while True:
            with lock:
                state.adopted = pinned
                try:
                    return verb(state, *args)
                except MustEvict as need:
                    batch = _choose(state, need, pinned)
                finally:
                    state.adopted = None
            _save(state, lock, batch)
    finally:
        with lock:
            state.pinned[:] = [ids for ids in state.pinned if ids is not pinned]
            for pool, ids in zip(state.pools, pinned, strict=True):
                pool.release(ids)
            state.listeners.tell()


def _choose(state: ManagerState, need: MustEvict, pinned: list[Ids]) -> Batch:
    """Takes victims out of the table, and keeps them and what must not be among them from being handed out."""
    batch: Batch = []
    for group, (pool, count, held) in enumerate(zip(state.pools, need.counts, need.held, strict=True)):
        fresh = held[~np.isin(held, pinned[group])]
        if fresh.size:
            pool.hold(fresh)
            pinned[group] = np.concatenate((pinned[group], fresh))
        if count:
            victims, hashes = pool.remove_victims(count)
            pool.pin(victims)
            state.saving.append((group, victims))
            batch.append((group, victims, hashes))
    return batch


def _save(state: ManagerState, lock: AbstractContextManager[object], batch: Batch) -> None:
    """Hands blocks over and frees them, or makes all of them findable again."""
    taken = 0
    try:
        for group, blocks, hashes in batch:
            if state.on_evict is not None:
                kept = state.on_evict(group, blocks.copy(), list(hashes))
                if isinstance(kept, (list, tuple, set, frozenset, dict)):
                    taken += sum(1 for block_hash in hashes if block_hash in kept)
    except BaseException:
        with lock:
            for group, blocks, hashes in batch:
                _forget(state, blocks)
                state.pools[group].restore(blocks, hashes)
        raise
    with lock:
        state.offloaded += taken
        for group, blocks, hashes in batch:
            _forget(state, blocks)
            state.pools[group].give_up(blocks)
            state.removed(group, hashes)


def _forget(state: ManagerState, blocks: Ids) -> None:
    state.saving[:] = [entry for entry in state.saving if entry[1] is not blocks]
