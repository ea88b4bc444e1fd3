"""Every private name of vLLM that this adapter uses. No other file imports vLLM or names its private attributes.

A feature is served if the installed vLLM has all that the tables here declare for it. See `seam` for their format. A
part of a feature, such as `eviction.gap`, needs its feature too. Names that several features need are in a table of
their own, such as `eviction.steps`; see `SHARED`.

- `NAMES`: classes, functions, methods with the parameters we rely on, and fields of vLLM's objects.
- `ATTRIBUTES`: attributes of the scheduler, worker and runner, which exist once the engine has made them. Code that
  receives such an object calls `available(feature, scheduler=scheduler)`. `NAMES` does not repeat them.
- `BODIES`: functions and classes of vLLM that this adapter reimplements or imitates, with a digest of the source for
  each release that was read. A feature is refused if the installed source has another digest, so `NAMES` need not list
  them.

To use another name of vLLM:

1. Add it to `NAMES`, or to `ATTRIBUTES`, under the feature that needs it. `python -m pc.integrations.vllm.api` checks
   the tables against the installed vLLM.
2. Other files can then import the classes and functions that the tables name, as in `from ..api import Scheduler`. A
   name that the installed vLLM lacks is imported as an empty class. So a module can be imported before its feature is
   refused.
3. Write a plain function here for each name with an underscore and for each change of a method of vLLM.
4. Add a body that you copy or imitate to `BODIES`. The same command prints its digest.

A new feature is a new key of `NAMES`. Call `available` before you change anything, and run vLLM's own code if it
returns False.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
import time
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from .. import seam
from ..seam import UnsupportedVersionError as UnsupportedVersionError
from ..seam import wrap_once
from ..tested import TESTED, say_untested

SINCE = {"offload": (0, 33)}
"""The oldest release series of vLLM that serves a feature, if it is not the oldest that was tested."""

SHARED = {
    **dict.fromkeys(("eviction.gap", "eviction.chunks", "eviction.explain"), ("eviction.steps",)),
    **dict.fromkeys(("eviction.anywhere", "compression"), ("eviction.steps", "eviction.workers")),
}
"""The tables that a feature needs beside its own: names for choosing what a step computes, and for hooks in workers."""

PACKAGES = {"omni": "vllm-omni"}
"""The distribution whose names a feature uses, if it is not vLLM."""

LOGGER = "vllm.pc"
"""vLLM shows messages of loggers below its own."""

NAMES: dict[str, dict[str, str]] = {
    "attention": {
        "vllm.v1.attention.backends.registry": (
            "register_backend(backend class_path) AttentionBackendEnum.CUSTOM AttentionBackendEnum.CPU_ATTN"
        ),
        "vllm.v1.attention.backend": (
            "AttentionBackend.validate_configuration(head_size dtype kv_cache_dtype block_size use_mla has_sink "
            "use_sparse use_mm_prefix use_per_head_quant_scales device_capability attn_type has_sliding_window ...) "
            "AttentionImpl.forward(layer query key value kv_cache attn_metadata output output_scale "
            "output_block_scale) AttentionMetadata AttentionType.DECODER MultipleOf AttentionCGSupport.UNIFORM_BATCH "
            "CommonAttentionMetadata(query_start_loc seq_lens num_reqs num_actual_tokens max_query_len max_seq_len "
            "block_table_tensor slot_mapping causal rswa_prefix_lens ...)"
        ),
        "vllm.v1.attention.backend:AttentionMetadataBuilder": (
            "__init__(kv_cache_spec layer_names vllm_config device) build(common_prefix_len common_attn_metadata "
            "fast_build) kv_cache_spec"
        ),
        "vllm.v1.kv_cache_layout": "KVCacheLayout.LBNHC",
        "vllm.v1.attention.selector": "_cached_get_attn_backend.cache_clear",
        "vllm.config": (
            "get_current_vllm_config_or_none get_layers_from_vllm_config(vllm_config layer_type layer_names) "
            "CompilationConfig.cudagraph_mode"
        ),
        "vllm.model_executor.layers.attention_layer_base": "AttentionLayerBase",
        "vllm.platforms": "current_platform.is_cpu",
    },
    "attention.latent": {
        "vllm.v1.attention.backends.mla.cpu_mla": (
            "CPUMLABackend CPUMLAImpl.forward_mqa(q kv_c_and_k_pe_cache attn_metadata layer)"
        ),
        "vllm.model_executor.layers.attention.mla_attention": (
            "MLACommonBackend MLACommonImpl.forward_mqa(q kv_c_and_k_pe_cache attn_metadata layer)"
        ),
    },
    "attention.shared_prefix": {
        "vllm.v1.worker.gpu_model_runner": (
            "GPUModelRunner._build_attention_metadata(num_reqs for_cudagraph_capture ...)"
        ),
    },
    "eviction": {
        "vllm.v1.core.block_pool:BlockPool": "get_num_free_blocks",
        "vllm.v1.core.kv_cache_utils": (
            "KVCacheBlock(block_id ref_cnt pool is_null _block_hash _block_hash_num_tokens ...) "
            "KVCacheBlock.block_hash make_block_hash_with_group_id(block_hash group_id)"
        ),
        "vllm.v1.request:Request": (
            "request_id sampling_params block_hashes num_output_tokens skip_reading_prefix_cache _all_token_ids"
        ),
        "vllm.v1.core.sched.scheduler:Scheduler": (
            "__init__(vllm_config kv_cache_config ...) add_request(request) schedule _free_blocks(request ...) "
            "_free_request_blocks(request ...) _preempt_request(request ...) make_stats"
        ),
        "vllm.v1.core.sched.async_scheduler": "AsyncScheduler",
        "vllm.v1.core.sched.request_queue": "SchedulingPolicy.PRIORITY",
        "vllm.config": (
            "VllmConfig.__post_init__ SchedulerConfig(scheduler_cls async_scheduling ...) VllmConfig.scheduler_config "
            "VllmConfig.parallel_config VllmConfig.model_config VllmConfig.additional_config "
            "VllmConfig.diffusion_config"
        ),
    },
    "eviction.steps": {
        "vllm.v1.core.sched.scheduler": (
            "Scheduler._reserve_prefill_lookahead(request num_computed_tokens num_new_tokens)"
        ),
        "vllm.v1.core.kv_cache_manager": "KVCacheManager.prefix_cache_lookup_enabled(request) KVCacheBlocks(blocks)",
        "vllm.v1.core.block_pool": "BlockHashToBlockMap.get_one_block(key)",
        "vllm.v1.core.single_type_kv_cache_manager": "FullAttentionManager",
        "vllm.v1.request:Request": (
            "num_computed_tokens num_prompt_tokens num_tokens num_preemptions mm_features prompt_embeds lora_request "
            "cache_salt"
        ),
        "vllm.lora.request": "LoRARequest.lora_name LoRARequest.lora_path",
        "vllm.config": "SchedulerConfig(long_prefill_token_threshold enable_chunked_prefill ...)",
    },
    "eviction.workers": {
        "vllm.v1.engine.core:EngineCore": "_initialize_kv_caches(vllm_config) model_executor",
        "vllm.v1.worker.gpu_model_runner": "GPUModelRunner._update_states(scheduler_output)",
        "vllm.v1.worker.gpu.model_runner": (
            "GPUModelRunner.update_requests(scheduler_output) GPUModelRunner.prepare_inputs(scheduler_output ...) "
            "GPUModelRunner.prepare_dummy_attn"
        ),
    },
    "eviction.gap": {
        "vllm.v1.core.kv_cache_manager:KVCacheManager": (
            "allocate_slots(request num_new_tokens new_computed_blocks full_sequence_must_fit has_scheduled_reqs) "
            "get_block_ids(request_id)"
        ),
        "vllm.v1.core.sched.output": (
            "NewRequestData.from_request(request block_ids prefill_token_ids) CachedRequestData(req_ids new_block_ids "
            "num_computed_tokens num_output_tokens ...) SchedulerOutput(num_scheduled_tokens scheduled_new_reqs "
            "scheduled_cached_reqs ...)"
        ),
        "vllm.v1.request": "RequestStatus.RUNNING Request.prefill_stats Request.status",
        "vllm.v1.metrics.stats": (
            "PrefillStats(num_local_cached_tokens num_cached_tokens num_computed_tokens ...) PrefixCacheStats.hits"
        ),
    },
    "eviction.anywhere": {
        "vllm.v1.kv_cache_interface": "FullAttentionSpec",
        "vllm.v1.request:Request": "update_block_hashes",
    },
    "eviction.chunks": {
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": (
            "find_longest_cache_hit(block_hashes max_cache_hit_length) cache_blocks(request num_computed_tokens)"
        ),
        "vllm.config": "ModelConfig.is_multimodal_model",
        "vllm.envs": "VLLM_BATCH_INVARIANT",
    },
    "eviction.explain": {
        "vllm.v1.core.block_pool:BlockPool": "get_cached_block(block_hash kv_cache_group_ids)",
        "vllm.v1.kv_cache_interface": "FullAttentionSpec SlidingWindowSpec(sliding_window ...) MambaSpec",
        "vllm.multimodal.inputs": (
            "MultiModalFeatureSpec.mm_position MultiModalFeatureSpec.identifier PlaceholderRange(offset length)"
        ),
    },
    "eviction.metrics": {
        "prometheus_client.mmap_dict": (
            "MmapedDict(filename ...) MmapedDict.write_value(key value timestamp) "
            "mmap_key(metric_name name labelnames labelvalues help_text)"
        ),
        "prometheus_client.multiprocess": "MultiProcessCollector(registry path)",
    },
    "compression": {
        "vllm.v1.core.kv_cache_manager": "KVCacheManager.get_computed_blocks(request ...)",
        "vllm.v1.core.kv_cache_coordinator": "KVCacheCoordinator.cache_blocks(request ...)",
        "vllm.v1.core.kv_cache_utils": "get_block_hash(key) maybe_convert_block_hash(hash_bytes)",
        "vllm.distributed.kv_events": (
            "BlockStored(block_hashes parent_block_hash token_ids block_size lora_id medium lora_name "
            "kv_cache_spec_kind ...)"
        ),
        "vllm.v1.core.sched.scheduler": "Scheduler._preempt_request(request timestamp ...)",
        "vllm.v1.core.sched.request_queue": "SchedulingPolicy.PRIORITY",
        "vllm.v1.core.sched.output": "SchedulerOutput(num_scheduled_tokens finished_req_ids ...)",
        "vllm.v1.request:Request": "priority arrival_time resumable",
        "vllm.sampling_params": "SamplingParams.verify SamplingParams(extra_args ...)",
        "vllm.config": "ParallelConfig.enable_dbo",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "requests input_batch kv_cache_config",
        "vllm.v1.worker.gpu_input_batch:InputBatch": "req_ids req_id_to_index block_table",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner": "req_states block_tables kv_cache_config",
        "vllm.v1.worker.gpu.states:RequestState": "req_id_to_index",
        "vllm.v1.worker.gpu.block_table:BlockTables": "block_tables",
        "vllm.v1.worker.gpu.buffer_utils": "StagedWriteTensor.stage_write",
    },
    "hidden_states": {
        "vllm.v1.worker.gpu_model_runner": "ExecuteModelState(hidden_states aux_hidden_states ...)",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "execute_model(scheduler_output ...) input_batch",
        "vllm.v1.worker.gpu_worker:Worker": "initialize_from_config(kv_cache_config) compile_or_warm_up_model shutdown",
        "vllm.v1.core.sched.output": (
            "NewRequestData(req_id prompt_token_ids prompt_embeds sampling_params block_ids num_computed_tokens ...) "
            "NewRequestData.prompt_len CachedRequestData(req_ids resumed_req_ids new_block_ids num_computed_tokens "
            "...) SchedulerOutput(scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens finished_req_ids "
            "kv_cache_block_copies ...)"
        ),
        "vllm.v1.kv_cache_interface": (
            "FullAttentionSpec KVCacheSpec.prefix_replay_tokens KVCacheConfig(num_blocks kv_cache_groups ...)"
        ),
        "vllm.config": (
            "VllmConfig.__post_init__ VllmConfig.scheduler_config VllmConfig.parallel_config VllmConfig.model_config "
            "VllmConfig.additional_config VllmConfig.speculative_config VllmConfig.kv_transfer_config "
            "VllmConfig.diffusion_config "
            "VllmConfig.cache_config CacheConfig.kv_sharing_fast_prefill ParallelConfig.decode_context_parallel_size "
            "ParallelConfig.prefill_context_parallel_size"
        ),
        "vllm.envs": "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",
        "vllm.platforms": "current_platform.is_cpu",
    },
    "hidden_states.pooling": {
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner": (
            "_pool(hidden_states num_scheduled_tokens ...) is_pooling_model"
        ),
        "vllm.v1.worker.gpu_input_batch:InputBatch": "pooling_params pooling_states req_ids",
        "vllm.v1.pool.metadata": "PoolingStates.clean",
        "vllm.v1.pool.metadata:PoolingStates": "hidden_states_cache",
        "vllm.pooling_params": ("PoolingParams(task skip_reading_prefix_cache ...) PoolingParams.verify(model_config)"),
        "vllm.model_executor.layers.pooler.tokwise.methods": "AllPool",
    },
    "connector": {
        "vllm.distributed.kv_transfer.kv_connector.v1.base": "KVConnectorMetadata KVConnectorRole.SCHEDULER",
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": (
            "__init__(vllm_config role kv_cache_config) get_required_kvcache_layout(vllm_config) "
            "register_kv_caches(kv_caches) get_num_new_matched_tokens(request num_computed_tokens) "
            "update_state_after_alloc(request blocks num_external_tokens) build_connector_meta(scheduler_output) "
            "get_block_ids_with_load_errors start_load_kv(forward_context) wait_for_save request_finished(request "
            "block_ids) reset_cache requires_kv_delivery _get_connector_metadata get_finished(finished_req_ids) "
            "update_connector_output(connector_output)"
        ),
        "vllm.v1.core.kv_cache_manager": "KVCacheBlocks.get_block_ids",
        "vllm.v1.outputs": "KVConnectorOutput(finished_recving invalid_block_ids ...)",
        "vllm.v1.core.sched.output": (
            "NewRequestData(req_id block_ids num_computed_tokens ...) CachedRequestData(req_ids resumed_req_ids "
            "new_block_ids num_computed_tokens ...) SchedulerOutput(finished_req_ids num_scheduled_tokens "
            "has_sync_kv_loads ...)"
        ),
        "vllm.v1.kv_cache_interface": "AttentionSpec.unpadded_page_size_bytes",
        "vllm.v1.attention.backends.registry": "AttentionBackendEnum",
        "vllm.distributed.parallel_state": "get_tensor_model_parallel_rank",
        "vllm.v1.worker.gpu_worker": "Worker.reload_weights Worker.update_weights(update_info) Worker.reset_weights",
        "vllm.config": (
            "KVTransferConfig(kv_connector_extra_config kv_load_failure_policy) ModelConfig.is_hybrid "
            "ModelConfig.runner_type ModelConfig.is_prefix_caching_supported VllmConfig.diffusion_config "
            "SchedulerConfig(max_num_batched_tokens ...) CacheConfig.prefix_match_unit"
        ),
        "vllm.v1.request:Request": "request_id num_tokens block_hashes skip_reading_prefix_cache",
    },
    "offload": {
        "vllm.v1.kv_offload.cpu.policies.base:CachePolicy": (
            "__init__(cache_capacity) get(key) insert(key chunk req_context) remove(key) touch(keys req_context) "
            "on_request_access(keys req_context) on_request_finished(key_groups insertion_only_keys reused_keys "
            "req_context) evict(n protected) clear mark_evictable(key) mark_non_evictable(key)"
        ),
        "vllm.v1.kv_offload.cpu.policies.lru": "LRUCachePolicy",
        "vllm.v1.kv_offload.base": (
            "ReqContext(req_id kv_hints) ReqContext.get_offload_key_position(key) Locality LookupResult.HIT "
            "LookupResult.MISS LookupResult.RETRY Medium.STORAGE RequestOffloadingContext"
        ),
        "vllm.v1.kv_offload.tiering.base": ("JobResult(job_id success successful_keys transfer_time transfer_bytes)"),
        "vllm.v1.kv_offload.tiering.base:SecondaryTierManager": (
            "__init__(offloading_spec primary_kv_view tier_type backpressure_detector) lookup(key req_context) "
            "submit_store(job_metadata) submit_load(job_metadata) get_finished_jobs on_new_request(req_context) "
            "on_request_finished(req_context) on_schedule_end(context) drain_jobs shutdown block_size_bytes"
        ),
        "vllm.v1.kv_offload.tiering.async_lookup:AsyncLookupManager": (
            "batch_lookup(keys req_context) lookup(key req_context) flush cleanup(req_id) mark_miss(keys) shutdown"
        ),
    },
    "omni": {
        "vllm_omni.core.prefix_cache.interface": (
            "PrefixCacheConfig(num_blocks block_size staging_depth staging_claim_timeout_s ...) "
            "StageCacheOutputs(hidden_states mm_outputs) ModelCachePolicy(needs_full_hidden_states deferred_keys ...) "
            "OmniPrefixCacheStagingTimeoutError OmniPrefixCacheUnmatchError is_hidden_key"
        ),
        "vllm_omni.core.prefix_cache": (
            "OmniPrefixCacheManager check_prefix_cache_kv_groups get_prefix_cache_group_view"
        ),
        "vllm_omni.core.prefix_cache.runner_mixin": "get_prefix_cache_group_view OmniPrefixCacheManager",
        "vllm_omni.utils.mm_outputs": "to_payload_element(element idx start end pass_lists_through seq_len)",
    },
}
"""The names that each feature uses, in the format of `seam`."""

ATTRIBUTES: dict[str, dict[str, str]] = {
    "attention.shared_prefix": {
        "runner": "attn_groups input_batch",
        "runner.input_batch": "block_table num_computed_tokens_cpu",
        "runner.input_batch.block_table.0": "block_table",
        "runner.input_batch.block_table.0.block_table": "np",
    },
    "eviction": {
        "scheduler": "kv_cache_manager waiting policy",
        "scheduler.kv_cache_manager": "block_pool coordinator allocate_slots",
        "scheduler.kv_cache_manager.coordinator.single_type_managers.0": "req_to_blocks block_size",
        "scheduler.kv_cache_manager.block_pool": (
            "blocks num_gpu_blocks free_block_queue enable_caching metrics_collector enable_kv_cache_events "
            "hash_block_size cached_block_hash_to_block cached_block_hashes_by_block _reuse_watchers"
        ),
        "scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block": "_cache",
        "scheduler.kv_cache_manager.block_pool.free_block_queue": "num_free_blocks",
    },
    "eviction.steps": {
        "scheduler": (
            "requests hash_block_size is_encoder_decoder ec_connector connector aux_output_connector use_pp "
            "dcp_world_size pcp_world_size num_lookahead_tokens scheduler_config vllm_config"
        ),
        "scheduler.kv_cache_manager": "enable_caching",
        "scheduler.kv_cache_manager.coordinator.single_type_managers.0": "kv_cache_group_id",
    },
    "eviction.workers": {
        "worker": "model_runner vllm_config",
        "worker.vllm_config.compilation_config": "static_forward_context",
    },
    "eviction.gap": {
        "scheduler": "use_v2_model_runner max_model_len",
        "scheduler.kv_cache_manager": "prefix_cache_stats watermark_blocks",
        "scheduler.kv_cache_manager.coordinator.single_type_managers.0": "num_cached_block",
    },
    "eviction.anywhere": {
        "scheduler.kv_cache_config.kv_cache_groups.0": "kv_cache_spec",
        "worker.model_runner": "get_model device",
    },
    "eviction.chunks": {"scheduler": "block_size has_mamba_layers prefix_replay_tokens max_num_scheduled_tokens"},
    "eviction.explain": {
        "scheduler.kv_cache_config.kv_cache_groups.0": "kv_cache_spec",
        "scheduler.kv_cache_config.kv_cache_groups.0.kv_cache_spec": "block_size",
    },
    "compression": {
        "scheduler": "running policy",
        "scheduler.kv_cache_manager.block_pool": "null_block kv_event_queue medium",
    },
    "hidden_states": {
        "worker": "model_runner vllm_config rank",
        "runner": "execute_model execute_model_state device model model_config",
    },
    "hidden_states.pooling": {"runner": "_pool input_batch", "runner.input_batch": "pooling_params pooling_states"},
}
"""The attributes of an engine's objects that each feature uses, in the format of `seam.absent`."""

BODIES: dict[str, dict[str, dict[str, str]]] = {
    "eviction": {
        "vllm.v1.core.block_pool:BlockPool.touch": {"0.32": "513cd226d9aa", "0.33": "6731fae0cda4"},
        "vllm.v1.core.block_pool:BlockPool.get_new_blocks": {"0.32, 0.33": "057e6bbc93c3"},
        "vllm.v1.core.block_pool:BlockPool.free_blocks": {"0.32": "a8d52468c740", "0.33": "69405eadc30b"},
        "vllm.v1.core.block_pool:BlockPool.unpin_blocks": {"0.32, 0.33": "0e1bfbec7e76"},
        "vllm.v1.core.block_pool:BlockPool._maybe_evict_cached_block": {"0.32, 0.33": "f382afac91ef"},
        "vllm.v1.core.block_pool:BlockPool._remove_cached_block_hashes": {"0.32, 0.33": "5ed00524f34c"},
        "vllm.v1.core.block_pool:BlockPool._insert_block_hash": {"0.32, 0.33": "8ea169790383"},
        "vllm.v1.core.block_pool:BlockPool._notify_reuse": {"0.32, 0.33": "8e72a256e10a"},
        "vllm.v1.core.block_pool:BlockPool.cache_full_blocks": {"0.32": "db12cb6a9563", "0.33": "0159a39f9acc"},
        "vllm.v1.core.block_pool:BlockPool.cache_partial_block": {"0.32": "87b021d1228e", "0.33": "da19b5678710"},
        "vllm.v1.core.block_pool:BlockPool.move_block_hashes": {"0.32, 0.33": "5606bd3676c5"},
        "vllm.v1.core.block_pool:BlockPool.evict_blocks": {"0.32, 0.33": "1409cdbb0b41"},
        "vllm.v1.core.block_pool:BlockPool.reset_prefix_cache": {"0.32, 0.33": "562b5985f8fa"},
        "vllm.v1.core.block_pool:BlockHashToBlockMap": {"0.32, 0.33": "859807dedbb2"},
        "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue": {"0.32, 0.33": "2c2fd4f4ada1"},
        "vllm.v1.core.kv_cache_utils:KVCacheBlock": {"0.32, 0.33": "c326a99a8376"},
    },
    "eviction.gap": {
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": {"0.32, 0.33": "107050adc22e"},
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.add_local_computed_blocks": {
            "0.32, 0.33": "847f8aa6930d"
        },
        "vllm.v1.core.sched.scheduler:Scheduler._make_cached_request_data": {"0.32, 0.33": "fed4c94c98ef"},
        "vllm.v1.core.sched.output:NewRequestData.from_request": {"0.32, 0.33": "724929ecc9b9"},
    },
    "omni": {
        "vllm_omni.core.prefix_cache.manager:OmniPrefixCacheManager": {"0.30": "15a1cd96b7e0"},
        "vllm_omni.core.prefix_cache.group_view:check_prefix_cache_kv_groups": {"0.30": "5ac72e438ac2"},
        "vllm_omni.core.prefix_cache.group_view:get_prefix_cache_group_view": {"0.30": "0cbd5820344c"},
        "vllm_omni.core.prefix_cache.runner_mixin:PrefixCacheRunnerMixin": {"0.30": "18f8269ba5e2"},
    },
}
"""The bodies that each feature reimplements or imitates, and their digests by the series of releases that have them."""

PATHS = seam.paths(NAMES.values())
"""The classes and functions that other files may import from here, and their paths in vLLM."""


BY_PLATFORM: dict[str, tuple[str, str]] = {
    "LatentBackend": (
        "vllm.v1.attention.backends.mla.cpu_mla:CPUMLABackend",
        "vllm.model_executor.layers.attention.mla_attention:MLACommonBackend",
    ),
    "LatentImpl": (
        "vllm.v1.attention.backends.mla.cpu_mla:CPUMLAImpl",
        "vllm.model_executor.layers.attention.mla_attention:MLACommonImpl",
    ),
    "PlatformWorker": ("vllm.v1.worker.cpu_worker:CPUWorker", "vllm.v1.worker.gpu_worker:Worker"),
}
"""For each of these names, the path of the class on vLLM's CPU platform, and that of the class elsewhere."""

VLLMS_WORKERS = ("auto", *(path.replace(":", ".") for path in BY_PLATFORM["PlatformWorker"]))
"""The values of an engine's `worker_cls` if the user has not named one."""


def __getattr__(name):  # type: ignore[no-untyped-def]  # untyped, so that mypy accepts imported names as classes
    """Return the class or function of `PATHS` with this name, or an empty class if the installed vLLM lacks it."""
    if name == "logger":
        return make_logger()
    if name not in PATHS and name not in BY_PLATFORM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = seam.find(PATHS[name] if name in PATHS else BY_PLATFORM[name][0 if is_cpu() else 1])
    except Exception:
        return seam.stand_in(name)
    globals()[name] = found  # found faster from now on
    return found


def make_logger() -> logging.Logger:
    """Return this adapter's logger, whose messages vLLM shows."""
    try:
        from vllm.logger import init_logger

        return init_logger(LOGGER)  # type: ignore[no-any-return]
    except Exception:
        return logging.getLogger(LOGGER)


# Plain functions over vLLM's private names.


def packed_blocks_stored(pool: Any, request: Any, keys: list[bytes]) -> Any:
    """Return the KV event for packed blocks of a compressed text, whose kind is `pc_compressed`."""
    from vllm.distributed.kv_events import BlockStored
    from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

    adapter = request.lora_request
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(get_block_hash(key)) for key in keys],
        parent_block_hash=None,
        token_ids=[],
        block_size=pool.hash_block_size,
        lora_id=adapter.adapter_id if adapter else None,
        medium=pool.medium,
        lora_name=adapter.name if adapter else None,
        kv_cache_spec_kind="pc_compressed",
    )


# Which features the installed vLLM can serve.


def why_not(feature: str, **objects: Any) -> str:
    """Return why the installed vLLM cannot serve a feature, or "".

    Args:
        feature: A key of `NAMES`.
        **objects: Objects of vLLM whose attributes are checked too, under the names that `ATTRIBUTES` uses.
    """
    for needed in (feature.partition(".")[0], *SHARED.get(feature, ())):
        if needed != feature and (reason := why_not(needed, **objects)):
            return reason
    package = PACKAGES.get(feature, "vllm")
    tested = TESTED[package]._replace(oldest=SINCE.get(feature, TESTED[package].oldest))
    tables = [NAMES[feature]], BODIES.get(feature, {}), objects, ATTRIBUTES.get(feature, {})
    return seam.why_not(feature, package, tested, *tables)


def check_version(feature: str, **objects: Any) -> None:
    """Check that the installed vLLM, or vLLM-Omni, can serve a feature. Arguments are as for `why_not`.

    Raises:
        UnsupportedVersionError: It cannot. The message says what was found and what is needed.

    Examples:
        >>> from pc.integrations.vllm import UnsupportedVersionError, check_version
        >>> try:
        ...     check_version("attention")
        ... except UnsupportedVersionError as error:
        ...     reason = str(error)  # names the versions that are served
    """
    seam.check_served(PACKAGES.get(feature, "vllm"), why_not(feature, **objects))


_logged: set[tuple[str, str]] = set()


def available(feature: str, **objects: Any) -> bool:
    """Return whether the installed vLLM can serve a feature; log once why it cannot. Arguments are as for `why_not`."""
    reason = why_not(feature, **objects)
    if reason:
        log_off(feature, reason)
    else:
        say_untested(PACKAGES.get(feature, "vllm"))
    return not reason


def log_off(feature: str, reason: str) -> None:
    """Log once that a feature is off, and why."""
    if (feature, reason) not in _logged:
        _logged.add((feature, reason))
        make_logger().warning("%s is off, and vLLM's own code runs in its place: %s", feature, reason)


# Properties of the installed vLLM.


def version() -> str:
    """Return the version of the installed vLLM."""
    return str(importlib.import_module("vllm").__version__)


def is_cpu() -> bool:
    """Return whether vLLM runs on its CPU platform."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def is_batch_invariant() -> bool:
    """Return whether VLLM_BATCH_INVARIANT asks vLLM for results that do not depend on the batch."""
    from vllm import envs

    return bool(envs.VLLM_BATCH_INVARIANT)


def callers_request_id(request: str) -> str:
    """Return a request's id as vLLM's callers know it, without the random characters that vLLM appends."""
    from vllm import envs

    return request if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION else request.rpartition("-")[0]


# Configurations.


def is_vllms(name: Any) -> bool:
    """Return whether an engine's configuration names a class of vLLM itself, by its import path."""
    return isinstance(name, str) and name.startswith("vllm.")


def _call_after(owner: Any, name: str, hook: Callable[[Any], None]) -> None:
    """Have `hook` called after a method of vLLM. A second call of this function changes nothing.

    Args:
        owner: A class, or an object, of vLLM.
        name: The name of the method.
        hook: Called with the first argument of the method, which is the instance if `owner` is a class.
    """

    def call_both(vllms: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = vllms(*args, **kwargs)
        hook(args[0])
        return result

    wrap_once(owner, name, call_both)


def call_after_configuration(complete: Callable[[Any], None]) -> None:
    """Have `complete(vllm_config)` called for each configuration of an engine, after vLLM has completed it."""
    _call_after(seam.find(PATHS["VllmConfig"]), "__post_init__", complete)


# Attention.


def register_attention(backend: str, latent: bool = False) -> None:
    """Register a backend, by its import path, under the names that vLLM uses for CPUs and for custom backends.

    Args:
        backend: The import path.
        latent: Whether the backend computes multi-head latent attention.
    """
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    # Users name the first, of which CUSTOM_MLA is new to vLLM. vLLM's CPU platform ignores that option and always uses
    # the others.
    for name in ("CUSTOM_MLA", "CPU_MLA", "AMX_MLA") if latent else ("CUSTOM", "CPU_ATTN"):
        register_backend(AttentionBackendEnum.__members__.get(name, name), backend)
    selector._cached_get_attn_backend.cache_clear()  # it has the choices of earlier engines


def registered_attention(name: str) -> str:
    """Return the import path of the class that is registered under a name of vLLM's attention backends, or ""."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    try:
        return str(AttentionBackendEnum[name].get_path())
    except (KeyError, ValueError):  # no such name, or nothing registered under it
        return ""


def chosen_attention(vllm_config: Any) -> tuple[str, bool]:
    """Return the name under which this package registers its backend, and whether this engine uses that name."""
    latent = getattr(getattr(vllm_config, "model_config", None), "use_mla", False)
    name = ("CPU_MLA" if latent else "CPU_ATTN") if is_cpu() else ("CUSTOM_MLA" if latent else "CUSTOM")
    given = getattr(vllm_config, "attention_config", None)
    chosen = [getattr(given, "backend", None), *(getattr(given, "backend_per_kind", None) or {}).values()]
    return name, is_cpu() or name in [str(getattr(each, "name", each)) for each in chosen]


def call_before_metadata(prepare: Callable[[Any, int], Callable[[], None]]) -> None:
    """Have `prepare(runner, num_reqs)` called before vLLM builds the attention metadata of a step.

    The function that `prepare` returns is called afterwards. Steps that only capture a graph are skipped.
    """
    runners = seam.find("vllm.v1.worker.gpu_model_runner:GPUModelRunner")
    signature = inspect.signature(runners._build_attention_metadata)

    def prepare_and_build(build: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        if given.get("for_cudagraph_capture"):
            return build(self, *args, **kwargs)
        undo = prepare(self, given["num_reqs"])
        try:
            return build(self, *args, **kwargs)
        finally:
            undo()

    wrap_once(runners, "_build_attention_metadata", prepare_and_build)


def block_table_of(runner: Any, group: int, count: int) -> Any:
    """Return the block table of the first `count` requests of a runner's batch, a numpy array `[count, max_blocks]`."""
    return runner.input_batch.block_table[group].block_table.np[:count]


def key_scale(layer: Any) -> Any:
    """Return the scale of a layer's quantized keys, a tensor of one element."""
    return layer._k_scale


def value_scale(layer: Any) -> Any:
    """Return the scale of a layer's quantized values, a tensor of one element."""
    return layer._v_scale


# The scheduler and its blocks.

block_hash: Callable[[Any], bytes | None] = attrgetter("_block_hash")
"""Return a block's hash with its group of layers; the public property takes ten times as long."""

token_ids: Callable[[Any], list[int]] = attrgetter("_all_token_ids")
"""Return a request's tokens so far as vLLM's own list, which must not be changed."""


def with_hooks(kind: Any) -> Any:
    """Let a class derived from vLLM's scheduler have methods that are called at certain times, and return the class.

    - `before_end(request)`: a request has ended, and vLLM has not freed what it holds.
    - `before_release(request)`: a request is preempted or has ended, and vLLM has not freed its blocks.
    - `before_preemption(request)`: vLLM is about to preempt a request.
    - `clip_chunk(allowed, request, num_computed_tokens, num_new_tokens)`: returns how many of the `allowed` tokens a
      request may compute in a step. It is called if the attribute `clips` is set.
    """

    def call_before(name: str, hook: str) -> None:
        def method(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            getattr(self, hook)(request)
            return getattr(super(kind, self), name)(request, *args, **kwargs)

        setattr(kind, name, method)

    def reserve(self: Any, *args: Any, **kwargs: Any) -> Any:
        allowed = super(kind, self)._reserve_prefill_lookahead(*args, **kwargs)
        return self.clip_chunk(allowed, *args, **kwargs) if self.clips else allowed

    call_before("_free_blocks", "before_end")
    call_before("_free_request_blocks", "before_release")
    call_before("_preempt_request", "before_preemption")
    kind._reserve_prefill_lookahead = reserve
    return kind


def become_stock(scheduler: Any) -> None:
    """Turn a scheduler of this package into the scheduler of vLLM that it is derived from, in place."""
    kinds = [kind for kind in type(scheduler).__mro__ if kind.__module__.partition(".")[0] == "vllm"]
    scheduler.__class__ = kinds[0]


def preempt(scheduler: Any, request: Any) -> None:
    """Preempt a request that the caller has removed from the scheduler's list of running requests."""
    scheduler._preempt_request(request, time.monotonic())


def has_own_table(pool: Any) -> bool:
    """Return whether a pool and its table of hashes are vLLM's own, so that `drop_hashes` may write to the table."""
    table = getattr(pool.cached_block_hash_to_block, "_cache", None)
    return type(pool) is seam.find(PATHS["BlockPool"]) and type(table) is dict


@functools.cache
def group_ending(group: int) -> bytes:
    """Return the bytes that vLLM appends to the hash of a block in a group of layers."""
    return bytes(seam.find("vllm.v1.core.kv_cache_utils:make_block_hash_with_group_id")(b"", group))


def give_key(pool: Any, key: bytes, block: Any, num_tokens: int) -> None:
    """Give a block that holds `num_tokens` tokens a hash with its group of layers."""
    pool._insert_block_hash(key, block, num_tokens=num_tokens)


def find_cached(pool: Any, key: bytes) -> Any:
    """Return a block with this hash and group of layers, or None if no block has it."""
    return pool.cached_block_hash_to_block.get_one_block(key)


def call_reuse_watchers(pool: Any, blocks: list[Any]) -> None:
    """Notify vLLM's watchers, which may still read these blocks, that the blocks are about to be reused."""
    if pool._reuse_watchers:
        pool._notify_reuse(blocks)


def _table_of(pool: Any) -> dict[bytes, Any] | None:
    """Return the table of blocks by key; None if something watches it, so that vLLM's own methods must be called."""
    watched = pool.enable_kv_cache_events or pool.metrics_collector or pool.cached_block_hashes_by_block
    return pool.cached_block_hash_to_block._cache if pool.has_vllms_table and not watched else None


def drop_hashes(pool: Any, blocks: list[Any]) -> None:
    """Remove the hashes of blocks that are about to be reused.

    Where nothing watches the table, write to it directly: vLLM's own pool makes several calls for each block.
    """
    table = _table_of(pool)
    if table is None:
        for block in blocks:
            pool._maybe_evict_cached_block(block)
        return
    for block in blocks:
        key = block._block_hash
        if key is not None:
            found = table.pop(key, None)
            if found is block:
                block._block_hash = block._block_hash_num_tokens = None
                continue
            if found is not None:  # several blocks have the hash
                table[key] = found
            pool._maybe_evict_cached_block(block)


def give_hashes(
    pool: Any, request: Any, blocks: list[Any], first: int, group: int
) -> tuple[list[bytes], list[tuple[int, int]]]:
    """Give full blocks of a request their hashes, like vLLM's `cache_full_blocks`.

    Args:
        pool: A pool whose blocks have as many tokens as a hash covers.
        request: The request.
        blocks: Its full blocks without hashes.
        first: The place of the first of them in the request.
        group: Their group of layers.

    Returns:
        The keys of all blocks, and the ranges of blocks for which vLLM's own method must still be called. If
            something watches the pool's table of hashes, there are no keys, and one range has all blocks.
    """
    table, size = _table_of(pool), pool.hash_block_size
    if table is None:
        return [], [(first, first + len(blocks))]
    ending = group_ending(group)
    keys = [digest + ending for digest in request.block_hashes[first : first + len(blocks)]]
    left, tokens = [], first * size
    for block, key in zip(blocks, keys, strict=True):
        tokens += size
        if block._block_hash is not None or block.is_null or table.setdefault(key, block) is not block:
            left.append((tokens // size - 1, tokens // size))
        else:
            block._block_hash = key
            block._block_hash_num_tokens = tokens
    return keys, left


# Workers.


def ask_workers(ask_all: Callable[[Any, Callable[[Callable[[Any], str]], str]], None]) -> None:
    """Have `ask_all` called for each engine of this process, when its workers have caches and it has no scheduler yet.

    Args:
        ask_all: Called with the engine's configuration and a function `ask(question)`. `ask` calls `question(worker)`
            in each worker's process, and returns the first answer that is not "".
    """

    def initialize_both(initialize: Callable[..., Any], self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        result = initialize(self, vllm_config, *args, **kwargs)

        def ask(question: Callable[[Any], str]) -> str:
            try:
                return next(filter(None, self.model_executor.collective_rpc(question)), "")
            except Exception as error:  # some executors only accept names of methods
                return f"an executor that does not ask its workers ({error})"

        ask_all(vllm_config, ask)
        return result

    wrap_once(seam.find("vllm.v1.engine.core:EngineCore"), "_initialize_kv_caches", initialize_both)


def call_around_update(
    runner: Any, after: Callable[[list[str], Any], None], before: Callable[[Any], None] | None = None
) -> None:
    """Have functions called around the update of a model runner's requests, V1 or V2, in each step.

    Args:
        runner: vLLM's model runner.
        after: Called with the batch's request ids in their order and the step's `SchedulerOutput`, before the forward
            pass. By then vLLM has zeroed and copied the blocks that the step names. Before a dummy batch, which runner
            V2 computes if only other data-parallel ranks have requests, it is called with [] and None.
        before: Called with the same output, before blocks are zeroed or copied.
    """
    is_v2 = hasattr(runner, "update_requests")
    name = "update_requests" if is_v2 else "_update_states"
    vllms, prepare = getattr(runner, name), getattr(runner, "prepare_inputs", None)
    prepare_dummy = getattr(runner, "prepare_dummy_attn", None)

    def update(output: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(output)
        result = vllms(output, *args, **kwargs)
        if not is_v2:
            after(runner.input_batch.req_ids, output)
        return result

    def prepare_inputs(output: Any, *args: Any, **kwargs: Any) -> Any:
        batch = prepare(output, *args, **kwargs)  # type: ignore[misc]
        after(batch.req_ids, output)
        return batch

    def prepare_dummy_attn(*args: Any, **kwargs: Any) -> Any:
        after([], None)
        return prepare_dummy(*args, **kwargs)  # type: ignore[misc]

    setattr(runner, name, update)
    if is_v2:
        runner.prepare_inputs, runner.prepare_dummy_attn = prepare_inputs, prepare_dummy_attn


def check_sampling_params(check: Callable[[Any], None]) -> None:
    """Have `check(sampling_params)` called after vLLM's own check of the parameters. `check` may raise ValueError."""
    _call_after(seam.find("vllm.sampling_params:SamplingParams"), "verify", check)


def replace_pooling(runner: Any, pool: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the function that pools a step's hidden states in a runner, and return vLLM's own."""
    vllms, runner._pool = runner._pool, pool
    return vllms  # type: ignore[no-any-return]


def pool_prefix_hits(decide: Callable[[Any], bool]) -> None:
    """Let pooling requests that return a row for each token read prefix hits, which vLLM itself does not allow.

    Args:
        decide: Called with the model's configuration. Returns whether its requests may read hits.
    """

    def decide_and_verify(verify: Callable[..., None], self: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        open_choice = self.skip_reading_prefix_cache is None and str(self.task).startswith("token_")
        if open_choice and decide(model_config):
            self.skip_reading_prefix_cache = False
        verify(self, model_config, *args, **kwargs)

    wrap_once(seam.find("vllm.pooling_params:PoolingParams"), "verify", decide_and_verify)


def mark_weight_changes() -> None:
    """Have workers of this process set `pc_changed_weights` of their `cache_config` when they change their weights.

    Connectors share that object with their worker: `MultiConnector` copies the configuration, and `update_config`
    replaces its `model_config`.
    """

    def mark_and_change(change: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
        worker.vllm_config.cache_config.pc_changed_weights = True  # before the change, which may fail half done
        return change(worker, *args, **kwargs)

    kind = seam.find("vllm.v1.worker.gpu_worker:Worker")
    for name in ("reload_weights", "update_weights", "reset_weights"):
        wrap_once(kind, name, mark_and_change)


def connector_metadata(connector: Any) -> Any:
    """Return the metadata of this step that a KV connector's scheduler half sent to its worker half."""
    return connector._get_connector_metadata()


# vLLM-Omni.


def replace_omni_cache(manager: type, check_groups: Callable[..., Any], make_view: Callable[..., Any]) -> None:
    """Replace vLLM-Omni's cache manager, its check of KV cache groups and its view of a batch."""
    from vllm_omni.core import prefix_cache
    from vllm_omni.core.prefix_cache import group_view, runner_mixin
    from vllm_omni.core.prefix_cache import manager as module_of_manager

    # Runners look up these names in their own module when they make the cache.
    for module in (prefix_cache, module_of_manager, runner_mixin):
        module.OmniPrefixCacheManager = manager
    for module in (prefix_cache, group_view):
        module.check_prefix_cache_kv_groups = check_groups
    for module in (prefix_cache, group_view, runner_mixin):
        module.get_prefix_cache_group_view = make_view


def omni_manager() -> Any:
    """Return the class that vLLM-Omni uses for its cache, or None if vLLM-Omni is not in use."""
    return getattr(sys.modules.get("vllm_omni.core.prefix_cache"), "OmniPrefixCacheManager", None)


if __name__ == "__main__":
    raise SystemExit(seam.print_differences([NAMES], BODIES))
