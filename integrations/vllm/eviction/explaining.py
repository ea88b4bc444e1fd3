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

from ....cache.groups import FullAttention
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


class Misses:
    """Explains requests to a scheduler that is about to admit them.

    Stands in for a manager's state: its table knows the blocks of the prompt that is explained, by vLLM's own hashes.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._pool, self._requests = scheduler.kv_cache_manager.block_pool, scheduler.requests
        self.block_size: int = scheduler.hash_block_size
        self.hasher = BlockHasher("sha256", self.block_size)
        self.groups = (FullAttention(),)
        self.table = self
        self.pools = (self,)
        self.prefix_only = False  # what moved text would save is asked of the jumps, which know where text is
        self.reuses: dict[str, Any] = {}
        self.running: dict[str, Any] = {}
        self._ended: Latest[Ended] = Latest(TOKEN_BYTES * len(self._pool.blocks))
        self.history = SimpleNamespace(ended=self._ended, evicted=())
        self._names: dict[bytes, bytes] = {}

    def extended(self, _: Any, hit: Any) -> Any:
        """VLLM finds whole blocks alone."""
        return hit

    def find(self, digests: Words) -> Ids:
        """Return the blocks of the explained prompt, -1 where they are not cached.

        vLLM's hashes of other texts are unknown here: their blocks count as cached, with block number 0.
        """
        names = [self._names.get(digest) for digest in split_digests(digests)]
        found = [name and self._pool.get_cached_block(name, [0]) for name in names]
        cached = (block[0].block_id if block else -1 for block in found)
        return np.array([0 if name is None else block for name, block in zip(names, cached, strict=True)], np.int32)

    def explain(self, request: Any, jumps: GapJumps | None) -> Explanation:
        """What is there of a request that has not been admitted, and why no more."""
        tokens, keys = array("I", token_ids(request)), _keys_of(request)
        digests = self.hasher.hash_blocks(tokens, keys)
        self._names = dict(zip(split_digests(digests), request.block_hashes, strict=False))
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
        """A request has ended."""
        text = self._text_of(request)
        if text.committed >= self.block_size:
            entry = (text.keys, None, text.tokens, text.committed)
            self._ended.add(entry, ENTRY_BYTES + 4 * len(text.tokens))


def _keys_of(request: Any) -> EncodedKeys:
    """Salt, adapter and media of a request."""
    adapter, media = request.lora_request, request.mm_features or ()
    keys = [] if adapter is None else [(adapter.lora_name, adapter.lora_path)]
    placed = [KeyAt(each.mm_position.offset, each.identifier) for each in media]
    return encode_keys((*keys, *placed), request.cache_salt or None)
