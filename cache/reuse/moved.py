"""`reuse="anywhere"`: text of a prompt that is cached at another position or after other text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...triton_ops._core.checks import check_integer, check_share
from ..hashing import Chain, Words
from ..keys import MOVED, EncodedKeys, KeyAt, approximate_from
from ..lookup import Hit, find_prefix
from ..pool import BlockPool
from ..request import Request
from ..runs import MovedSpan, Slots, Span
from ..table import Ids
from .content import ContentIndex, Stamps


class MovedText:
    """An index (see `pc.cache.reuse`) that finds text of the prompt at any position, by its tokens."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool, self._block_size = pool, pool.hasher.block_size
        namespace_bytes = len(pool.hasher.new().digest())
        self.index = ContentIndex(pool.num_blocks, self._block_size, namespace_bytes, self._stamps)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.index.nbytes

    def published(self, request: Request, first: int, last: int) -> None:
        """Add blocks to the index, exact ones and approximate ones separately."""
        table, size = request.tables[0], self._block_size
        namespace, moved = self._namespace_of(request.keys), approximate_from(request.keys)
        border = last if moved is None else min(max(moved // size, first), last)
        for begin, end in ((first, border), (border, last)):
            ids = table[begin:end].copy()
            if namespace is None:
                self.index.leave_out(ids)
            elif begin < end:
                before = table.item(begin - 1) if begin else -1
                tokens, stamps = request.tokens[begin * size : end * size], self._pool.taken_at[ids]
                self.index.add(ids, stamps, begin, before, tokens, namespace, end == border)

    def _stamps(self, ids: Ids) -> Stamps:
        """Return the tick at which each block was allocated; -1 for a block that is not published."""
        stamps: Stamps = np.where(self._pool.table.contains(ids), self._pool.taken_at[ids], -1)
        return stamps

    def removed(self, words: Words) -> None:
        """Do nothing: an entry is valid only while its block is published."""

    def extend(self, request: Request, hit: Hit, reuse: str, segments: Sequence[Span] | None) -> Hit:
        """Return a hit of exact blocks, extended by approximate KV of the text after it.

        The extension begins with approximate blocks that another request computed after the same exact blocks. Text
        found by content follows. The approximate blocks of the request get other hashes than exact ones.
        """
        if reuse != "anywhere" or request.keys.placed or hit.position >= len(request.tokens) - 1:
            return hit  # KV after a key placed inside text depends on more than tokens
        size, exact, namespace = self._block_size, hit.blocks, request.namespace
        assert namespace is not None
        if self.index.approximate and not hit.copied and exact < len(request.digests):
            hit = self._follow_approximate(request, hit)
        end = min(hit.num_tokens, len(request.tokens) - 1)
        tokens = np.frombuffer(request.tokens[:end], np.uint32)
        found = list(self.index.find(tokens, hit.position, end, namespace))
        if not found:
            return hit
        if segments is not None:
            found = [_cut(run, span) for run in found for span in segments]
        found = self._fitting(hit, [run for run in found if run.end - run.start >= size])
        if found:
            sources = np.unique(np.concatenate([run.slots // size for run in found])).astype(np.int32)
            borrowed = np.concatenate((hit.borrowed, np.setdiff1d(sources, hit.borrowed)))
            hit = hit._replace(borrowed=borrowed, moved=found)
            if hit.blocks == exact:
                self._set_identity(request, found[0].start // size)
        return hit

    def _follow_approximate(self, request: Request, hit: Hit) -> Hit:
        """Return the hit, continued with blocks of another request whose KV is approximate from the same block on."""
        table, digests, keys, chain = self._pool.table, request.digests, request.keys, request.chain
        self._set_identity(request, hit.blocks, hit.blocks + 1)
        ids = table.leading(request.digests, hit.blocks)
        if not ids.size:
            request.digests, request.keys, request.chain = digests, keys, chain
            return hit
        self._set_identity(request, hit.blocks)
        ids = table.leading(request.digests, hit.blocks)
        held = np.concatenate((hit.groups[0].held, ids))
        return find_prefix(held, len(request.tokens), hit.num_tokens, self._block_size)

    def _set_identity(self, request: Request, block: int, end: int | None = None) -> None:
        """Give a request's blocks from `block` to `end` the hashes of blocks with approximate KV.

        Earlier blocks keep their hashes.
        """
        # An earlier, shorter call may have marked the keys.
        keys = request.keys if request.keys.placed else _mark_moved(request.keys, block * self._block_size)
        before: Words = request.digests[:block]
        count = len(request.tokens) // self._block_size if end is None else end
        chain = Chain(self._pool.hasher, keys)
        if block:
            chain.restart(block, before[-1].tobytes())
        request.keys, request.chain = keys, chain
        request.digests = np.concatenate((before, chain.extend(request.tokens, count)))

    def _fitting(self, hit: Hit, found: list[MovedSpan]) -> list[MovedSpan]:
        """Return as many of the first runs as the pool has room for: their blocks are held until the next commit."""
        pool, (part,), kept = self._pool, hit.groups, list[MovedSpan]()
        held: Ids = np.concatenate((part.held, hit.borrowed))
        room = pool.available - part.fresh.size
        for run in found:
            held = np.union1d(held, run.slots // self._block_size).astype(np.int32)
            if pool.unreferenced(held) > room:
                break
            kept.append(run)
        return kept

    def _namespace_of(self, keys: EncodedKeys) -> bytes | None:
        """Return the identity of keys and salt for text found by content; None if a key is placed inside the text."""
        if any(key != MOVED for _, key in keys.placed):
            return None
        return Chain(self._pool.hasher, keys._replace(placed=())).namespace


def _cut(run: MovedSpan, span: Span) -> MovedSpan:
    """Return the part of a run inside a span."""
    start = max(run.start, span[0])
    end = max(start, min(run.end, span[1]))
    return run._replace(start=start, end=end, slots=run.slots[start - run.start : end - run.start])


def _mark_moved(keys: EncodedKeys, position: int) -> EncodedKeys:
    """Return keys with a mark that KV is approximate from `position` on. Listeners see the mark as a `KeyAt`."""
    given = keys.extra_keys
    some = () if given is None else given if isinstance(given, tuple) else (given,)
    placed = tuple(sorted([*keys.placed, (position, MOVED)]))
    return EncodedKeys(keys.header, placed, (*some, KeyAt(position, "pc.moved")))


def check_segments(segments: Any, reuse: str) -> list[Span]:
    """Check the segments of `CacheManager.allocate` and return them as pairs of integers."""
    if reuse != "anywhere":
        raise ValueError(f"segments: got some with reuse={reuse!r}, needs reuse='anywhere'")
    try:
        spans = [(check_integer("segments", a), check_integer("segments", b)) for a, b in segments]
    except (TypeError, ValueError):
        raise TypeError(f"segments: got {segments!r}, needs pairs (start, end) of integers") from None
    edges = [0, *[edge for span in spans for edge in span]]
    if edges != sorted(edges):
        raise ValueError(f"segments: got {segments!r}, needs ascending spans that do not overlap")
    return spans


def first_tokens(spans: Sequence[MovedSpan], fraction: float) -> Slots:
    """Return the positions of the first tokens of each span; see `Allocation.recompute_moved`."""
    fraction = check_share("fraction", fraction)
    lengths = sorted([span.end - span.start for span in spans])
    left, each = round(fraction * sum(lengths)), 0
    for at, length in enumerate(lengths):
        each = max(each, min(length, -(-left // (len(lengths) - at))))
        left -= min(length, each)
    chosen = [np.arange(span.start, min(span.start + each, span.end)) for span in spans]
    return np.concatenate(chosen) if chosen else np.empty(0, np.int64)
