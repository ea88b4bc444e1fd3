"""VLLM's KV connector over a tier of `pc.cache`."""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.logger import init_logger

from ....cache.tier import Tier
from ....cache.tier_writer import TierWriter
from ..versions import check_version
from .blocks import BlockStore
from .layout import block_bytes, check_options, describe, layout_of, open_tier
from .plans import Plan, Planner

logger = init_logger(__name__)


class TierConnector(KVConnectorBase_V1):
    """Blocks that one engine computed are read by others, through a directory or a Mooncake store.

    Blocks are loaded before the step that needs them and handed to a thread that writes them after the step that
    completes them. A tier may lose them at any time: a block that is not there when it is wanted is computed, whatever
    `kv_load_failure_policy` says.

    `kv_connector_extra_config` of vLLM's KVTransferConfig: `tier` ("disk" with `path` and `capacity_bytes`, "mooncake"
    with the arguments of `MooncakeTier.connect`, or "module:function"), `model` (stands for the weights, where they are
    in no folder of this machine), `writer_bytes` (bound of what waits to be written).

    Raises:
        ValueError: At start-up: an option that is not known; a model with recurrent layers, several groups of layers,
            pipeline or context parallelism or adapters (LoRA), by name.
        UnsupportedVersionError: A vLLM with other interfaces.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check_version("connector")
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._options: dict[str, Any] = transfer.kv_connector_extra_config
        check_options(self._options)
        check_connector(vllm_config, kv_cache_config)
        self._bytes = block_bytes(kv_cache_config)
        self._tier: Tier | None = None
        self._store: BlockStore | None = None
        self._failed: set[int] = set()
        self._quiet = 0
        # As many steps may have been scheduled before the failure of a load is known.
        self._unaware = int(getattr(vllm_config, "max_concurrent_batches", 2))
        if role is KVConnectorRole.SCHEDULER:
            transfer.kv_load_failure_policy = "recompute"
            fingerprint = describe(vllm_config, kv_cache_config, self._options)
            ranks = vllm_config.parallel_config.tensor_parallel_size
            layouts = [layout_of(fingerprint, rank, self._bytes) for rank in range(ranks)]
            self._tiers = [open_tier(self._options, layout, gives=False) for layout in layouts]
            (group,) = kv_cache_config.kv_cache_groups
            self._planner = Planner(
                self._tiers,
                group.kv_cache_spec.block_size,
                fingerprint,
                produces=transfer.is_kv_producer,
                consumes=transfer.is_kv_consumer,
            )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """None, since blocks of any layout are served. It is asked before vLLM makes groups of the layers.

        Raises:
            ValueError: A model with recurrent layers; later vLLM would fail to make a single group of them.
        """
        if vllm_config.model_config.is_hybrid:
            raise ValueError(
                f"kv_transfer_config: got TierConnector for a model with recurrent layers "
                f"({', '.join(vllm_config.model_config.architectures)}), needs one with attention layers alone: states "
                "of recurrent layers need vLLM's hybrid KV cache manager, which is off beside a connector of one group "
                "of blocks (not SupportsHMA); without --kv-transfer-config the model is served, hits within the engine"
            )
        return None

    # The scheduler's half.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that the tier has behind those cached here."""
        return self._planner.find(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Follows a request from the step on in which it runs."""
        self._planner.admit(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        """What the workers load and save around this step."""
        return self._planner.plan(scheduler_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Its blocks may go: what is saved was copied in the step that completed it."""
        self._planner.forget(request.request_id)
        return False, None

    # A worker's half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The caches of the layers.

        Raises:
            ValueError: Blocks of other sizes than the scheduler takes them to have.
        """
        self._store = BlockStore(kv_caches, self._bytes)

    def _open(self, plan: Plan) -> Tier:
        if self._tier is None:
            from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

            layout = layout_of(plan.fingerprint, get_tensor_model_parallel_rank(), self._bytes)
            self._tier = TierWriter(open_tier(self._options, layout), self._options.get("writer_bytes", 1 << 30))
        return self._tier

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Fills this step's blocks from the tier; those that it has lost are told to the scheduler."""
        plan = self._get_connector_metadata()
        if isinstance(plan, Plan) and plan.loads:
            assert self._store is not None
            tier = self._open(plan)
            lost = [block for wanted in plan.loads for block in self._store.load(tier, wanted)]
            if lost:
                logger.warning("%d blocks that a tier had a moment ago are gone; they are computed", len(lost))
                self._failed.update(lost)
                self._quiet = 1 + self._unaware

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is under way."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole blocks are saved, behind the step."""

    def wait_for_save(self) -> None:
        """Hands the blocks that this step completed to the tier's writer.

        Behind a load that failed nothing is saved until no step is left that was scheduled before that was known.
        """
        if self._quiet:
            self._quiet -= 1
            return
        plan = self._get_connector_metadata()
        if isinstance(plan, Plan) and plan.saves:
            assert self._store is not None
            self._store.save(self._open(plan), plan.saves)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that could not be loaded in this step."""
        failed, self._failed = self._failed, set()
        return failed

    def shutdown(self) -> None:
        """Waits for what is being written, and leaves the tiers."""
        tiers: list[Any] = [self._tier, *getattr(self, "_tiers", ())]
        self._tier, self._tiers = None, []
        for tier in tiers:
            if isinstance(tier, TierWriter):
                tier.close()
                tier = tier.tier
            if hasattr(tier, "close"):
                tier.close()


def check_connector(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuses what blocks of a tier cannot stand for.

    Raises:
        ValueError: By name.
    """
    from vllm.v1.kv_cache_interface import AttentionSpec

    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, AttentionSpec):
        raise ValueError(f"kv_cache_groups: got {', '.join(kinds)}, needs one group of attention layers")
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise ValueError(f"{name}: got {getattr(parallel, name)}, needs 1")
    if vllm_config.lora_config is not None:
        raise ValueError("lora_config: got adapters, which blocks know by name alone, needs None")
    cache = vllm_config.cache_config
    if "xxhash" in str(cache.prefix_caching_hash_algo) and not os.environ.get("PYTHONHASHSEED"):
        raise ValueError(
            f"prefix_caching_hash_algo: got {cache.prefix_caching_hash_algo}, whose hashes differ from process to "
            "process; needs sha256, or PYTHONHASHSEED set"
        )
    hashed = getattr(cache, "prefix_match_unit", None) or groups[0].kv_cache_spec.block_size
    if hashed != groups[0].kv_cache_spec.block_size:
        raise ValueError(f"prefix_match_unit: got {hashed}, needs the block size")
