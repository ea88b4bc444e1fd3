"""What becomes of blocks once they are written: findable, merged with equal ones, released behind a window."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from .allocation import Pairs
from .groups import Mask
from .hashing import Chain, Words
from .pool import OutOfBlocks
from .request import Request
from .runs import find_runs
from .state import ManagerState


def commit(state: ManagerState, request_id: Hashable, num_tokens: int) -> Any:
    """Publishes the complete blocks before a position: see `CacheManager.commit`."""
    request = state.running.get(request_id) or state.get(request_id)
    if not 0 <= num_tokens <= len(request.tokens):
        raise ValueError(f"num_tokens: got {num_tokens}, needs 0 to {len(request.tokens)}, its tokens")
    if request.replaced is not None or request.loading:
        state.end_step(request)
    first, last = request.published, num_tokens // state.block_size
    if num_tokens > request.committed:
        request.committed = num_tokens
    replaced: list[Pairs] = []
    if last > first:
        if request.writing is not None:
            state.stop_writing(request)
        known = request.digests
        digests = known[first:last] if last <= len(known) else _digests(state, request, first, last)
        groups = range(len(state.pools))
        replaced = [_publish(state, request, group, first, last, digests) for group in groups]
        request.published = last
        following = request.committed // state.block_size
        if following < len(known):
            state.start_writing(request_id, request, known[following].tobytes())
    if state.simple:
        return replaced[0] if replaced else []
    replaced = replaced or [[] for _ in state.pools]
    if request.new_states:
        _publish_states(state, request, replaced)
    for group in range(len(state.pools)):
        state.leave_window(request, group)
    return state.per_group(replaced)


def checkpoint(state: ManagerState, request_id: Hashable, num_tokens: int, group: int | None) -> int:
    """Takes a block for a state: see `CacheManager.checkpoint`."""
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
    table = request.tables[group]
    if table[block] >= 0:
        if (group, block) in request.new_states:
            return int(table[block])
        raise ValueError(f"num_tokens: got {num_tokens}, whose state the request holds already")
    if not pool.available:
        raise OutOfBlocks(1, 0)
    counts = [int(at == group) for at in range(len(state.pools))]
    state.require(counts, [np.empty(0, np.int32) for _ in counts])
    table[block : block + 1] = ids = pool.take(np.array([block + 1], np.int32))
    if request.priority or request.ttl is not None:
        pool.hinted(ids, request.priority, request.ttl)
    request.new_states.append((group, block))
    request.released[group] = min(request.released[group], block)
    return int(ids[0])


def _digests(state: ManagerState, request: Request, first: int, last: int) -> Words:
    """Hashes of blocks [first, last), of which `digests` lacks some."""
    known = request.digests
    if request.chain is None:
        request.chain = Chain(state.hasher, request.keys)
    before = request.chain.hashed
    fresh = request.chain.extend(request.tokens, last)
    request.chain.path = []
    if first >= before:
        return fresh[first - before :]
    if not before:
        request.digests = fresh
        return fresh[first:]
    return np.concatenate((known[first:before], fresh))


def _publish(state: ManagerState, request: Request, group: int, first: int, last: int, digests: Words) -> Pairs:
    """Makes logical blocks [first, last) findable and swaps in the duplicates of those that already were."""
    pool, table = state.pools[group], request.tables[group]
    ids = table[first:last]
    present: Mask | None = None
    if not state.simple:  # blocks left a window, or a state was not kept
        present = ids >= 0
        for at, block in request.new_states:
            if at == group and first <= block < last:
                present[block - first] = False
        if not present.any():
            return []
        ids, digests = ids[present], digests[present]
    heard = bool(state.listeners.heard) or state.partial is not None
    listed = pool.table.contains(ids) if heard else None
    old, new = pool.publish(ids, digests)
    if listed is None and not old.size:
        return []
    blocks = np.arange(first, last) if present is None else present.nonzero()[0] + first
    if listed is not None:
        fresh = ~listed & ~np.isin(ids, old)
        _tell_stored(state, group, request, blocks[fresh], digests[fresh])
    if not old.size:
        return []
    table[blocks[np.isin(ids, old)]] = new
    request.keep_replaced(group, old)
    state.merged += old.size
    if request.priority or request.ttl is not None:
        pool.hinted(new, request.priority, request.ttl)
    return list(zip(old.tolist(), new.tolist(), strict=True))


def _publish_states(state: ManagerState, request: Request, replaced: list[Pairs]) -> None:
    """Makes findable the states of `checkpoint` that lie before the committed position."""
    size = state.block_size
    ready = [(group, block) for group, block in request.new_states if (block + 1) * size <= request.committed]
    request.new_states = [pair for pair in request.new_states if pair not in ready]
    for group, block in ready:
        digest = _digest_of(state, request, group, block)
        replaced[group] += _publish(state, request, group, block, block + 1, digest)


def _digest_of(state: ManagerState, request: Request, group: int, block: int) -> Words:
    """The hash of a logical block, `[1, words]`."""
    if block < len(request.digests):
        return request.digests[block : block + 1]
    number, pool = int(request.tables[group][block]), state.pools[group]
    if number >= 0 and pool.table.lists(number):
        own: Words = pool.words[number : number + 1].copy()
        return own
    size = state.block_size
    return state.hasher.hash_blocks(request.tokens[: (block + 1) * size], request.keys)[block:]


def _tell_stored(
    state: ManagerState, group: int, request: Request, blocks: npt.NDArray[np.intp], digests: Words
) -> None:
    """Tells listeners and the index of block beginnings of logical blocks that became findable."""
    size, tokens = state.block_size, request.tokens
    width = 8 * digests.shape[1]
    for at, start, end in find_runs(blocks):
        raw = digests[at : at + end - start].tobytes()
        hashes = [raw[i : i + width] for i in range(0, len(raw), width)]
        parent = _digest_of(state, request, group, start - 1).tobytes() if start else None
        if state.partial is not None:
            for block, before, own in zip(range(start, end), [parent, *hashes], hashes, strict=False):
                state.partial.add(request, block, before, own)
        if state.listeners.heard:
            state.listeners.add(
                "stored", group, hashes, parent, tokens[start * size : end * size].tolist(), request.keys.extra_keys
            )
