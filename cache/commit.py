"""Committing written blocks: publish them, merge equal ones, and release those that have left a window."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from .allocation import Pairs
from .groups import Mask
from .hashing import Chain, split_digests
from .request import Request
from .runs import find_runs
from .state import ManagerState


def commit(state: ManagerState, request_id: Hashable, num_tokens: int) -> Any:
    """Publish the complete blocks before a position; see `CacheManager.commit`."""
    request = state.running.get(request_id) or state.get(request_id)
    if not 0 <= num_tokens <= len(request.tokens):
        raise ValueError(f"num_tokens: got {num_tokens}, needs 0 to {len(request.tokens)}, the request's tokens")
    first, last = request.published, num_tokens // state.block_size
    if state.prefix_only and last <= first and request.replaced is None and not request.host_slots:
        if num_tokens > request.committed:
            request.committed = num_tokens
        return []
    state.begin(request)
    if request.replaced is not None or request.host_slots:
        state.end_step(request)
    request.committed, request.computed = max(request.committed, num_tokens), max(request.computed, num_tokens)
    replaced: list[Pairs] = []
    if last > first:
        replaced = _publish_all(state, request_id, request, first, last)
    if state.prefix_only:
        return replaced[0] if replaced else []
    replaced = replaced or [[] for _ in state.pools]
    if request.new_states:
        _publish_states(state, request, replaced)
    # The last token may be computed again for its logits, so the blocks that it reads are kept.
    position = min(request.committed, request.computed, max(request.length - 1, 0))
    for group in range(len(state.pools)):
        state.leave_window(request, group, position)
    return state.per_group(replaced)


def _publish_all(state: ManagerState, request_id: Hashable, request: Request, first: int, last: int) -> list[Pairs]:
    """Publish logical blocks [first, last) in all groups; return (old block, new block) pairs by group."""
    state.stop_writing(request)
    _compute_digests(state, request, last)
    replaced = [_publish(state, request, group, first, last) for group in range(len(state.pools))]
    for user in state.reuses.values():
        state.log.later.append((user.published, request, first, last))
    request.published = last
    state.start_writing(request_id, request, request.committed // state.block_size)
    return replaced


def checkpoint(state: ManagerState, request_id: Hashable, num_tokens: int, group: int | None) -> int:
    """Allocate a block for the recurrent state after `num_tokens` tokens; see `CacheManager.checkpoint`."""
    request, size = state.get(request_id), state.block_size
    recurrent = [at for at, spec in enumerate(state.groups) if spec.holds_states]
    if group is None:
        if len(recurrent) != 1:
            raise ValueError(f"group: got None with {len(recurrent)} recurrent groups, needs the number of one")
        group = recurrent[0]
    elif group not in recurrent:
        raise ValueError(f"group: got {group}, needs one of the recurrent groups {recurrent}")
    length = len(request.tokens)
    if num_tokens % size or not 0 < num_tokens <= length:
        raise ValueError(f"num_tokens: got {num_tokens}, needs a multiple of {size}, one or more, up to {length}")
    block, pool = num_tokens // size - 1, state.pools[group]
    held = request.tables[group].item(block)
    if held >= 0:
        if (group, block) in request.new_states:
            return held
        raise ValueError(f"num_tokens: got {num_tokens}, but the request already holds that state")
    pool.check_available(1)
    state.begin(request)
    ids = pool.take(np.array([block + 1], np.int32), request.hint)
    request.put_blocks(group, block, ids.item(0))
    request.new_states = [*request.new_states, (group, block)]
    return ids.item(0)


def _compute_digests(state: ManagerState, request: Request, last: int) -> None:
    """Compute the hashes of a request's first `last` blocks that it does not have yet."""
    if last <= len(request.digests):
        return
    if request.chain is None:
        request.chain, request.digests = Chain(state.hasher, request.keys), request.digests[:0]
    request.digests = np.concatenate((request.digests, request.chain.extend(request.tokens, last)))


def _publish(state: ManagerState, request: Request, group: int, first: int, last: int) -> Pairs:
    """Publish logical blocks [first, last) of a request in one group; return (old block, new block) pairs.

    If another block with the same hash is published already, the request gets that block in place of its own.
    """
    pool, ids, digests = state.pools[group], request.tables[group][first:last], request.digests[first:last]
    present: Mask | None = None
    if not state.prefix_only:  # the table may have holes: blocks behind a window, and states without a checkpoint
        present = request.written_table(group, last)[first:] >= 0
        if not present.any():
            return []
        ids, digests = ids[present], digests[present]
    listed = pool.table.contains(ids) if state.listeners else None
    old, new = pool.publish(ids, digests, request.hint)
    if listed is None and not old.size:
        return []
    blocks = np.arange(first, last) if present is None else present.nonzero()[0] + first
    if listed is not None:
        fresh = ~listed & ~np.isin(ids, old)
        state.log.later.append((_notify_stored, state, group, request, blocks[fresh]))
    if not old.size:
        return []
    request.put_blocks(group, blocks[np.isin(ids, old)].astype(np.int32), new)
    request.keep_replaced(group, old)
    state.count(merged=old.size)
    return list(zip(old.tolist(), new.tolist(), strict=True))


def _publish_states(state: ManagerState, request: Request, replaced: list[Pairs]) -> None:
    """Publish the states that `checkpoint` allocated, up to the committed position."""
    size = state.block_size
    ready = [(group, block) for group, block in request.new_states if (block + 1) * size <= request.committed]
    request.new_states = [pair for pair in request.new_states if pair not in ready]
    for group, block in ready:
        replaced[group] += _publish(state, request, group, block, block + 1)


def _notify_stored(state: ManagerState, group: int, request: Request, blocks: Any) -> None:
    """Queue events for listeners about logical blocks that were published."""
    size = state.block_size
    for _, start, end in find_runs(blocks):
        hashes = split_digests(request.digests[start:end])
        parent = request.digests[start - 1].tobytes() if start else None
        tokens = request.tokens[start * size : end * size].tolist()
        state.events.append(("stored", group, hashes, parent, tokens, request.keys.extra_keys))
