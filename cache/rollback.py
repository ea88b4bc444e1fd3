"""Taking back the last tokens of a running request."""

from __future__ import annotations

from collections.abc import Hashable

from .request import SharedTail
from .state import ManagerState


def rollback(state: ManagerState, request_id: Hashable, num_tokens: int) -> None:
    """Takes back the last tokens of a request: see `CacheManager.rollback`."""
    request, size = state.get(request_id), state.block_size
    if not 0 <= num_tokens <= len(request.tokens):
        raise ValueError(f"num_tokens: got {num_tokens}, needs 0 to {len(request.tokens)}, its tokens")
    if not num_tokens:
        return
    length = len(request.tokens) - num_tokens
    committed, num_blocks = min(request.committed, length), -(-length // size)
    needed_from = [max(g.first_needed(committed, size), g.sink_blocks(size)) for g in state.groups]
    for group, (spec, table, first) in enumerate(zip(state.groups, request.tables, needed_from, strict=True)):
        if spec.holds_states:
            end = length // size - 1
            kept = length % size == 0 and table[end] >= 0 and (group, end) not in request.new_states
            if length and length != request.committed and not kept:
                raise ValueError(
                    f"num_tokens: got {num_tokens}, needs to end where a state is held or at the committed "
                    f"{request.committed} tokens: the state at {length} is gone"
                )
        elif (table[first:num_blocks] < 0).any():
            raise ValueError(f"num_tokens: got {num_tokens}, needs less: blocks left the window for good")
    for pool, spec, table in zip(state.pools, state.groups, request.tables, strict=True):
        first = length // size if spec.holds_states else num_blocks  # of a block that is cut there is no state any more
        ids = table[first : request.num_blocks]
        pool.release(ids[ids >= 0])
        table[first : request.num_blocks] = -1
    request.new_states = [(group, block) for group, block in request.new_states if block < length // size]
    request.released = [min(pair) for pair in zip(request.released, needed_from, strict=True)]
    del request.tokens[length:]
    request.pending = None
    request.committed, request.num_blocks = committed, num_blocks
    request.published = min(request.published, committed // size)
    if length % size:
        request.shared_tail = SharedTail(-1)
    complete = length // size
    if len(request.digests) > complete:
        request.digests = request.digests[:complete]
    if request.chain is not None and request.chain.hashed > complete:
        request.chain = None
        state.stop_writing(request)
