"""Explanations in vLLM's log: how far the prompt of a request with `pc_explain` is cached, and why no further.

`pc.cache.observe.explain` uses the blocks that have hashes, and the texts of running and waiting requests. It also uses
the texts of requests that have ended since the first request with `pc_explain`.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ....cache.groups import FullAttention, Group, Recurrent, SlidingWindow
from ....cache.hashing import BlockHasher, Words, split_digests
from ....cache.observe.explain import Explanation, Source, explain_from
from ....cache.observe.history import Ended, History
from ....cache.table import Ids
from ..api import token_ids
from .jumps import Jumps
from .moved import keys_of, moved_from

ASKED = "pc_explain"
"""The key in a request's `extra_args` with which it asks for an explanation."""


def groups_of(scheduler: Any) -> tuple[Group, ...] | None:
    """Return the specs of an engine's groups; None if one of them cannot be explained."""
    groups: list[Group] = []
    for group in scheduler.kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        kinds = {kind.__name__ for kind in type(spec).__mro__}
        if spec.block_size != scheduler.hash_block_size:
            return None
        if "SlidingWindowSpec" in kinds:
            groups.append(SlidingWindow(spec.sliding_window))
        elif "MambaSpec" in kinds:
            groups.append(Recurrent())
        elif "FullAttentionSpec" in kinds:
            groups.append(FullAttention())
        else:
            return None
    return tuple(groups)


def why_not_explained(scheduler: Any) -> str:
    """Return why the misses of an engine cannot be explained, or ""."""
    if not scheduler.kv_cache_manager.enable_caching:
        return "no prefix caching"
    if groups_of(scheduler) is None:
        return "groups of another kind than attention, windows and states, or blocks of another size than their hashes"
    return ""


def find_blocks(pool: Any, group: int, names: Mapping[bytes, bytes], digests: Words) -> Ids:
    """Return the blocks of one of vLLM's groups that hold an explained prompt, -1 where they are not cached.

    `names` maps our hashes of the prompt to vLLM's own. The hashes that vLLM has of other texts are unknown, so blocks
    of other texts are reported as cached, with number 0.
    """
    known = [names.get(digest) for digest in split_digests(digests)]
    found = [name and pool.get_cached_block(name, [group]) for name in known]
    cached = (block[0].block_id if block else -1 for block in found)
    return np.array([0 if name is None else block for name, block in zip(known, cached, strict=True)], np.int32)


class Misses:
    """An explainer of the misses of requests that a scheduler is about to admit."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler, self._pool = scheduler, scheduler.kv_cache_manager.block_pool
        self._size: int = scheduler.hash_block_size
        self._hasher = BlockHasher("sha256", self._size)
        self._groups = groups_of(scheduler) or (FullAttention(),)
        self._history = History(self._size, [len(self._pool.blocks)])

    def explain(self, request: Any, jumps: Jumps | None) -> Explanation:
        """Return how far the prompt of a request that is not admitted yet is cached, and why no further."""
        tokens, keys = array("I", token_ids(request)), keys_of(request)
        digests = split_digests(self._hasher.hash_blocks(tokens, keys))
        names = dict(zip(digests, request.block_hashes, strict=False))
        find = [partial(find_blocks, self._pool, group, names) for group in range(len(self._groups))]
        others = [other for other in self._scheduler.requests.values() if other.request_id != request.request_id]
        texts: list[tuple[Ended, Hashable]] = [(entry, None) for entry, _ in self._history.ended]
        texts += [(self._text_of(other), other.request_id) for other in others]
        found = explain_from(Source(self._hasher, self._groups, find, texts), tokens, keys)
        compression, block = self._scheduler.compression, found.position // self._size
        if found.reason == "evicted" and compression is not None and request.block_hashes[block] in compression.freed:
            found = replace(found, reason="compressed", there=None)
        if jumps is not None:  # the jumps have an index of text that moved
            moved = jumps.contents.find(request, found.matched, {})
            found = replace(found, moved_tokens=sum(piece.end - piece.begin for piece in moved))
        return found

    def _text_of(self, request: Any) -> Ended:
        """Return a request as an `Ended` text: its keys, its tokens with exact KV, and how many of them are written."""
        compression, exact = self._scheduler.compression, moved_from(request) * self._size
        if compression is not None:
            exact = min(exact, compression.exact_tokens(request))
        tokens = array("I", token_ids(request)[:exact])
        return keys_of(request), None, tokens, min(request.num_computed_tokens, len(tokens))

    def remember(self, request: Any) -> None:
        """Remember a request that has ended."""
        text = self._text_of(request)
        if text[3] >= self._size:
            self._history.add_text(text)
