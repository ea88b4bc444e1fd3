"""A second request on the blocks of a running one."""

from __future__ import annotations

from .request import Request
from .state import ManagerState


def fork(state: ManagerState, request: Request) -> Request:
    """A request on the same blocks: see `CacheManager.fork`."""
    for group, pool in enumerate(state.pools):
        pool.share(request.held(group))
    child = request.copy()
    child.shared_tail = request.shared_tail = True
    return child
