"""Taking back the last tokens of a running request."""

from __future__ import annotations

from .request import Request
from .state import ManagerState


def rollback(state: ManagerState, request: Request, num_tokens: int) -> None:
    """Takes back the last tokens of a request: see `CacheManager.rollback`."""
    length, size = len(request.tokens) - num_tokens, state.block_size
    committed, num_blocks = min(request.committed, length), -(-length // size)
    needed_from = [max(g.first_needed(committed, size), g.sink_blocks(size)) for g in state.groups]
    for spec, table, first in zip(state.groups, request.tables, needed_from, strict=True):
        if spec.aligned and committed < request.committed and length % size:
            raise ValueError(f"num_tokens: got {num_tokens}, needs to end at a block: the state within it is gone")
        if (table[first:num_blocks] < 0).any():
            raise ValueError(f"num_tokens: got {num_tokens}, needs less: blocks left the window for good")
    for pool, table in zip(state.pools, request.tables, strict=True):
        ids = table[num_blocks : request.num_blocks]
        pool.release(ids[ids >= 0])
    request.released = [min(pair) for pair in zip(request.released, needed_from, strict=True)]
    del request.tokens[length:]
    request.committed, request.num_blocks = committed, num_blocks
    request.published = min(request.published, committed // size)
    request.shared_tail |= length % size != 0
    if request.chain is not None and request.chain.hashed > length // size:
        request.chain = None
        state.stop_writing(request)
