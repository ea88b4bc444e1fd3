"""Text of a prompt that is cached at another position or behind other text: what `reuse="anywhere"` finds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .allocation import MovedSpan, Span
from .content import Found
from .hashing import Chain, Words
from .keys import MOVED, EncodedKeys, mark_moved
from .lookup import Hit, find_prefix
from .request import Request
from .state import ManagerState
from .table import Ids


def extend_anywhere(state: ManagerState, request: Request, hit: Hit, segments: Sequence[Span] | None) -> Hit:
    """A hit of exact blocks with what is cached behind it, or elsewhere; the request's identity follows from it.

    First come blocks that another such request has left behind the same exact ones, then what is found by content.
    """
    content = state.content
    if content is None or request.keys.placed or hit.position >= len(request.tokens) - 1:
        return hit  # KV behind a key that is placed within text hangs on more than tokens
    size, exact, root = state.block_size, hit.blocks, request.root
    assert root is not None
    if content.approximate and not hit.copied and exact < len(request.digests):
        hit = _follow_approximate(state, request, hit)
    end = min(hit.num_tokens, len(request.tokens) - 1)
    tokens = np.frombuffer(request.tokens[:end], np.uint32)
    found = list(content.find(tokens, hit.position, end, root))
    if not found:
        return hit
    if segments is not None:
        found = [_cut(run, span) for run in found for span in segments]
    found = _fitting(state, hit, [run for run in found if run.end - run.start >= size])
    if found:
        sources = np.unique(np.concatenate([run.slots // size for run in found])).astype(np.int32)
        if hit.source is not None:  # held already
            sources = np.setdiff1d(sources, hit.source)
        hit = hit._replace(moved=found, sources=sources)
        if hit.blocks == exact:
            _set_identity(state, request, found[0].start // size)
    return hit


def _follow_approximate(state: ManagerState, request: Request, hit: Hit) -> Hit:
    """A hit that goes on with the blocks of a request whose KV is approximate from the same block on."""
    pool, digests, keys, chain = state.pools[0], request.digests, request.keys, request.chain
    _set_identity(state, request, hit.blocks, hit.blocks + 1)
    ids = pool.table.leading(request.digests, hit.blocks)
    if not ids.size:
        request.digests, request.keys, request.chain = digests, keys, chain
        return hit
    _set_identity(state, request, hit.blocks)
    ids = pool.table.leading(request.digests, hit.blocks)
    held = np.concatenate((hit.groups[0].held, ids))
    return find_prefix(held, len(request.tokens), hit.num_tokens, state.block_size)


def _set_identity(state: ManagerState, request: Request, block: int, end: int | None = None) -> None:
    """Gives a request's blocks from `block` on an identity of their own, up to `end`; before it stays what was."""
    if request.keys.placed:  # a shorter look has set it
        keys: EncodedKeys = request.keys
    else:
        keys = mark_moved(request.keys, block * state.block_size)
    before: Words = request.digests[:block]
    count = len(request.tokens) // state.block_size if end is None else end
    chain = Chain.behind(state.hasher, keys, before, block)
    request.keys, request.chain = keys, chain
    request.digests = np.concatenate((before, chain.extend(request.tokens, count)))


def _cut(run: Found, span: Span) -> Found:
    """What of a run lies in a span."""
    start, end = max(run.start, span[0]), min(run.end, span[1])
    if start >= end:
        return run._replace(end=run.start)
    return Found(start, end, run.slots[start - run.start : end - run.start], run.delta)


def _fitting(state: ManagerState, hit: Hit, found: list[Found]) -> list[Found]:
    """The first runs whose blocks can be held until commit beside those that the request takes."""
    pool, (part,), kept = state.pools[0], hit.groups, list[Found]()
    held: Ids = part.held if hit.source is None else np.concatenate((part.held, hit.source))
    room = pool.available - part.prefix_lengths.size
    for run in found:
        held = np.union1d(held, run.slots // state.block_size).astype(np.int32)
        if pool.unreferenced(held) > room:
            break
        kept.append(run)
    return kept


def moved_spans(found: Sequence[Found], table: Ids, block_size: int) -> list[MovedSpan]:
    """The runs of a hit with the slots of the request's own blocks."""
    spans = []
    for run in found:
        positions = np.arange(run.start, run.end)
        targets = table[positions // block_size].astype(np.int64) * block_size + positions % block_size
        spans.append(MovedSpan(run.start, run.end, run.slots, run.delta, targets))
    return spans


def root_of(state: ManagerState, keys: EncodedKeys) -> bytes | None:
    """What stands for keys and salt of text that is found by content; None where a key is placed within it."""
    if any(key != MOVED for _, key in keys.placed):
        return None
    return Chain(state.hasher, keys._replace(placed=())).root
