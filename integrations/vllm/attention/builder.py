"""Metadata that the layers of a step share: tables with holes for vLLM's null block, lengths, a plan for each window.

The number of leading blocks that all requests of a batch share is counted here, since vLLM does not pass it to
backends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from ....triton_ops import attention_plan
from ....triton_ops._attention.layout import PlanShape
from ....triton_ops._core.runtime import INTERPRET
from ..api import (
    AttentionCGSupport,
    AttentionLayerBase,
    AttentionMetadata,
    AttentionMetadataBuilder,
    available,
    block_table_of,
    get_layers_from_vllm_config,
    is_batch_invariant,
)
from ..reasons import replays_whole_steps

NULL_BLOCK = 0
"""The number of vLLM's block for positions without KV, in every pool."""

SHARED_TOKENS, SHARED_REQUESTS = 256, 8
"""The least tokens and requests for which a common prefix is read once. With fewer, a second launch costs more time
than it saves."""


@dataclass
class PagedMetadata(AttentionMetadata):
    """The metadata of a step for one group of layers."""

    num_actual_tokens: int  # rows of the query, with the padding of a captured graph
    block_tables: torch.Tensor  # `[num_seqs, max_blocks]` int32, -1 where vLLM has its null block
    seq_lens: torch.Tensor  # `[num_seqs]` int32
    query_start_loc: torch.Tensor  # `[num_seqs + 1]` int32
    max_query_len: int  # upper bound of the queries of a sequence
    max_seq_len: int | None  # upper bound of its tokens; None: as many as the tables can hold
    causal: bool = True
    batch_invariant: bool = False
    num_shared_blocks: int = 0  # leading blocks of all sequences that are read once
    plans: dict[int, torch.Tensor] = field(default_factory=dict)  # by window, 0 for none; empty if none are needed


class PagedMetadataBuilder(AttentionMetadataBuilder):
    """Builder of a step's metadata, in memory at fixed addresses when CUDA graphs read it.

    Steps whose sequences have equally many queries (decoding, verification of drafts) can be replayed from a graph.
    Tables and plans are refreshed before the replay, and their sizes do not depend on the values of a step.
    """

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size: int = kv_cache_spec.block_size
        layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, layer_names)
        # A group may mix windows if vLLM's hybrid cache manager is off.
        impls = [getattr(layer, "impl", None) for layer in layers.values()]
        windows = {getattr(impl, "window", 0) for impl in impls}
        self._first = impls[0] if impls else None  # all layers have the same compressor
        # On the CPU the operators need no plan, unless they run kernels in the interpreter.
        self.windows = sorted(windows) if device.type != "cpu" or INTERPRET else []
        self.batch_invariant = is_batch_invariant()
        compilation = vllm_config.compilation_config
        self.captured = replays_whole_steps(compilation, device.type)
        self.max_seqs = max([vllm_config.scheduler_config.max_num_seqs, *(compilation.cudagraph_capture_sizes or ())])
        self.shared = 0, 0
        """The requests of the batch that is being built, and the number of leading blocks that they share."""
        self._tables: torch.Tensor | None = None
        self._plans: dict[int, torch.Tensor] = {}

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PagedMetadata:
        """Return the metadata of a step.

        Raises:
            NotImplementedError: No operator of `pc` computes the step.
        """
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise NotImplementedError("causal: got one value per sequence, needs one for all")
        if common.rswa_prefix_lens is not None:
            raise NotImplementedError("rswa_prefix_lens: R-SWA is not supported")
        requests, num_shared = self.shared
        num_shared = max(num_shared if requests == common.num_reqs else 0, common_prefix_len // self.block_size)
        too_few = num_shared * self.block_size < SHARED_TOKENS or common.num_reqs < SHARED_REQUESTS
        if self.captured or self.batch_invariant or too_few:
            num_shared = 0
        tables, seq_lens, longest = self._block_tables(common), common.seq_lens, common.max_seq_len
        compressor = getattr(self._first, "compressor", None)
        if compressor is not None and not self.captured:
            tables, seq_lens, longest = compressor.close_holes(tables, seq_lens, longest)
        metadata = PagedMetadata(
            num_actual_tokens=common.num_actual_tokens,
            block_tables=tables,
            seq_lens=seq_lens,
            query_start_loc=common.query_start_loc,
            max_query_len=common.max_query_len,
            max_seq_len=None if self.captured else longest,
            causal=common.causal,
            batch_invariant=self.batch_invariant,
            num_shared_blocks=num_shared,
        )
        for window in self.windows:
            metadata.plans[window] = self._plan(metadata, window)
        return metadata

    def _block_tables(self, common: Any) -> torch.Tensor:
        """Return vLLM's tables with -1 for the null block, as wide as the step needs; of full width under graphs."""
        tables: torch.Tensor = common.block_table_tensor
        if not self.captured:
            tables = tables[:, : -(-common.max_seq_len // self.block_size)]
            return tables.masked_fill(tables == NULL_BLOCK, -1)
        if self._tables is None:
            self._tables = tables.new_empty(max(self.max_seqs, tables.shape[0]), tables.shape[1])
        out = self._tables[: tables.shape[0]]
        return out.copy_(tables).masked_fill_(tables == NULL_BLOCK, -1)

    def _plan(self, metadata: PagedMetadata, window: int) -> torch.Tensor:
        """Return the attention plan of a step for layers with a window (0: none)."""
        tables = metadata.block_tables
        out = None
        if self.captured:
            assert self._tables is not None
            if window not in self._plans:
                self._plans[window] = tables.new_empty(PlanShape.of(self._tables, self.block_size).size)
            out = self._plans[window][: PlanShape.of(tables, self.block_size).size]
        return attention_plan(
            tables,
            metadata.seq_lens,
            metadata.query_start_loc,
            self.block_size,
            causal=metadata.causal,
            window=window,
            num_shared_blocks=0 if window else metadata.num_shared_blocks,
            num_kv_heads=self.kv_cache_spec.num_kv_heads,
            batch_invariant=metadata.batch_invariant,
            out=out,
        )


def count_shared_blocks(table: npt.NDArray[np.int32], computed: npt.NDArray[np.int32], block_size: int) -> int:
    """Return how many leading blocks all requests share and have computed.

    Return 0 for fewer than `SHARED_REQUESTS` requests. If these blocks have fewer than `SHARED_TOKENS` tokens, the
    result may also be 0.

    Args:
        table: Block table `[num_requests, max_blocks]`.
        computed: Computed tokens of each request.
        block_size: Tokens of a block.
    """
    limit = int(computed.min()) // block_size
    if len(table) < SHARED_REQUESTS or limit * block_size < SHARED_TOKENS:
        return 0
    first = table[0, :limit]
    # Comparing the first and the last request is cheap, and in most batches without a common prefix they differ.
    same = first == table[-1, :limit]
    if not same[: -(-SHARED_TOKENS // block_size)].all():
        return 0
    same = (table[:, :limit] == first).all(axis=0) & (first != NULL_BLOCK)
    return limit if same.all() else int(same.argmin())


def count_shared(runner: Any, count: int) -> Callable[[], None]:
    """Count the shared blocks of a runner's first `count` requests, in its tables on the host, for each builder.

    Returns:
        A function that resets the numbers of the builders.
    """
    if not hasattr(runner, "pc_shares_prefixes"):  # once for each runner
        runner.pc_shares_prefixes = available("attention.shared_prefix", runner=runner)
    builders = [
        (number, builder)
        for number, groups in enumerate(runner.attn_groups if runner.pc_shares_prefixes else ())
        for group in groups
        for builder in group.metadata_builders
        if isinstance(builder, PagedMetadataBuilder) and not builder.captured and not builder.batch_invariant
    ]
    for group, builder in builders:
        computed = runner.input_batch.num_computed_tokens_cpu[:count]
        builder.shared = count, count_shared_blocks(block_table_of(runner, group, count), computed, builder.block_size)

    def reset() -> None:
        for _, builder in builders:
            builder.shared = 0, 0

    return reset
