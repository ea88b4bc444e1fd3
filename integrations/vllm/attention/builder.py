"""What the layers of a step share: tables with holes for vLLM's null block, lengths, one plan for each window.

How many first blocks all requests of a batch share is counted here, since vLLM 0.32 and 0.33 no longer tell backends.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from vllm import envs
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder

from ....triton_ops import attention_plan
from ....triton_ops._attention.layout import PlanShape
from ....triton_ops._triton import INTERPRET
from ...plugin import wrap_once

NULL_BLOCK = 0
"""vLLM's block for positions without KV: its number in every pool."""

SHARED_TOKENS, SHARED_REQUESTS = 256, 8
"""A common prefix is read once from so many tokens and requests on; below, a second launch costs more."""


@dataclass
class PagedMetadata(AttentionMetadata):
    """A step of one group of layers."""

    num_actual_tokens: int  # rows of the query that are attended, padding of a captured graph included
    block_tables: torch.Tensor  # `[num_seqs, max_blocks]` int32, -1 where vLLM has its null block
    seq_lens: torch.Tensor  # `[num_seqs]` int32
    query_start_loc: torch.Tensor  # `[num_seqs + 1]` int32
    max_query_len: int  # upper bounds of a sequence
    max_seq_len: int | None  # None: what the tables can hold
    causal: bool = True
    batch_invariant: bool = False
    num_shared_blocks: int = 0  # first ones of all sequences, where reading them once pays
    plans: dict[int, torch.Tensor] = field(default_factory=dict)  # by window, 0 for none; empty if none are needed


class PagedMetadataBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Builds a step's metadata, in memory that stays where it is when CUDA graphs read it.

    Steps whose sequences have equally many queries (decoding, verification of drafts) can be replayed from a graph:
    tables and plans are refreshed before the replay, and nothing in them is sized by the values of a step.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size: int = kv_cache_spec.block_size
        layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, layer_names)
        # One group may mix windows, where vLLM's hybrid cache manager is off.
        windows = {getattr(getattr(layer, "impl", None), "window", 0) for layer in layers.values()}
        # On the CPU the operators need no plan, except where they run kernels in the interpreter.
        self.windows = sorted(windows) if device.type != "cpu" or INTERPRET else []
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        compilation = vllm_config.compilation_config
        mode = getattr(compilation, "cudagraph_mode", None)
        self.captured = device.type != "cpu" and mode is not None and bool(mode.has_full_cudagraphs())
        self.max_seqs = max([vllm_config.scheduler_config.max_num_seqs, *(compilation.cudagraph_capture_sizes or ())])
        self.shared = 0, 0
        """Requests of the batch that is being built, and first blocks that they share; see `common_prefix`."""
        self._tables: torch.Tensor | None = None
        self._plans: dict[int, torch.Tensor] = {}

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PagedMetadata:
        """The metadata of a step; NotImplementedError where no operator of `pc` computes it."""
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
        metadata = PagedMetadata(
            num_actual_tokens=common.num_actual_tokens,
            block_tables=self._block_tables(common),
            seq_lens=common.seq_lens,
            query_start_loc=common.query_start_loc,
            max_query_len=common.max_query_len,
            max_seq_len=None if self.captured else common.max_seq_len,
            causal=common.causal,
            batch_invariant=self.batch_invariant,
            num_shared_blocks=num_shared,
        )
        for window in self.windows:
            metadata.plans[window] = self._plan(metadata, window)
        return metadata

    def _block_tables(self, common: Any) -> torch.Tensor:
        """VLLM's tables with -1 for the null block, as wide as the step needs, or as they are under graphs."""
        tables: torch.Tensor = common.block_table_tensor
        if not self.captured:
            tables = tables[:, : -(-common.max_seq_len // self.block_size)]
            return tables.masked_fill(tables == NULL_BLOCK, -1)
        if self._tables is None:
            self._tables = tables.new_empty(max(self.max_seqs, tables.shape[0]), tables.shape[1])
        out = self._tables[: tables.shape[0]]
        return out.copy_(tables).masked_fill_(tables == NULL_BLOCK, -1)

    def _plan(self, metadata: PagedMetadata, window: int) -> torch.Tensor:
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
    """Leading columns of `[num_requests, max_blocks]` equal in all rows, of tokens that all have `computed`."""
    limit = int(computed.min()) // block_size
    if len(table) < SHARED_REQUESTS or limit * block_size < SHARED_TOKENS:
        return 0
    first = table[0, :limit]
    # The last request differs soonest where only some share more; most batches end here.
    same = first == table[-1, :limit]
    if not same[: -(-SHARED_TOKENS // block_size)].all():
        return 0
    same = (table[:, :limit] == first).all(axis=0) & (first != NULL_BLOCK)
    return limit if same.all() else int(same.argmin())


def follow_common_prefixes() -> None:
    """Lets vLLM's model runner hand `PagedMetadataBuilder` what a batch shares, from its tables on the host; once."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def wrap(build: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(build)

        def build_and_tell(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = signature.bind(self, *args, **kwargs).arguments
            builders = _builders(self) if not given.get("for_cudagraph_capture") else []
            try:
                for group, builder in builders:
                    count, batch = given["num_reqs"], self.input_batch
                    table = batch.block_table[group].block_table.np[:count]
                    shared = count_shared_blocks(table, batch.num_computed_tokens_cpu[:count], builder.block_size)
                    builder.shared = count, shared
                return build(self, *args, **kwargs)
            finally:
                for _, builder in builders:
                    builder.shared = 0, 0

        return build_and_tell

    wrap_once(GPUModelRunner, "_build_attention_metadata", wrap)


def _builders(runner: Any) -> list[tuple[int, PagedMetadataBuilder]]:
    """Those of this package, with their groups."""
    return [
        (number, builder)
        for number, groups in enumerate(runner.attn_groups)
        for group in groups
        for builder in group.metadata_builders
        if isinstance(builder, PagedMetadataBuilder) and not builder.captured and not builder.batch_invariant
    ]
