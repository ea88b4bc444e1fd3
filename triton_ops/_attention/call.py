"""The arguments of an attention call, whichever operator it came through."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .._launcher import metadata


@dataclass(slots=True, eq=False)
class AttentionCall:
    """What an attention operator was given; the operators' docstrings say what each is."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    scale: float
    query_positions: torch.Tensor | None = None
    window: int = 0
    num_sink_tokens: int = 0
    num_shared_blocks: int = 0
    causal: bool = True
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    max_query_len: int | None = None
    max_seq_len: int | None = None
    plan: torch.Tensor | None = None
    batch_invariant: bool = False

    @property
    def key_begin(self) -> int:
        """The first key position behind the shared blocks."""
        return self.num_shared_blocks * self.key_cache.shape[1]

    def signature(self) -> tuple[object, ...]:
        """All that kernels are chosen and compiled by: equal for two calls that differ in addresses and values only."""
        return (
            self.window,
            self.num_sink_tokens,
            self.num_shared_blocks,
            self.causal,
            self.softcap,
            self.max_query_len,
            self.max_seq_len,
            self.batch_invariant,
            metadata(
                self.query,
                self.key_cache,
                self.value_cache,
                self.block_tables,
                self.seq_lens,
                self.query_start_loc,
                self.query_positions,
                self.alibi_slopes,
                self.sinks,
                self.k_scale,
                self.v_scale,
                self.plan,
            ),
        )
