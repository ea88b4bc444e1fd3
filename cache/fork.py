"""A second request on the blocks of a running one."""

from __future__ import annotations

from collections.abc import Hashable

from .request import SharedTail
from .state import ManagerState


def fork(state: ManagerState, request_id: Hashable, new_request_id: Hashable) -> None:
    """Starts a request on the same blocks: see `CacheManager.fork`."""
    parent = state.get(request_id)
    state.check_new("new_request_id", new_request_id)
    length = len(parent.tokens)
    if parent.committed < length and any(group.holds_states for group in state.groups):
        raise ValueError(
            f"request_id: got {request_id!r} with {parent.committed} of {length} tokens committed, needs all: "
            "the state of a recurrent group is there only once it has been computed"
        )
    child = parent.copy()
    state.running[new_request_id] = child
    for group, pool in enumerate(state.pools):
        pool.share(child.held(group))
    if length % state.block_size:
        child.shared_tail = parent.shared_tail = parent.shared_tail or SharedTail(length)
