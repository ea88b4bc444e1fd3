"""Which vLLM is served: a range of versions, and the interfaces of it that a feature builds on.

vLLM's plugin interfaces carry no promise of stability, so a version in range is not enough: what a feature overrides or
calls has to be there with the parameters it had.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

VERSIONS = {"vllm": ((0, 32), (0, 33)), "vllm_omni": ((0, 30), (0, 30))}
"""By package: the oldest and the newest series that is served."""

INTERFACES: dict[str, dict[str, str]] = {
    "attention": {
        "vllm.v1.attention.backends.registry:register_backend": "backend class_path",
        "vllm.v1.attention.backend:AttentionBackend.validate_configuration": (
            "head_size dtype kv_cache_dtype block_size use_mla has_sink use_sparse use_mm_prefix "
            "use_per_head_quant_scales device_capability attn_type has_sliding_window"
        ),
        "vllm.v1.attention.backend:AttentionMetadataBuilder.__init__": (
            "self kv_cache_spec layer_names vllm_config device"
        ),
        "vllm.v1.attention.backend:AttentionMetadataBuilder.build": (
            "self common_prefix_len common_attn_metadata fast_build"
        ),
        "vllm.v1.attention.backend:AttentionImpl.forward": (
            "self layer query key value kv_cache attn_metadata output output_scale output_block_scale"
        ),
        "vllm.v1.attention.backend:CommonAttentionMetadata": (
            "query_start_loc seq_lens num_reqs num_actual_tokens max_query_len max_seq_len block_table_tensor "
            "slot_mapping causal rswa_prefix_lens"
        ),
        "vllm.v1.kv_cache_layout:KVCacheLayout": "",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata": (
            "self num_reqs for_cudagraph_capture"
        ),
    },
    "eviction": {
        "vllm.v1.core.block_pool:BlockPool.touch": "self blocks",
        "vllm.v1.core.block_pool:BlockPool.get_new_blocks": "self num_blocks",
        "vllm.v1.core.block_pool:BlockPool.free_blocks": "self ordered_blocks",
        "vllm.v1.core.block_pool:BlockPool.unpin_blocks": "self blocks on_reuse",
        "vllm.v1.core.block_pool:BlockPool._maybe_evict_cached_block": "self block",
        "vllm.v1.core.block_pool:BlockPool._notify_reuse": "self blocks",
        "vllm.v1.core.block_pool:BlockPool.cache_full_blocks": (
            "self request blocks num_cached_blocks num_full_blocks block_size kv_cache_group_id"
        ),
        "vllm.v1.core.block_pool:BlockPool.cache_partial_block": (
            "self request block num_tokens kv_cache_group_id block_size"
        ),
        "vllm.v1.core.block_pool:BlockPool.move_block_hashes": "self src_block dst_block",
        "vllm.v1.core.block_pool:BlockPool.evict_blocks": "self block_ids",
        "vllm.v1.core.block_pool:BlockPool.reset_prefix_cache": "self",
        "vllm.v1.core.kv_cache_utils:KVCacheBlock": "block_id ref_cnt pool is_null _block_hash _block_hash_num_tokens",
        "vllm.v1.core.block_pool:BlockHashToBlockMap.insert": "self key block",
        "vllm.v1.core.kv_cache_utils:make_block_hash_with_group_id": "block_hash group_id",
        "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.popleft_n": "self n",
        "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.append_n": "self blocks",
        "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.prepend_n": "self blocks",
        "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.remove": "self block",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": "self request",
        "vllm.v1.core.sched.scheduler:Scheduler.__init__": "self vllm_config kv_cache_config",
        "vllm.v1.core.sched.scheduler:Scheduler._free_blocks": "self request",
        "vllm.v1.core.sched.scheduler:Scheduler._preempt_request": "self request",
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler": "",
        "vllm.config:VllmConfig.__post_init__": "self",
        "vllm.config:SchedulerConfig": "scheduler_cls async_scheduling",
    },
    "hidden_states": {
        "vllm.v1.worker.gpu_model_runner:ExecuteModelState": "hidden_states aux_hidden_states",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model": "self scheduler_output",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._pool": "self hidden_states num_scheduled_tokens",
        "vllm.v1.pool.metadata:PoolingStates.clean": "self",
        "vllm.v1.worker.gpu_worker:Worker.initialize_from_config": "self kv_cache_config",
        "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model": "self",
        "vllm.v1.core.sched.output:NewRequestData": (
            "req_id prompt_token_ids sampling_params block_ids num_computed_tokens"
        ),
        "vllm.v1.core.sched.output:CachedRequestData": ("req_ids resumed_req_ids new_block_ids num_computed_tokens"),
        "vllm.v1.core.sched.output:SchedulerOutput": (
            "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens finished_req_ids kv_cache_block_copies"
        ),
        "vllm.config:VllmConfig.__post_init__": "self",
    },
    "connector": {
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.__init__": (
            "self vllm_config role kv_cache_config"
        ),
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.get_required_kvcache_layout": (
            "vllm_config"
        ),
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.register_kv_caches": "self kv_caches",
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.get_num_new_matched_tokens": (
            "self request num_computed_tokens"
        ),
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.update_state_after_alloc": (
            "self request blocks num_external_tokens"
        ),
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.build_connector_meta": (
            "self scheduler_output"
        ),
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.get_block_ids_with_load_errors": "self",
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.start_load_kv": "self forward_context",
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.wait_for_save": "self",
        "vllm.v1.core.sched.output:NewRequestData": "req_id block_ids num_computed_tokens",
        "vllm.v1.core.sched.output:CachedRequestData": "req_ids resumed_req_ids new_block_ids num_computed_tokens",
        "vllm.v1.kv_cache_interface:AttentionSpec.unpadded_page_size_bytes": "",
        "vllm.config:KVTransferConfig": "kv_connector_extra_config kv_load_failure_policy",
        "vllm.config:ModelConfig.is_hybrid": "",
    },
    "omni": {
        "vllm_omni.core.prefix_cache.manager:OmniPrefixCacheManager.__init__": "self config view eager",
        "vllm_omni.core.prefix_cache.manager:OmniPrefixCacheManager.register_policy": "self policy",
        "vllm_omni.core.prefix_cache.manager:OmniPrefixCacheManager.new_step_starts": "self scheduler_output",
        "vllm_omni.core.prefix_cache.manager:OmniPrefixCacheManager.save_outputs": (
            "self hidden_states mm_outputs num_tokens_unpadded num_tokens_padded"
        ),
        "vllm_omni.core.prefix_cache.manager:OmniPrefixCacheManager.materialize": "self step_id req_ids",
        "vllm_omni.core.prefix_cache.manager:OmniPrefixCacheManager.discard_step": "",
        "vllm_omni.core.prefix_cache.manager:OmniPrefixCacheManager.shutdown": "self",
        "vllm_omni.core.prefix_cache.interface:PrefixCacheConfig": (
            "num_blocks block_size staging_depth staging_claim_timeout_s"
        ),
        "vllm_omni.core.prefix_cache.interface:StageCacheOutputs": "hidden_states mm_outputs",
        "vllm_omni.core.prefix_cache.interface:ModelCachePolicy": "needs_full_hidden_states deferred_keys",
        "vllm_omni.core.prefix_cache.group_view:check_prefix_cache_kv_groups": "kv_cache_groups",
        "vllm_omni.core.prefix_cache.runner_mixin:get_prefix_cache_group_view": (
            "input_batch block_size kv_cache_groups"
        ),
        "vllm_omni.core.prefix_cache.runner_mixin:OmniPrefixCacheManager": "",
    },
}
"""By feature: what it builds on, as module:name, and the parameters it relies on."""

PACKAGES = {"omni": "vllm_omni"}
"""By feature: whose interfaces these are, where it is not vLLM."""


class UnsupportedVersionError(RuntimeError):
    """The installed vLLM is not one that this package was written for.

    Examples:
        >>> from pc.integrations.vllm import UnsupportedVersionError, check_version
        >>> try:
        ...     check_version("attention")
        ... except UnsupportedVersionError as error:
        ...     reason = str(error)
        ... except ImportError:
        ...     reason = "vLLM is not installed"
    """


def check_version(feature: str) -> None:
    """Checks that the installed vLLM, or vLLM-Omni, is in range and has the interfaces that a feature builds on.

    Raises:
        UnsupportedVersionError: It is not; says what was found and what is needed.

    Examples:
        >>> from pc.integrations.vllm import UnsupportedVersionError, check_version
        >>> try:
        ...     check_version("attention")
        ... except UnsupportedVersionError as error:
        ...     reason = str(error)  # names the versions that are served
    """
    package = PACKAGES.get(feature, "vllm")
    oldest, newest = VERSIONS[package]
    supported = f"{_text(oldest)} to {_text(newest)}"
    try:
        version = str(importlib.import_module(package).__version__)
    except ImportError as error:
        wanted = f"{package.replace('_', '-')}>={_text(oldest)},<{newest[0]}.{newest[1] + 1}"
        raise UnsupportedVersionError(f"{package}: not installed, needs {supported}; pip install '{wanted}'") from error
    if not oldest <= _series(version) <= newest:
        raise UnsupportedVersionError(f"{package}: got {version}, needs {supported}")
    for name, parameters in INTERFACES[feature].items():
        _check_interface(name, parameters.split(), f"{package} {version} ({feature}; written for {supported})")


def _text(series: tuple[int, int]) -> str:
    return ".".join(map(str, series))


def _series(version: str) -> tuple[int, ...]:
    """Major and minor number; a version without them is out of every range."""
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return (0, 0)
    return int(parts[0]), int(parts[1])


def _check_interface(name: str, parameters: list[str], where: str) -> None:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise UnsupportedVersionError(f"{name}: not there, needed by {where}") from error
    if parameters:
        there = inspect.signature(found).parameters
        missing = [parameter for parameter in parameters if parameter not in there]
        if missing:
            raise UnsupportedVersionError(f"{name}: has no {', '.join(missing)}, needed by {where}")
