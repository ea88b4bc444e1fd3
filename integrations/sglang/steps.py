"""What the layers of a step share: block tables out of SGLang's slots, lengths, one plan for each window, tree masks.

Nothing here waits for the device. In a captured graph the same functions fill tensors that stay where they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...triton_ops import attention_plan
from ...triton_ops._attention.layout import PlanShape
from ...triton_ops._triton import INTERPRET

WORD = 32
"""Bits of a word of a tree mask."""


class Kind(NamedTuple):
    """What tells the layers of a model apart: they share a plan if these are equal, a table if `in_window_pool` is."""

    in_window_pool: bool  # its keys lie in the smaller pool that SGLang keeps for windowed layers
    window: int  # keys a query sees, itself included; 0 for all


@dataclass
class AttentionStep:
    """A step, or the captured graph of one size."""

    seq_lens: torch.Tensor  # `[num_seqs]` int32, tokens of this step included
    query_start_loc: torch.Tensor  # `[num_seqs + 1]` int32
    max_query_len: int | None  # upper bounds, None where the host knows none
    max_seq_len: int | None
    tables: dict[bool, torch.Tensor]  # `[num_seqs, max_blocks]` int32, by `Kind.in_window_pool`
    plans: dict[Kind, torch.Tensor] = field(default_factory=dict)
    window_slots: torch.Tensor | None = None  # `[num_tokens]`, where the windowed layers' pool takes the tokens
    tree_mask: torch.Tensor | None = None  # `[num_tokens, words]` int32; with it
    depths: torch.Tensor | None = None  # `[num_tokens]` int32, positions of the drafts in their branches
    causal: bool = True  # not said in graphs of drafts, where the masks alone decide and padding may break the rule


class StepBuilder:
    """Makes steps from SGLang's table of slots, and the memory that captured graphs read."""

    def __init__(self, runner: Any, kinds: set[Kind], num_kv_heads: int, batch_invariant: bool) -> None:
        self.page_size = int(runner.page_size)
        self.req_to_token: torch.Tensor = runner.req_to_token_pool.req_to_token
        self.pool = runner.token_to_kv_pool
        self.num_kv_heads = num_kv_heads
        self.batch_invariant = batch_invariant
        self.pools = sorted({kind.in_window_pool for kind in kinds} | {False})
        # On the CPU the operators need no plan, except where they run kernels in the interpreter.
        planned = self.req_to_token.device.type != "cpu" or INTERPRET
        self.kinds = sorted(kinds) if planned else []
        self._memory: _GraphMemory | None = None
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
        """A step in memory of its own.

        Args:
            rows: `[num_seqs]` of `req_to_token`.
            seq_lens: `[num_seqs]`, any integers.
            query_start_loc: `[num_seqs + 1]` int32.
            max_query_len: Upper bound, None for what the shapes allow.
            max_seq_len: Likewise; tables are no wider.
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
        """New plans for a step."""
        step.plans = {kind: self._plan(step, kind, None) for kind in self.kinds}

    def window_slots(self, slots: torch.Tensor | None) -> torch.Tensor | None:
        """Where the windowed layers' pool takes tokens that go to `slots`; None where there is none."""
        if slots is None or not hasattr(self.pool, "translate_loc_from_full_to_swa"):
            return None
        translated: torch.Tensor = self.pool.translate_loc_from_full_to_swa(slots)
        return translated

    def _tables(self, rows: torch.Tensor, columns: int) -> dict[bool, torch.Tensor]:
        """By pool: the numbers of the blocks that begin at each page of the sequences."""
        starts = self.req_to_token[:, : columns * self.page_size : self.page_size].index_select(0, rows)
        tables = {}
        for windowed in self.pools:
            slots = self.pool.translate_loc_from_full_to_swa(starts.to(torch.int64)) if windowed else starts
            blocks = torch.div(slots, self.page_size, rounding_mode="floor").to(torch.int32)
            # A block that has left the window is taken away: its slots are translated to SGLang's padding, block 0.
            tables[windowed] = blocks.masked_fill_(blocks < 1, -1) if windowed else blocks
        return tables

    def _plan(self, step: AttentionStep, kind: Kind, out: torch.Tensor | None) -> torch.Tensor:
        return attention_plan(
            step.tables[kind.in_window_pool],
            step.seq_lens,
            step.query_start_loc,
            self.page_size,
            causal=step.causal,
            window=kind.window,
            query_positions=step.depths,
            num_kv_heads=self.num_kv_heads,
            batch_invariant=self.batch_invariant,
            out=out,
        )

    def reserve(self, max_seqs: int, max_tokens: int) -> None:
        """Memory for the graphs of up to so many sequences and tokens."""
        columns = -(-self.req_to_token.shape[1] // self.page_size)
        device = self.req_to_token.device

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        tables = {windowed: empty(max_seqs, columns) for windowed in self.pools}
        size = PlanShape.of(tables[False], self.page_size).size
        self._memory = _GraphMemory(
            seq_lens=empty(max_seqs),
            tables=tables,
            plans={kind: empty(size) for kind in self.kinds},
            window_slots=empty(max_tokens, dtype=torch.int64) if hasattr(self.pool, "swa_kv_pool") else None,
            depths=empty(max_tokens),
        )
        self._graphs = {}

    def graph_step(self, num_seqs: int, query_len: int, drafts: bool) -> AttentionStep:
        """The step of a graph: `num_seqs` sequences with `query_len` tokens each; the same object every time."""
        if self._memory is None:
            raise RuntimeError("init_cuda_graph_state has to be called before a graph's metadata")
        key = num_seqs, query_len, drafts
        if key not in self._graphs:
            memory, tokens = self._memory, num_seqs * query_len
            tables = {windowed: table[:num_seqs] for windowed, table in memory.tables.items()}
            starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=self.req_to_token.device) * query_len
            step = AttentionStep(memory.seq_lens[:num_seqs], starts, query_len, None, tables)
            size = PlanShape.of(tables[False], self.page_size).size
            step.plans = {kind: plan[:size] for kind, plan in memory.plans.items()}
            step.window_slots = None if memory.window_slots is None else memory.window_slots[:tokens]
            if drafts:
                step.causal, step.depths = False, memory.depths[:tokens]
                step.tree_mask = starts.new_zeros(tokens, -(-query_len // WORD))
            self._graphs[key] = step
        return self._graphs[key]

    def refresh(
        self, step: AttentionStep, rows: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor | None
    ) -> None:
        """Brings a graph's step up to date; every operation has fixed shapes and can be recorded."""
        step.seq_lens.copy_(seq_lens)
        for windowed, table in self._tables(rows, step.tables[False].shape[1]).items():
            step.tables[windowed].copy_(table)
        for kind, plan in step.plans.items():
            self._plan(step, kind, plan)
        if step.window_slots is not None and slots is not None:
            step.window_slots.copy_(self.pool.translate_loc_from_full_to_swa(slots))


class _GraphMemory(NamedTuple):
    seq_lens: torch.Tensor
    tables: dict[bool, torch.Tensor]
    plans: dict[Kind, torch.Tensor]
    window_slots: torch.Tensor | None
    depths: torch.Tensor


def draft_masks(custom_mask: torch.Tensor, query_len: int, seq_lens: torch.Tensor, of_all_keys: bool) -> torch.Tensor:
    """Which drafts each draft of a sequence sees, out of what SGLang's tree builder leaves.

    Args:
        custom_mask: One vector; for each sequence, then each of its drafts: all keys before the drafts and the drafts,
            or the drafts alone.
        query_len: Drafts of a sequence.
        seq_lens: `[num_seqs]`, without the drafts.
        of_all_keys: Whether the keys before the drafts are in the vector.

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
    # Sequences that pad a graph have no part in the vector.
    return custom_mask.take(index.clamp_(max=custom_mask.numel() - 1)).to(torch.bool)


def pack_masks(masks: torch.Tensor) -> torch.Tensor:
    """`tree_mask` of `pc.sparse_gap_attention`, `[num_seqs * query_len, words]` int32, of `draft_masks`."""
    num_seqs, query_len, _ = masks.shape
    words = -(-query_len // WORD)
    bits = torch.nn.functional.pad(masks.to(torch.int64), (0, words * WORD - query_len))
    weights = torch.ones(WORD, dtype=torch.int64, device=masks.device) << torch.arange(WORD, device=masks.device)
    packed = (bits.view(num_seqs * query_len, words, WORD) * weights).sum(-1)
    # The highest bit is the sign of an int32.
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)
