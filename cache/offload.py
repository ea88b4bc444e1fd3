"""Handing evicted blocks to a lower tier, before the verb that evicted them returns and outside the manager's lock.

By then the verb is complete and its request has the blocks. What they hold is still there: no request has their new
slots before the verb returns, and a reference keeps them from being handed out again should the request end meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np

from .state import ATTEMPTS, Handover, ManagerState, Saving, Victims
from .table import Ids

log = logging.getLogger("pc.cache")


def run(state: ManagerState, lock: Any, verb: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Runs a verb under the lock, then hands what it has evicted to `on_evict` without it."""
    handover = Handover()

    def locked(function: Callable[..., Any], *arguments: Any) -> Any:
        with lock: return state.run(function, arguments)  # fmt: skip  # noqa: E701  in one line no interrupt is between

    try:
        result = locked(_collect, handover, verb, args)
        if handover.victims:
            for group, blocks, hashes in handover.victims:
                _hand_over(state, handover, group, blocks, hashes)
            locked(_end, handover)
        return result
    except BaseException:
        for attempt in range(ATTEMPTS):
            try:
                locked(_end, handover)
                break
            except BaseException:
                if attempt == ATTEMPTS - 1:
                    raise
        raise


def _collect(state: ManagerState, handover: Handover, verb: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Runs a verb and takes a reference on what it evicts."""
    state.evicted = evicted = Victims()
    result = verb(state, *args)
    state.evicted = None
    if evicted:
        state.changes.growth(handover.victims)
        state.changes.fields(state, "saving")
        for group in sorted({group for group, _, _ in evicted}):
            blocks = np.concatenate([ids for of, ids, _ in evicted if of == group])
            hashes = [block_hash for of, _, some in evicted if of == group for block_hash in some]
            handover.victims.append((group, blocks, hashes))
            state.pools[group].share(blocks)
        state.saving = [*state.saving, Saving(ref(handover), threading.get_ident(), handover.victims)]
    return result


def _hand_over(state: ManagerState, handover: Handover, group: int, blocks: Ids, hashes: list[bytes]) -> None:
    """Calls `on_evict` with the blocks of one group."""
    on_evict = state.on_evict
    if on_evict is None:
        return
    try:
        kept = on_evict(group, blocks.copy(), list(hashes))
    except Exception:
        handover.failed += 1
        log.exception("on_evict raised; %d blocks are lost, the manager goes on", len(hashes))
    else:
        if isinstance(kept, (list, tuple, set, frozenset, dict)):
            handover.taken += sum(1 for block_hash in hashes if block_hash in kept)


def _end(state: ManagerState, handover: Handover) -> None:
    """Counts what became of the blocks, and drops the references on them."""
    if any(saving.handover() is handover for saving in state.saving):
        state.changes.fields(state, "offloaded", "failed_offloads")
        state.offloaded += handover.taken
        state.failed_offloads += handover.failed
        state.end_saving(lambda saving: saving.handover() is handover)
