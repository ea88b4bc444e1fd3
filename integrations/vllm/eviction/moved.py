"""Text that moved, in vLLM: KV cached at another position or after other text, copied to a request's own blocks.

The result is approximate, so requests must ask for it. After the leading hit, and between exact later hits, pieces of
a prompt are found by content. The first `LEAD` tokens of a piece are computed. The chunk ends with them, and the next
chunk begins after the piece. vLLM allocates blocks for the skipped tokens. The step names the slots that workers copy
and rotate before its forward pass (`..moves`). The source blocks stay pinned until the step is sent.

From the block with the first moved KV on, a request's blocks get hashes that no prompt has. Requests for prefixes and
gaps therefore never read approximate KV. It stays cached and can be found by content again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ....cache.keys import EncodedKeys, KeyAt, encode_keys
from ....cache.reuse.content import ContentIndex, Stamps
from ....cache.runs import MovedSpan
from ....cache.table import Ids
from ..api import FullAttentionSpec, block_hash, token_ids
from ..reasons import asks_for_rows

MIN_TOKENS = 64
"""The shortest run or piece worth jumping over. A jump ends a chunk and may cost an extra step. Other running requests
share that step."""

LEAD = 16
"""Tokens at the beginning of a piece that are computed, since they depend most on the text before them. With 32 tokens,
SmolLM2's answers after a changed beginning diverged no less."""


class CopiedSpan(NamedTuple):
    """Tokens `begin` to `end` of a request, which are copied from `slots` instead of computed."""

    begin: int
    end: int
    slots: npt.NDArray[np.int64]
    deltas: npt.NDArray[np.int64]
    """The distance in positions from each token's old place to its new one."""
    blocks: list[Any]
    """The blocks that hold these slots."""


class Contents:
    """The texts of vLLM's blocks that have a hash, found by content from the first call of `follow` on."""

    def __init__(self, pool: Any, block_size: int) -> None:
        self._pool, self._size = pool, block_size
        self._index: ContentIndex | None = None
        self._pending: list[tuple[Ids, Stamps, int, int, array[int], bytes, bool]] = []

    def _stamps(self, ids: Ids) -> Stamps:
        """Return a number for the hash of each block; -1 for a block without a hash."""
        keys = [block_hash(self._pool.blocks[block]) for block in ids.tolist()]
        return np.array([-1 if key is None else hash(key) for key in keys], np.int64)  # Python hashes nothing to -1

    def follow(self) -> None:
        """Index the text of blocks from now on. It costs time and 180 bytes per block, so a request must ask first."""
        if self._index is None:
            blocks = len(self._pool.blocks)
            self._index = ContentIndex(blocks, self._size, sha256().digest_size, self._stamps)
            self._pool.contents = self

    def published(self, request: Any, blocks: list[Any], first: int, last: int) -> None:
        """Record blocks that got their hashes. Their text is found from the next step on, when the KV is written."""
        root = _root(request)
        if root is None:
            return
        border = min(max(moved_from(request), first), last)
        for begin, end in ((first, border), (border, last)):
            if begin < end:
                ids = np.array([block.block_id for block in blocks[begin:end]], np.int32)
                before = blocks[begin - 1].block_id if begin else -1
                tokens = array("I", token_ids(request)[begin * self._size : end * self._size])
                self._pending.append((ids, self._stamps(ids), begin, before, tokens, root, end == border))

    def enter_published(self) -> None:
        """Index the blocks that were published before this step, because their KV is written now."""
        for each in self._pending:
            assert self._index is not None
            self._index.add(*each)
        self._pending.clear()

    def find(self, request: Any, num_computed: int, runs: dict[int, Any]) -> list[CopiedSpan]:
        """Return the pieces of a prompt, after its hit and outside of later runs, that are cached elsewhere."""
        if self._index is None or request.sampling_params is None or asks_for_rows(request):
            return []
        root, size, last = _root(request), self._size, request.num_tokens - 1
        if root is None:
            return []
        pieces: list[CopiedSpan] = []
        tokens = np.array(token_ids(request)[:last], np.uint32)
        # Always compute the token before a run. It fills the table's last block, so the run can follow in the table.
        ends = [number * size - 1 for number in runs if number - 1 not in runs]
        begins = [(number + 1) * size for number in runs if number + 1 not in runs]
        for begin, end in zip([num_computed, *begins], [*ends, last], strict=True):
            joined: list[MovedSpan] = []
            for match in self._index.find(tokens, begin, end, root):
                # A conversation's turns may lie in blocks of several requests. Adjacent matches form one piece if the
                # cached text of the later match was computed after the same LEAD tokens that precede it here.
                goes_on = bool(joined) and match.start == joined[-1].end
                if not goes_on or self._index.agreed_before(match, tokens) < LEAD:
                    pieces += self._piece(request, joined)
                    joined = []
                joined.append(match)
            pieces += self._piece(request, joined)
        return pieces

    def _piece(self, request: Any, matches: list[MovedSpan]) -> Iterator[CopiedSpan]:
        """Yield neighbouring matches as one piece, if it is long enough."""
        begin, end = (matches[0].start + LEAD, matches[-1].end) if matches else (0, 0)
        # The block with the first moved token must have a hash, to be replaced.
        if end - begin >= MIN_TOKENS and begin // self._size < len(request.block_hashes):
            slots = np.concatenate([match.slots for match in matches])[LEAD:]
            deltas = np.repeat([match.delta for match in matches], [len(match.slots) for match in matches])[LEAD:]
            blocks = [self._pool.blocks[number] for number in np.unique(slots // self._size).tolist()]
            yield CopiedSpan(begin, end, slots, deltas, blocks)


def moved_from(request: Any) -> int:
    """Return the number of a request's first block with moved KV; a number beyond all blocks if there is none."""
    number: int = getattr(request, "pc_moved_from", 1 << 62)
    return number


def keys_of(request: Any) -> EncodedKeys:
    """Return the salt, adapter and media of a request."""
    adapter, media = request.lora_request, request.mm_features or ()
    keys = [] if adapter is None else [(adapter.lora_name, adapter.lora_path)]
    placed = [KeyAt(each.mm_position.offset, each.identifier) for each in media]
    return encode_keys((*keys, *placed), request.cache_salt or None)


def _root(request: Any) -> bytes | None:
    """Return a digest of salt and adapter; None if KV depends on more than these and the tokens."""
    if request.mm_features or request.prompt_embeds is not None:
        return None
    return sha256(keys_of(request).header).digest()


def why_no_moves(scheduler: Any) -> str:
    """Return why an engine that can jump over gaps cannot move text, or "".

    Workers report their reasons when the engine starts, in `pc_cannot_move` of the model's configuration.
    """
    (group,) = scheduler.kv_cache_config.kv_cache_groups
    if type(group.kv_cache_spec) is not FullAttentionSpec:
        return f"layers with a cache of the kind {type(group.kv_cache_spec).__name__}"
    reason: str = getattr(scheduler.vllm_config.model_config, "pc_cannot_move", "an engine without PC_VLLM=eviction")
    return reason
