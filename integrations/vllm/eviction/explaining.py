"""Why a request's prompt is cached no further in vLLM: a line in its log for whoever asks with `pc_explain`.

`pc.cache.observe.explain` answers from what a scheduler knows: the blocks that have hashes, the texts of running and
waiting requests, and those of requests that have ended since the first one that asked.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from ....cache.groups import FullAttention, Group, Recurrent, SlidingWindow
from ....cache.hashing import BlockHasher, Words, split_digests
from ....cache.keys import EncodedKeys, KeyAt, encode_keys
from ....cache.observe.explain import Explanation, explain
from ....cache.observe.history import ENTRY_BYTES, TOKEN_BYTES, Ended, Latest
from ....cache.table import Ids
from ..api import token_ids
from .jumps import GapJumps
from .moved import moved_from

ASKED = "pc_explain"
"""In `extra_args` of a request that wants to know."""


def groups_of(scheduler: Any) -> tuple[Group, ...] | None:
    """Return the specs of an engine's groups; None if explanations do not know one of them or its block size."""
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


class GroupBlocks:
    """The cached blocks of one of vLLM's groups, in place of a pool and its table.

    `names` are vLLM's own hashes by ours. vLLM's hashes of other texts are unknown: their blocks count as cached, with
    block number 0.
    """

    def __init__(self, pool: Any, group: int, hasher: BlockHasher, names: dict[bytes, bytes]) -> None:
        self._pool, self._group, self._names = pool, group, names
        self.hasher, self.table = hasher, self

    def find(self, digests: Words) -> Ids:
        """Return the blocks of the explained prompt, -1 where they are not cached."""
        names = [self._names.get(digest) for digest in split_digests(digests)]
        found = [name and self._pool.get_cached_block(name, [self._group]) for name in names]
        cached = (block[0].block_id if block else -1 for block in found)
        return np.array([0 if name is None else block for name, block in zip(names, cached, strict=True)], np.int32)


class Misses:
    """Explains requests to a scheduler that is about to admit them; stands in for a manager's state."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        pool, self._requests = scheduler.kv_cache_manager.block_pool, scheduler.requests
        self.block_size: int = scheduler.hash_block_size
        self.hasher = BlockHasher("sha256", self.block_size)
        self.groups = groups_of(scheduler) or (FullAttention(),)
        self._names: dict[bytes, bytes] = {}
        self.pools = [GroupBlocks(pool, group, self.hasher, self._names) for group in range(len(self.groups))]
        self.prefix_only = False  # the jumps say what moved text would save: they know where text is
        self.reuses: dict[str, Any] = {}
        self.running: dict[str, Any] = {}
        self._ended: Latest[Ended] = Latest(TOKEN_BYTES * len(pool.blocks))
        self.history = SimpleNamespace(ended=self._ended, evicted=())

    def extended(self, _: Any, hit: Any) -> Any:
        """Return the hit: vLLM finds whole blocks alone."""
        return hit

    def explain(self, request: Any, jumps: GapJumps | None) -> Explanation:
        """Return how far the prompt of a request that is not admitted yet is cached, and why no further."""
        tokens, keys = array("I", token_ids(request)), _keys_of(request)
        digests = self.hasher.hash_blocks(tokens, keys)
        self._names.clear()
        self._names.update(zip(split_digests(digests), request.block_hashes, strict=False))
        others = (other for name, other in self._requests.items() if name != request.request_id)
        self.running = {other.request_id: self._text_of(other) for other in others}
        found = explain(self, tokens, keys)  # type: ignore[arg-type]
        compression, block = self._scheduler.compression, found.position // self.block_size
        if found.reason == "evicted" and compression is not None and request.block_hashes[block] in compression.freed:
            found = replace(found, reason="compressed", there=None)
        if jumps is not None:
            moved = jumps.find_moved(request, found.matched, {})
            found = replace(found, moved_tokens=sum(piece.end - piece.begin for piece in moved))
        return found

    def _text_of(self, request: Any) -> Any:
        """Return the tokens of a request whose KV is exact, as a manager's own request."""
        compression, exact = self._scheduler.compression, moved_from(request) * self.block_size
        if compression is not None:
            exact = min(exact, compression.exact_tokens(request))
        tokens = array("I", token_ids(request)[:exact])
        committed = min(request.num_computed_tokens, len(tokens))
        return SimpleNamespace(tokens=tokens, pending=None, keys=_keys_of(request), committed=committed)

    def remember(self, request: Any) -> None:
        """Remember a request that has ended."""
        text = self._text_of(request)
        if text.committed >= self.block_size:
            entry = (text.keys, None, text.tokens, text.committed)
            self._ended.add(entry, ENTRY_BYTES + 4 * len(text.tokens))


def _keys_of(request: Any) -> EncodedKeys:
    """Return the salt, adapter and media of a request."""
    adapter, media = request.lora_request, request.mm_features or ()
    keys = [] if adapter is None else [(adapter.lora_name, adapter.lora_path)]
    placed = [KeyAt(each.mm_position.offset, each.identifier) for each in media]
    return encode_keys((*keys, *placed), request.cache_salt or None)
