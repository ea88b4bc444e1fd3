"""How many first blocks the requests of a batch share, which vLLM 0.32 and 0.33 no longer tell attention backends."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import numpy.typing as npt

from .builder import NULL_BLOCK, SHARED_REQUESTS, SHARED_TOKENS, PagedMetadataBuilder


def count_shared_blocks(table: npt.NDArray[np.int32], computed: npt.NDArray[np.int32], block_size: int) -> int:
    """Leading columns of a block table that are equal in all rows, all of whose tokens every request has computed.

    Args:
        table: `[num_requests, max_blocks]`.
        computed: `[num_requests]`, computed tokens of each.
        block_size: Tokens of a block.
    """
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
    """Lets vLLM's model runner tell `PagedMetadataBuilder` what a batch shares, from its tables on the host; once."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    build = GPUModelRunner._build_attention_metadata
    if getattr(build, "tells_pc", False):
        return
    signature = inspect.signature(build)

    @functools.wraps(build)
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

    build_and_tell.tells_pc = True  # type: ignore[attr-defined]
    GPUModelRunner._build_attention_metadata = build_and_tell


def _builders(runner: Any) -> list[tuple[int, PagedMetadataBuilder]]:
    """Those of this package, with their groups."""
    return [
        (number, builder)
        for number, groups in enumerate(runner.attn_groups)
        for group in groups
        for builder in group.metadata_builders
        if isinstance(builder, PagedMetadataBuilder) and not builder.captured and not builder.batch_invariant
    ]
