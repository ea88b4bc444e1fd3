"""State shared by the layers of one step: block tables made from SGLang's slots, lengths, plans for each window, masks.

Nothing here waits for the device. In a captured graph the same functions fill tensors at fixed addresses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ...triton_ops import attention_plan
from ...triton_ops._attention.layout import PlanShape
from ...triton_ops._core.runtime import INTERPRET

WORD = 32
"""Number of bits in a word of a tree mask."""


Kind = tuple[bool, int]
"""A kind of layer: whether its keys are in SGLang's smaller pool for windowed layers, and its window.

The window is the number of keys a query attends to, its own included; 0: all. Layers of equal kind share a plan. Layers
whose keys are in one pool share a block table.
"""


@dataclass
class AttentionStep:
    """The attention metadata of one step, or of the captured graph of one size."""

    seq_lens: torch.Tensor  # `[num_seqs]` int32, with the tokens of this step
    query_start_loc: torch.Tensor  # `[num_seqs + 1]` int32
    max_query_len: int | None  # upper bounds; None if the host does not know them
    max_seq_len: int | None
    tables: dict[bool, torch.Tensor]  # `[num_seqs, max_blocks]` int32, by pool: True for the windowed layers'
    plans: dict[Kind, torch.Tensor] = field(default_factory=dict)
    window_slots: torch.Tensor | None = None  # `[num_tokens]`, slots in the windowed layers' pool
    tree_mask: torch.Tensor | None = None  # `[num_tokens, words]` int32
    depths: torch.Tensor | None = None  # `[num_tokens]` int32, positions of the drafts in their branches
    causal: bool = True  # False in graphs of drafts: only the masks decide, and padding may break the causal rule


class StepBuilder:
    """A builder of steps from SGLang's table of slots. It owns the memory that captured graphs read."""

    def __init__(self, runner: Any, kinds: set[Kind], num_kv_heads: int, batch_invariant: bool) -> None:
        self.page_size = int(runner.page_size)
        self.req_to_token: torch.Tensor = runner.req_to_token_pool.req_to_token
        self.pool = runner.token_to_kv_pool
        self.num_kv_heads = num_kv_heads
        self.batch_invariant = batch_invariant
        self.pools = sorted({windowed for windowed, _ in kinds} | {False})
        # On a CPU the operators need no plan, unless they run kernels in the interpreter.
        planned = self.req_to_token.device.type != "cpu" or INTERPRET
        self.kinds = sorted(kinds) if planned else []
        self._memory: AttentionStep | None = None
        self._graphs: dict[tuple[int, int, bool], AttentionStep] = {}

    def step(
        self,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        max_query_len: int | None,
        max_seq_len: int | None,
        drafts: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> AttentionStep:
        """Return a step with its own memory.

        Args:
            rows: `[num_seqs]`, rows of `req_to_token`.
            seq_lens: `[num_seqs]`, any integer dtype.
            query_start_loc: `[num_seqs + 1]` int32.
            max_query_len: An upper bound. None: as much as the shapes allow.
            max_seq_len: An upper bound, which limits the width of block tables. None: as much as the shapes allow.
            drafts: `tree_mask` and `depths` of a verification with masks.
        """
        width = self.req_to_token.shape[1]
        columns = -(-min(width, max_seq_len or width) // self.page_size)
        lengths = seq_lens.to(torch.int32)
        step = AttentionStep(lengths, query_start_loc, max_query_len, max_seq_len, self._tables(rows, columns))
        step.tree_mask, step.depths = drafts or (None, None)
        self.plan(step)
        return step

    def plan(self, step: AttentionStep) -> None:
        """Make new plans for a step."""
        step.plans = {kind: self._plan(step, kind, None) for kind in self.kinds}

    def window_slots(self, slots: torch.Tensor | None) -> torch.Tensor | None:
        """Translate tokens' slots to slots in the windowed layers' pool; return None if there is no such pool."""
        if slots is None or not hasattr(self.pool, "translate_loc_from_full_to_swa"):
            return None
        translated: torch.Tensor = self.pool.translate_loc_from_full_to_swa(slots)
        return translated

    def _tables(self, rows: torch.Tensor, columns: int) -> dict[bool, torch.Tensor]:
        """Return for each pool the block table of the sequences."""
        starts = self.req_to_token[:, : columns * self.page_size : self.page_size].index_select(0, rows)
        tables = {}
        for windowed in self.pools:
            slots = self.pool.translate_loc_from_full_to_swa(starts.to(torch.int64)) if windowed else starts
            blocks = torch.div(slots, self.page_size, rounding_mode="floor").to(torch.int32)
            # SGLang translates slots of a block that has left the window to block 0, its padding. Such blocks become
            # holes.
            tables[windowed] = blocks.masked_fill_(blocks < 1, -1) if windowed else blocks
        return tables

    def _plan(self, step: AttentionStep, kind: Kind, out: torch.Tensor | None) -> torch.Tensor:
        """Return the attention plan of a step for a kind of layer, in `out` if that is a tensor."""
        windowed, window = kind
        return attention_plan(
            step.tables[windowed],
            step.seq_lens,
            step.query_start_loc,
            self.page_size,
            causal=step.causal,
            window=window,
            query_positions=step.depths,
            num_kv_heads=self.num_kv_heads,
            batch_invariant=self.batch_invariant,
            out=out,
        )

    def reserve(self, max_seqs: int, max_tokens: int) -> None:
        """Allocate memory for graphs of up to `max_seqs` sequences and `max_tokens` tokens."""
        columns = -(-self.req_to_token.shape[1] // self.page_size)
        device = self.req_to_token.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        memory = AttentionStep(
            zeros(max_seqs), zeros(0), None, None, {each: zeros(max_seqs, columns) for each in self.pools}
        )
        size = PlanShape.of(memory.tables[False], self.page_size).size
        memory.plans = {kind: zeros(size) for kind in self.kinds}
        memory.window_slots = zeros(max_tokens, dtype=torch.int64) if hasattr(self.pool, "swa_kv_pool") else None
        memory.depths = zeros(max_tokens)
        self._memory = memory
        self._graphs = {}

    def graph_step(self, num_seqs: int, query_len: int, drafts: bool) -> AttentionStep:
        """Return the step of a graph with `num_seqs` sequences of `query_len` tokens: the same object in every call."""
        if self._memory is None:
            raise RuntimeError("graph metadata: got no memory, needs init_cuda_graph_state first")
        key = num_seqs, query_len, drafts
        if key not in self._graphs:
            memory, tokens = self._memory, num_seqs * query_len
            tables = {windowed: table[:num_seqs] for windowed, table in memory.tables.items()}
            starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=self.req_to_token.device) * query_len
            step = AttentionStep(memory.seq_lens[:num_seqs], starts, query_len, None, tables)
            size = PlanShape.of(tables[False], self.page_size).size
            step.plans = {kind: plan[:size] for kind, plan in memory.plans.items()}
            step.window_slots = None if memory.window_slots is None else memory.window_slots[:tokens]
            if drafts and memory.depths is not None:
                step.causal, step.depths = False, memory.depths[:tokens]
                step.tree_mask = starts.new_zeros(tokens, -(-query_len // WORD))
            self._graphs[key] = step
        return self._graphs[key]

    def refresh(
        self, step: AttentionStep, rows: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor | None
    ) -> None:
        """Update a graph's step. Every operation has fixed shapes, so a graph can record it."""
        step.seq_lens.copy_(seq_lens)
        for windowed, table in self._tables(rows, step.tables[False].shape[1]).items():
            step.tables[windowed].copy_(table)
        for kind, plan in step.plans.items():
            self._plan(step, kind, plan)
        if step.window_slots is not None and slots is not None:
            step.window_slots.copy_(self.pool.translate_loc_from_full_to_swa(slots))


def draft_masks(custom_mask: torch.Tensor, query_len: int, seq_lens: torch.Tensor, of_all_keys: bool) -> torch.Tensor:
    """Return which drafts of its sequence each draft sees, from the mask of SGLang's tree builder.

    Args:
        custom_mask: A vector. For each sequence, and each of its drafts, it has an entry for each key: all keys of the
            sequence, or only the drafts.
        query_len: Number of drafts of a sequence.
        seq_lens: `[num_seqs]`, without the drafts.
        of_all_keys: Whether the vector has entries for the keys before the drafts.

    Returns:
        `[num_seqs, query_len, query_len]` bool.
    """
    num_seqs = seq_lens.shape[0]
    if not of_all_keys:
        return custom_mask[: num_seqs * query_len * query_len].view(num_seqs, query_len, query_len).to(torch.bool)
    places = torch.arange(query_len, device=seq_lens.device)
    width = seq_lens.to(torch.int64) + query_len
    begin = (width * query_len).cumsum(0) - width * query_len
    index = begin[:, None, None] + places[:, None] * width[:, None, None] + (width - query_len)[:, None, None] + places
    # Sequences that pad a graph have no entries in the vector.
    return custom_mask.take(index.clamp_(max=custom_mask.numel() - 1)).to(torch.bool)


def pack_masks(masks: torch.Tensor) -> torch.Tensor:
    """Return masks as `tree_mask` of `pc.sparse_gap_attention`, `[num_seqs * query_len, words]` int32."""
    num_seqs, query_len, _ = masks.shape
    words = -(-query_len // WORD)
    bits = torch.nn.functional.pad(masks.to(torch.int64), (0, words * WORD - query_len))
    weights = torch.ones(WORD, dtype=torch.int64, device=masks.device) << torch.arange(WORD, device=masks.device)
    packed = (bits.view(num_seqs * query_len, words, WORD) * weights).sum(-1)
    # The highest bit is the sign of an int32.
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)
