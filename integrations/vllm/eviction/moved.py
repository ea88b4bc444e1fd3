"""Text that moved, in vLLM: KV cached at another position or behind other text, copied to a request's own blocks.

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
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ....cache.reuse.content import ContentIndex
from ....cache.runs import MovedSpan
from ....cache.table import Ids
from ...hints import extra_args
from ..api import FullAttentionSpec, block_hash, token_ids
from .jumps import MIN_TOKENS, GapJumps

LEAD = 16
"""Tokens at the beginning of a piece that are computed, since they depend most on the text before them. With 32 tokens,
SmolLM2's answers after a changed beginning diverged no less."""


class Contents:
    """vLLM's blocks that have a hash, in the form of a pool that a `ContentIndex` can read.

    An entry is valid while its block has the hash that the block had when it was entered.
    """

    def __init__(self, pool: Any) -> None:
        self.num_blocks = len(pool.blocks)
        self.hasher = SimpleNamespace(new=sha256)
        self.taken_at = np.zeros(self.num_blocks, np.int64)
        self.prefix_length = np.zeros(self.num_blocks, np.int32)
        self.table = self
        self._blocks = pool.blocks
        self._keys: list[bytes | None] = [None] * self.num_blocks

    def index_of(self, ids: Ids) -> Ids:
        """Return the indices of blocks in the arrays. An index is the block's number."""
        return ids

    def lists(self, block: int) -> bool:
        """Return whether a block still holds the text that was entered."""
        key = self._keys[block]
        return key is not None and block_hash(self._blocks[block]) == key

    def contains(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return, for each of several blocks, whether it still holds the text that was entered."""
        return np.fromiter(map(self.lists, ids.tolist()), np.bool_, ids.size)

    def enter(self, ids: Ids, keys: list[bytes | None], first: int) -> None:
        """Enter blocks with their hashes; the first is number `first` of its sequence."""
        self.prefix_length[ids] = np.arange(first + 1, first + 1 + ids.size)
        for block, key in zip(ids.tolist(), keys, strict=True):
            self._keys[block] = key


class CopiedSpan(NamedTuple):
    """Tokens `begin` to `end` of a request, which are copied from `slots` instead of computed."""

    begin: int
    end: int
    slots: npt.NDArray[np.int64]
    deltas: npt.NDArray[np.int64]
    """The distance in positions from each token's old place to its new one."""
    blocks: list[Any]
    """The blocks that hold these slots."""


class MovedJumps(GapJumps):
    """Jumps over gaps, and over text that is cached elsewhere."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self._contents = Contents(self._pool)
        self._index: ContentIndex | None = None
        self._pending: list[tuple[Ids, list[bytes | None], int, int, array[int], bytes, bool]] = []
        self._pieces: dict[str, list[CopiedSpan]] = {}  # pieces that each request has not reached yet
        self._moving: dict[str, list[CopiedSpan]] = {}  # pieces to copy in the next step

    def follow(self) -> None:
        """Index the text of blocks from now on. It costs time and 180 bytes per block, so a request must ask first."""
        if self._index is None:
            self._index = ContentIndex(self._contents, self._size)  # type: ignore[arg-type]
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
                keys = [block_hash(block) for block in blocks[begin:end]]
                before = blocks[begin - 1].block_id if begin else -1
                tokens = array("I", token_ids(request)[begin * self._size : end * self._size])
                self._pending.append((ids, keys, begin, before, tokens, root, end == border))

    @property
    def is_busy(self) -> bool:
        """Whether the chunk of a running request may have to end early."""
        return bool(self.pinned or self._pieces)

    def holds(self) -> Iterator[Any]:
        """Yield the pinned blocks, each as often as it is pinned."""
        yield from super().holds()
        for pieces in (*self._pieces.values(), *self._moving.values()):
            for piece in pieces:
                yield from piece.blocks

    def find_moved(self, request: Any, num_computed: int, runs: dict[int, Any]) -> list[CopiedSpan]:
        """Return pieces of a prompt, after its hit and between later runs, that are cached elsewhere. See `follow`."""
        return [] if self._index is None else list(self._find(request, num_computed, runs))

    def _find(self, request: Any, num_computed: int, runs: dict[int, Any]) -> Iterator[CopiedSpan]:
        """Yield the pieces of a prompt that are cached elsewhere. They lie between runs and omit the last token."""
        root, size, last = _root(request), self._size, request.num_tokens - 1
        if root is None or request.sampling_params is None or _asks_for_rows(request):
            return
        assert self._index is not None
        tokens = np.array(token_ids(request)[:last], np.uint32)
        # Always compute the token before a run. It fills the table's last block, so the run can follow in the table.
        ends = [number * size - 1 for number in runs if number - 1 not in runs]
        begins = [(number + 1) * size for number in runs if number + 1 not in runs]
        for begin, end in zip([num_computed, *begins], [*ends, last], strict=True):
            joined: list[MovedSpan] = []
            for match in self._index.find(tokens, begin, end, root):
                # A conversation's turns may lie in blocks of several requests. Adjacent matches form one piece if at
                # least LEAD tokens before the later one are those it was computed after.
                goes_on = bool(joined) and match.start == joined[-1].end
                if not goes_on or self._index.agreed_before(match, tokens) < LEAD:
                    yield from self._piece(request, joined)
                    joined = []
                joined.append(match)
            yield from self._piece(request, joined)

    def _piece(self, request: Any, matches: list[MovedSpan]) -> Iterator[CopiedSpan]:
        """Yield neighbouring matches as one piece, if it is long enough."""
        begin, end = (matches[0].start + LEAD, matches[-1].end) if matches else (0, 0)
        # The block with the first moved token must have a hash, to be replaced.
        if end - begin >= MIN_TOKENS and begin // self._size < len(request.block_hashes):
            slots = np.concatenate([match.slots for match in matches])[LEAD:]
            deltas = np.repeat([match.delta for match in matches], [len(match.slots) for match in matches])[LEAD:]
            blocks = [self._pool.blocks[number] for number in np.unique(slots // self._size).tolist()]
            yield CopiedSpan(begin, end, slots, deltas, blocks)

    def clip(self, request: Any, num_computed: int, num_new: int) -> int:
        """Return the number of tokens of a chunk that come before the next run or piece."""
        pieces = self._planned_for(request)[1] or self._pieces.get(request.request_id)
        allowed = super().clip(request, num_computed, num_new)
        return min(allowed, pieces[0].begin - num_computed) if pieces else allowed

    def allocate(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """Allocate like `GapJumps.allocate`. Also pin the source blocks of pieces that fit beside the whole request."""
        planned, found = self._planned_for(request)
        pieces: list[CopiedSpan] = []
        if found:
            runs = list(planned.values())
            room, held = self._room(request, runs, **kwargs), set(map(id, runs))
            for piece in found:
                room -= sum(block.ref_cnt == 0 and id(block) not in held for block in piece.blocks)
                if room < 0:
                    break
                held.update(map(id, piece.blocks))
                pieces.append(piece)
        for piece in pieces:
            self._pool.touch(piece.blocks)
        new = super().allocate(request, num_new_tokens, *args, **kwargs)
        if pieces and new is not None:
            self._pieces[request.request_id] = pieces
        elif pieces:
            self._unpin(pieces)
        return new

    def _unpin(self, pieces: list[CopiedSpan]) -> None:
        """Release the source blocks of pieces."""
        for piece in pieces:
            self._pool.free_blocks(reversed(piece.blocks))

    def start_step(self) -> None:
        """Let requests jump over a run or piece that they have reached."""
        super().start_step()
        for ids, keys, first, before, tokens, root, exact in self._pending:
            self._contents.enter(ids, keys, first)
            assert self._index is not None
            self._index.add(ids, before, tokens, root, exact)
        self._pending.clear()
        for name, pieces in list(self._pieces.items()):
            request, piece = self._requests[name], pieces[0]
            if request.num_computed_tokens != piece.begin:
                continue
            if piece.begin // self._size < moved_from(request):
                self._rename(request, piece.begin // self._size)
            request.num_computed_tokens = piece.end
            self._moving.setdefault(name, []).append(piece)
            self._unsent.setdefault(name, [])
            self.num_moved_tokens += piece.end - piece.begin
            self._count(request, piece.end - piece.begin)
            if len(pieces) > 1:
                self._pieces[name] = pieces[1:]
            else:
                del self._pieces[name]

    def _rename(self, request: Any, number: int) -> None:
        """Give a request's blocks from `number` on new hashes, which no prompt has."""
        exact = request.block_hashes[number]
        request.block_hashes[number:] = [sha256(b"pc.moved" + exact).digest()[: len(exact)]]
        request.update_block_hashes()
        request.pc_moved_from = number

    def finish_step(self, output: Any) -> None:
        """Add to the step the slots that workers copy and rotate."""
        super().finish_step(output)
        moves = []
        for name in self._moving.keys() & output.num_scheduled_tokens.keys():
            pieces = self._moving.pop(name)
            table = np.array([block.block_id for block in self._manager.req_to_blocks[name]], np.int64)
            for piece in pieces:
                at = np.arange(piece.begin, piece.end)
                moves.append((piece.slots, table[at // self._size] * self._size + at % self._size, piece.deltas))
            self._unpin(pieces)  # their next owner writes to them in a later step
        if moves:
            output.pc_moves = moves

    def release(self, request: Any) -> None:
        """Unpin the blocks and sources of a request that is preempted or has ended."""
        super().release(request)
        for pieces in (self._pieces.pop(request.request_id, []), self._moving.pop(request.request_id, [])):
            self._unpin(pieces)


def moved_from(request: Any) -> int:
    """Return the number of a request's first block with moved KV; a number beyond all blocks if there is none."""
    number: int = getattr(request, "pc_moved_from", 1 << 62)
    return number


def _root(request: Any) -> bytes | None:
    """Return a digest of salt and adapter; None if KV depends on more than these and the tokens."""
    if request.mm_features or request.prompt_embeds is not None:
        return None
    adapter = request.lora_request
    named = None if adapter is None else (adapter.lora_name, adapter.lora_path)
    return sha256(repr((request.cache_salt or None, named)).encode()).digest()


def _asks_for_rows(request: Any) -> bool:
    """Return whether a request asks for hidden states of each token. Rows of moved tokens do not exist."""
    extra = extra_args(request)
    return bool(extra.get("pc_hidden_states") or extra.get("pc_prompt_logprobs"))


def why_no_moves(scheduler: Any) -> str:
    """Return why an engine that can jump over gaps cannot move text, or "". Workers report theirs at start."""
    (group,) = scheduler.kv_cache_config.kv_cache_groups
    if type(group.kv_cache_spec) is not FullAttentionSpec:
        return f"layers with a cache of the kind {type(group.kv_cache_spec).__name__}"
    reason: str = getattr(scheduler.vllm_config.model_config, "pc_cannot_move", "an engine without PC_VLLM=eviction")
    return reason
