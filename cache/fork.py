"""Forking a request, and rolling back its last tokens."""

from __future__ import annotations

from collections.abc import Hashable

from .request import Request
from .state import ManagerState


def fork(state: ManagerState, request_id: Hashable, new_request_id: Hashable) -> None:
    """Start a request on the same blocks; see `CacheManager.fork`."""
    parent = state.get(request_id)
    state.check_new("new_request_id", new_request_id)
    length = len(parent.tokens)
    if parent.committed < length:
        got = f"{request_id!r} with {parent.committed} of {length} tokens committed"
        raise ValueError(f"request_id: got {got}, needs all: commit them first")
    child = parent.copy()
    state.begin()
    if length % state.block_size:
        parent.check_tail = child.check_tail = True  # an unneeded check does no harm
    state.running[new_request_id] = child
    for group, pool in enumerate(state.pools):
        pool.share(child.held(group))


def rollback(state: ManagerState, request_id: Hashable, num_tokens: int) -> None:
    """Remove the last tokens of a request; see `CacheManager.rollback`."""
    request, size = state.get(request_id), state.block_size
    if not 0 <= num_tokens <= len(request.tokens):
        raise ValueError(f"num_tokens: got {num_tokens}, needs 0 to {len(request.tokens)}, the request's tokens")
    if not num_tokens:
        return
    length = len(request.tokens) - num_tokens
    committed, num_blocks = min(request.committed, length), -(-length // size)
    needed_from = [max(g.first_needed(committed, size), g.sink_blocks(size)) for g in state.groups]
    _check_resident(state, request, length, needed_from)
    if length // size < request.published:
        state.history.request_ended(request)  # its published blocks stay in the cache
    state.begin(request)
    complete = length // size
    for group, (pool, spec) in enumerate(zip(state.pools, state.groups, strict=True)):
        first = complete if spec.holds_states else num_blocks  # a block that is cut loses its state
        ids = request.tables[group][first : request.num_blocks].copy()
        if first < num_blocks:
            request.put_blocks(group, slice(first, num_blocks), -1)
        pool.release(ids[ids >= 0])
    request.new_states = [(group, block) for group, block in request.new_states if block < complete]
    request.pending = None
    request.committed, request.num_blocks = committed, num_blocks
    request.computed = min(request.computed, length)
    request.hit, request.published = min(request.hit, complete), min(request.published, committed // size)
    request.check_tail = length % size > 0
    request.digests = request.digests[:complete]
    if request.chain is not None and request.chain.hashed > complete:
        request.chain = None
        state.stop_writing(request)
    del request.tokens[length:]  # last, because this completes the verb


def _check_resident(state: ManagerState, request: Request, length: int, needed_from: list[int]) -> None:
    """Raise ValueError if a request cannot go back to `length` tokens, because blocks or a state were released.

    `needed_from` has for each group the first block that later queries read.
    """
    size, num_tokens = state.block_size, len(request.tokens) - length
    for group, (spec, table, first) in enumerate(zip(state.groups, request.tables, needed_from, strict=True)):
        if spec.holds_states:
            end = length // size - 1
            kept = length % size == 0 and table[end] >= 0 and (group, end) not in request.new_states
            if length and length != request.committed and not kept:
                needs = f"to leave the {request.committed} committed tokens or a length whose state is held"
                raise ValueError(f"num_tokens: got {num_tokens}, needs {needs}: the state at {length} was released")
        elif (table[first : -(-length // size)] < 0).any():
            raise ValueError(f"num_tokens: got {num_tokens}, needs fewer: blocks behind the window were released")
