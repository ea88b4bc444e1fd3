"""Text that moved, in vLLM: cached at another position or behind other text, brought to blocks of a request's own.

Approximate, so only where it is asked for. Behind the leading hit and exact gaps a prompt's pieces are looked for by
content. The first tokens of a piece are computed, where its chunk ends; then the request goes on behind the piece, vLLM
gives it blocks for what it has skipped, and the step tells workers what to copy and turn before its forward pass
(`..moves`). Sources are pinned until that is sent.

From the block with the first such KV on, a request's blocks have hashes of their own: no prompt has them, so requests
for prefixes and gaps never read what is approximate, while it stays cached and is found by content again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from hashlib import sha256
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_cache_interface import FullAttentionSpec

from ....cache.reuse.content import ContentIndex, ContentMatch
from ....cache.table import Ids
from ...hints import extra_args
from .jumps import MIN_TOKENS, GapJumps

LEAD = 16
"""Tokens of a piece that are computed where they stand: those that hang most on what is before them. With 32 the
divergence of SmolLM2's answers behind a changed head is the same."""


class Contents:
    """VLLM's blocks with a hash, as a `ContentIndex` looks at a pool.

    An entry counts while its block has the hash that it was entered with, which stands for all that it holds.
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
        """Blocks as an index of fields."""
        return ids

    def lists(self, block: int) -> bool:
        """Whether a block holds what was entered."""
        key = self._keys[block]
        return key is not None and self._blocks[block]._block_hash == key

    def contains(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """The same for each of several."""
        return np.fromiter(map(self.lists, ids.tolist()), np.bool_, ids.size)

    def enter(self, ids: Ids, keys: list[bytes | None], first: int) -> None:
        """Blocks from number `first` of a sequence on have these hashes."""
        self.prefix_length[ids] = np.arange(first + 1, first + 1 + ids.size)
        for block, key in zip(ids.tolist(), keys, strict=True):
            self._keys[block] = key


class CopiedSpan(NamedTuple):
    """Tokens `begin` to `end` of a request that are not computed but brought from `slots`."""

    begin: int
    end: int
    slots: npt.NDArray[np.int64]
    deltas: npt.NDArray[np.int64]
    """How many positions before each token stood there."""
    blocks: list[Any]
    """That hold these slots."""


class MovedJumps(GapJumps):
    """Jumps over gaps, and over text that is cached elsewhere."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self._contents = Contents(self._pool)
        self._index: ContentIndex | None = None
        self._pending: list[tuple[Ids, list[bytes | None], int, int, array[int], bytes, bool]] = []
        self._pieces: dict[str, list[CopiedSpan]] = {}
        self._moving: dict[str, list[CopiedSpan]] = {}

    def follow(self) -> None:
        """Enters from now on what blocks hold, once a request has asked: it takes 180 bytes a block, and time."""
        if self._index is None:
            self._index = ContentIndex(self._contents, self._size)  # type: ignore[arg-type]
            self._pool.contents = self

    def published(self, request: Any, blocks: list[Any], first: int, last: int) -> None:
        """Blocks have got their hashes. They can be moved from the next step on, when their KV is written."""
        root = _root(request)
        if root is None:
            return
        border = min(max(moved_from(request), first), last)
        for begin, end in ((first, border), (border, last)):
            if begin < end:
                ids = np.array([block.block_id for block in blocks[begin:end]], np.int32)
                keys = [block._block_hash for block in blocks[begin:end]]
                before = blocks[begin - 1].block_id if begin else -1
                tokens = array("I", request._all_token_ids[begin * self._size : end * self._size])
                self._pending.append((ids, keys, begin, before, tokens, root, end == border))

    @property
    def is_busy(self) -> bool:
        """Whether a chunk of a request that runs may have to be clipped."""
        return bool(self.pinned or self._pieces)

    def holds(self) -> Iterator[Any]:
        """Blocks that are pinned, as often as they are."""
        yield from super().holds()
        for pieces in (*self._pieces.values(), *self._moving.values()):
            for piece in pieces:
                yield from piece.blocks

    def find_moved(self, request: Any, num_computed: int, runs: dict[int, Any]) -> list[CopiedSpan]:
        """Text behind a hit that is cached elsewhere, between later runs; none before the first request that asks."""
        return [] if self._index is None else list(self._find(request, num_computed, runs))

    def _find(self, request: Any, num_computed: int, runs: dict[int, Any]) -> Iterator[CopiedSpan]:
        """What of a prompt lies elsewhere, between later runs that stay where they are; not its last token."""
        root, size, last = _root(request), self._size, request.num_tokens - 1
        if root is None or request.sampling_params is None or _asks_for_rows(request):
            return
        assert self._index is not None
        tokens = np.array(request._all_token_ids[:last], np.uint32)
        # A token in front of a run is computed: the run joins a table that has no room for more.
        ends = [number * size - 1 for number in runs if number - 1 not in runs]
        begins = [(number + 1) * size for number in runs if number + 1 not in runs]
        for begin, end in zip([num_computed, *begins], [*ends, last], strict=True):
            joined: list[ContentMatch] = []
            for match in self._index.find(tokens, begin, end, root):
                # Turns of one conversation lie in blocks of several requests, each computed behind the one before.
                goes_on = bool(joined) and match.start == joined[-1].end
                if not goes_on or self._index.agreed_before(match, tokens) < LEAD:
                    yield from self._piece(request, joined)
                    joined = []
                joined.append(match)
            yield from self._piece(request, joined)

    def _piece(self, request: Any, matches: list[ContentMatch]) -> Iterator[CopiedSpan]:
        """Neighbouring matches as one piece, if that is worth it."""
        begin, end = (matches[0].start + LEAD, matches[-1].end) if matches else (0, 0)
        # The block with the first moved token has to have a hash that can be another.
        if end - begin >= MIN_TOKENS and begin // self._size < len(request.block_hashes):
            slots = np.concatenate([match.slots for match in matches])[LEAD:]
            deltas = np.repeat([match.delta for match in matches], [len(match.slots) for match in matches])[LEAD:]
            blocks = [self._pool.blocks[number] for number in np.unique(slots // self._size).tolist()]
            yield CopiedSpan(begin, end, slots, deltas, blocks)

    def clip(self, request: Any, num_computed: int, num_new: int) -> int:
        """What of a chunk lies in front of the next run or piece."""
        pieces = self._planned_for(request)[1] or self._pieces.get(request.request_id)
        allowed = super().clip(request, num_computed, num_new)
        return min(allowed, pieces[0].begin - num_computed) if pieces else allowed

    def allocate(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """In place of vLLM's `allocate_slots`: pins sources too, as far as there is room beside the whole request."""
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
            self._let_go(pieces)
        return new

    def _let_go(self, pieces: list[CopiedSpan]) -> None:
        for piece in pieces:
            self._pool.free_blocks(reversed(piece.blocks))

    def start_step(self) -> None:
        """Takes requests to behind a run, or a piece, as far as they have come."""
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
        """Gives a request's blocks from `number` on hashes of their own; later ones follow from them."""
        exact = request.block_hashes[number]
        request.block_hashes[number:] = [sha256(b"pc.moved" + exact).digest()[: len(exact)]]
        request.update_block_hashes()
        request.pc_moved_from = number

    def finish_step(self, output: Any) -> None:
        """Tells workers what to move, for requests of the step."""
        super().finish_step(output)
        moves = []
        for name in self._moving.keys() & output.num_scheduled_tokens.keys():
            pieces = self._moving.pop(name)
            table = np.array([block.block_id for block in self._manager.req_to_blocks[name]], np.int64)
            for piece in pieces:
                at = np.arange(piece.begin, piece.end)
                moves.append((piece.slots, table[at // self._size] * self._size + at % self._size, piece.deltas))
            self._let_go(pieces)  # whoever is given these blocks writes to them a step later
        if moves:
            output.pc_moves = moves

    def release(self, request: Any) -> None:
        """A request is preempted or has ended."""
        super().release(request)
        for pieces in (self._pieces.pop(request.request_id, []), self._moving.pop(request.request_id, [])):
            self._let_go(pieces)


def moved_from(request: Any) -> int:
    """The number of a request's first block with moved KV, beyond all where it has none."""
    number: int = getattr(request, "pc_moved_from", 1 << 62)
    return number


def _root(request: Any) -> bytes | None:
    """What stands for salt and adapter; None where KV hangs on more than these and tokens."""
    if request.mm_features or request.prompt_embeds is not None:
        return None
    adapter = request.lora_request
    named = None if adapter is None else (adapter.lora_name, adapter.lora_path)
    return sha256(repr((request.cache_salt or None, named)).encode()).digest()


def _asks_for_rows(request: Any) -> bool:
    """Whether it wants hidden states of each token, which stay where they were computed."""
    extra = extra_args(request)
    return bool(extra.get("pc_hidden_states") or extra.get("pc_prompt_logprobs"))


def why_no_moves(scheduler: Any) -> str:
    """What of an engine that can jump over gaps makes moves impossible, or ""; workers were asked when it started."""
    (group,) = scheduler.kv_cache_config.kv_cache_groups
    if type(group.kv_cache_spec) is not FullAttentionSpec:
        return f"layers with a cache of the kind {type(group.kv_cache_spec).__name__}"
    reason: str = getattr(scheduler.vllm_config.model_config, "pc_cannot_move", "an engine without PC_VLLM=eviction")
    return reason
