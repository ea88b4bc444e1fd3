"""Requests that give up their blocks for a while, and what of their KV waits in host memory."""

from __future__ import annotations

from collections.abc import Hashable

from .books import Books
from .preemption import Preempted
from .request import Request


def preempt(books: Books, request_id: Hashable, request: Request, swap: bool) -> list[tuple[int, int]]:
    """Ends a running request but keeps its tokens: see `CacheManager.preempt`."""
    saved = Preempted(request.tokens, request.keys, request.committed, request.priority)
    pairs: list[tuple[int, int]] = []
    if swap and books.simple:
        written = request.tables[0][: -(-request.committed // books.block_size)].tolist()
        saved.slots = books.host.take(len(written))
        pairs = list(zip(written, saved.slots, strict=False))
    books.release(request_id, request)
    books.preempted[request_id] = saved
    books.preemptions += 1
    return pairs


def forget(books: Books, request_id: Hashable) -> None:
    """Drops a preempted request."""
    books.host.give_back(books.preempted.pop(request_id).slots)
