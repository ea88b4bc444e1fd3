"""Everything private of vLLM that this adapter uses. No other file imports vLLM or names its private attributes.

A feature is served if the installed vLLM has what the tables here declare for it; see `seam` for their format. A part
of a feature, such as `eviction.gap`, needs its feature too.

- `NAMES`: classes, functions, methods with the parameters we rely on, and fields of vLLM's objects.
- `ATTRIBUTES`: attributes of objects that exist once the engine has made them. Whoever gets such an object asks
  `available(feature, scheduler=scheduler)`.
- `BODIES`: bodies of vLLM that this adapter reimplements, or whose effects it imitates, with a digest for each release
  that was read. An unknown body refuses the feature.

To use another name of vLLM:

1. Add it to `NAMES`, or to `ATTRIBUTES`, under the feature that needs it. `python -m pc.integrations.vllm.api` checks
   the tables against the installed vLLM.
2. A class or function that other files import gets an entry in `CLASSES`: `from ..api import Scheduler` then works. A
   name that the installed vLLM lacks is imported as an empty class, so that a module can be imported before its feature
   is refused.
3. A name with an underscore, and a patch of vLLM, becomes a plain function here.
4. A body that you copy or imitate gets an entry in `BODIES`; the same command prints its digest.

A new feature is an entry of `NAMES` under its name. Call `available` before anything is changed, and run vLLM's own
code if it returns False.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from .. import seam
from ..plugin import UnsupportedVersionError as UnsupportedVersionError
from ..plugin import release_of, series_text
from ..tested import TESTED, say_untested

VERSIONS = {"vllm": TESTED["vllm"], "vllm_omni": TESTED["vllm-omni"]}
"""The oldest and the newest series that was tested, by package. A newer one is tried."""

SINCE = {"offload": (0, 33)}
"""The oldest series of a feature, where it is not that of its package."""

PACKAGES = {"omni": "vllm_omni"}
"""The package whose names a feature uses, where it is not vLLM."""

LOGGER = "vllm.pc"
"""vLLM shows messages of loggers below its own."""

NAMES: dict[str, dict[str, str]] = {
    "attention": {
        "vllm.v1.attention.backends.registry": "register_backend(backend class_path) AttentionBackendEnum",
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
            "get_current_vllm_config_or_none get_layers_from_vllm_config(vllm_config layer_type layer_names)"
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
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "attn_groups input_batch",
        "vllm.v1.worker.gpu_input_batch:InputBatch": "block_table num_computed_tokens_cpu",
    },
    "eviction": {
        "vllm.v1.core.block_pool:BlockPool": (
            "touch(blocks) get_new_blocks(num_blocks) free_blocks(ordered_blocks) unpin_blocks(blocks on_reuse) "
            "_maybe_evict_cached_block(block) _notify_reuse(blocks) cache_full_blocks(request blocks "
            "num_cached_blocks num_full_blocks block_size kv_cache_group_id ...) cache_partial_block(request block "
            "num_tokens kv_cache_group_id block_size ...) move_block_hashes(src_block dst_block) "
            "evict_blocks(block_ids) reset_prefix_cache get_num_free_blocks"
        ),
        "vllm.v1.core.kv_cache_utils": (
            "KVCacheBlock(block_id ref_cnt pool is_null _block_hash _block_hash_num_tokens ...) "
            "KVCacheBlock.block_hash make_block_hash_with_group_id(block_hash group_id)"
        ),
        "vllm.v1.core.block_pool": "BlockHashToBlockMap.insert(key block)",
        "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue": (
            "popleft_n(n) append_n(blocks) prepend_n(blocks) remove(block) get_all_free_blocks"
        ),
        "vllm.v1.core.kv_cache_manager:KVCacheManager": "block_pool allocate_slots(request num_new_tokens)",
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": "single_type_managers",
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager": "req_to_blocks block_size",
        "vllm.v1.request:Request": (
            "request_id sampling_params block_hashes num_output_tokens skip_reading_prefix_cache _all_token_ids"
        ),
        "vllm.v1.core.sched.scheduler:Scheduler": (
            "__init__(vllm_config kv_cache_config ...) add_request(request) schedule _free_blocks(request ...) "
            "_free_request_blocks(request ...) _preempt_request(request ...) make_stats waiting kv_cache_manager"
        ),
        "vllm.v1.core.sched.async_scheduler": "AsyncScheduler",
        "vllm.config": (
            "VllmConfig.__post_init__ SchedulerConfig(scheduler_cls async_scheduling ...) VllmConfig.scheduler_config "
            "VllmConfig.parallel_config VllmConfig.model_config VllmConfig.additional_config"
        ),
    },
    "eviction.gap": {
        "vllm.v1.core.sched.scheduler:Scheduler": (
            "_reserve_prefill_lookahead(request num_computed_tokens num_new_tokens) requests use_v2_model_runner "
            "max_model_len hash_block_size is_encoder_decoder ec_connector connector aux_output_connector use_pp "
            "dcp_world_size pcp_world_size num_lookahead_tokens scheduler_config"
        ),
        "vllm.v1.core.kv_cache_manager:KVCacheManager": (
            "allocate_slots(request num_new_tokens new_computed_blocks full_sequence_must_fit has_scheduled_reqs) "
            "prefix_cache_lookup_enabled(request) get_block_ids(request_id) watermark_blocks enable_caching "
            "prefix_cache_stats"
        ),
        "vllm.v1.core.kv_cache_manager": "KVCacheBlocks(blocks)",
        "vllm.v1.core.block_pool": "BlockHashToBlockMap.get_one_block(key)",
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager": "kv_cache_group_id num_cached_block",
        "vllm.v1.core.sched.output": (
            "NewRequestData.from_request(request block_ids prefill_token_ids) CachedRequestData(req_ids new_block_ids "
            "num_computed_tokens num_output_tokens ...) SchedulerOutput(num_scheduled_tokens scheduled_new_reqs "
            "scheduled_cached_reqs ...)"
        ),
        "vllm.v1.request": "RequestStatus.RUNNING",
        "vllm.v1.request:Request": (
            "num_computed_tokens num_prompt_tokens num_tokens num_preemptions prefill_stats mm_features status"
        ),
        "vllm.v1.metrics.stats": (
            "PrefillStats(num_local_cached_tokens num_cached_tokens num_computed_tokens ...) PrefixCacheStats.hits"
        ),
    },
    "eviction.anywhere": {
        "vllm.v1.engine.core": "EngineCore._initialize_kv_caches(vllm_config)",
        "vllm.v1.engine.core:EngineCore": "model_executor",
        "vllm.v1.kv_cache_interface": "FullAttentionSpec",
        "vllm.v1.request:Request": (
            "update_block_hashes block_hashes prompt_embeds lora_request cache_salt sampling_params"
        ),
        "vllm.lora.request": "LoRARequest.lora_name LoRARequest.lora_path",
        "vllm.v1.worker.gpu_model_runner": "GPUModelRunner._update_states(scheduler_output)",
    },
    "eviction.chunks": {
        "vllm.v1.core.sched.scheduler:Scheduler": (
            "_reserve_prefill_lookahead(request num_computed_tokens num_new_tokens) block_size has_mamba_layers "
            "max_num_scheduled_tokens scheduler_config vllm_config is_encoder_decoder connector aux_output_connector "
            "use_pp dcp_world_size pcp_world_size num_lookahead_tokens"
        ),
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": (
            "find_longest_cache_hit(block_hashes max_cache_hit_length) cache_blocks(request num_computed_tokens)"
        ),
        "vllm.v1.request:Request": "num_prompt_tokens",
        "vllm.config": (
            "SchedulerConfig(long_prefill_token_threshold enable_chunked_prefill ...) ModelConfig.is_multimodal_model"
        ),
        "vllm.envs": "VLLM_BATCH_INVARIANT",
    },
    "eviction.explain": {
        "vllm.v1.core.sched.scheduler:Scheduler": (
            "_reserve_prefill_lookahead(request num_computed_tokens num_new_tokens) requests hash_block_size"
        ),
        "vllm.v1.core.block_pool:BlockPool": "get_cached_block(block_hash kv_cache_group_ids)",
        "vllm.v1.core.single_type_kv_cache_manager": "FullAttentionManager",
        "vllm.v1.request:Request": "num_computed_tokens lora_request mm_features cache_salt _all_token_ids",
        "vllm.multimodal.inputs": (
            "MultiModalFeatureSpec.mm_position MultiModalFeatureSpec.identifier PlaceholderRange(offset length)"
        ),
        "vllm.lora.request": "LoRARequest.lora_name LoRARequest.lora_path",
    },
    "eviction.metrics": {
        "vllm.v1.metrics.loggers": "StatLoggerManager.record(scheduler_stats engine_idx ...) PrometheusStatLogger",
        "vllm.v1.metrics.stats": "SchedulerStats(num_kv_fetch_reqs_by_stage)",
    },
    "compression": {
        "vllm.v1.core.kv_cache_manager:KVCacheManager": "get_computed_blocks(request ...) block_pool coordinator",
        "vllm.v1.core.kv_cache_manager": "KVCacheBlocks(blocks)",
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": "cache_blocks(request ...)",
        "vllm.v1.core.block_pool": "BlockHashToBlockMap.get_one_block(key)",
        "vllm.v1.core.kv_cache_utils": "get_block_hash(key) maybe_convert_block_hash(hash_bytes)",
        "vllm.distributed.kv_events": (
            "BlockStored(block_hashes parent_block_hash token_ids block_size lora_id medium lora_name "
            "kv_cache_spec_kind ...)"
        ),
        "vllm.v1.core.block_pool:BlockPool": (
            "touch(blocks) get_new_blocks(num_blocks) free_blocks(ordered_blocks) evict_blocks(block_ids) "
            "get_num_free_blocks _insert_block_hash(block_hash_with_group_id block num_tokens) null_block "
            "kv_event_queue medium"
        ),
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager": "req_to_blocks num_cached_block block_size",
        "vllm.v1.core.sched.scheduler:Scheduler": (
            "_preempt_request(request timestamp ...) _reserve_prefill_lookahead(request num_computed_tokens "
            "num_new_tokens) running policy requests kv_cache_manager hash_block_size is_encoder_decoder ec_connector "
            "connector aux_output_connector use_pp dcp_world_size pcp_world_size num_lookahead_tokens "
            "scheduler_config vllm_config"
        ),
        "vllm.v1.core.sched.request_queue": "SchedulingPolicy.PRIORITY",
        "vllm.v1.core.sched.output": "SchedulerOutput(num_scheduled_tokens finished_req_ids ...)",
        "vllm.v1.request:Request": (
            "request_id num_prompt_tokens num_computed_tokens num_preemptions block_hashes _all_token_ids priority "
            "arrival_time resumable mm_features prompt_embeds"
        ),
        "vllm.sampling_params": "SamplingParams.verify SamplingParams(extra_args ...)",
        "vllm.v1.engine.core": "EngineCore._initialize_kv_caches(vllm_config)",
        "vllm.v1.worker.gpu_model_runner": "GPUModelRunner._update_states(scheduler_output)",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "requests input_batch kv_cache_config",
        "vllm.v1.worker.gpu_input_batch:InputBatch": "req_ids req_id_to_index block_table",
        "vllm.v1.worker.gpu.model_runner": (
            "GPUModelRunner.update_requests(scheduler_output) GPUModelRunner.prepare_inputs(scheduler_output ...)"
        ),
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner": "req_states block_tables kv_cache_config",
        "vllm.v1.worker.gpu.states:RequestState": "req_id_to_index",
        "vllm.v1.worker.gpu.block_table:BlockTables": "block_tables",
        "vllm.v1.worker.gpu.buffer_utils": "StagedWriteTensor.stage_write",
    },
    "hidden_states": {
        "vllm.v1.worker.gpu_model_runner": "ExecuteModelState(hidden_states aux_hidden_states ...)",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner": (
            "execute_model(scheduler_output ...) execute_model_state device model model_config input_batch"
        ),
        "vllm.v1.worker.gpu_worker:Worker": (
            "initialize_from_config(kv_cache_config) compile_or_warm_up_model shutdown model_runner vllm_config rank"
        ),
        "vllm.v1.core.sched.output": (
            "NewRequestData(req_id prompt_token_ids sampling_params block_ids num_computed_tokens ...) "
            "NewRequestData.prompt_len CachedRequestData(req_ids resumed_req_ids new_block_ids num_computed_tokens "
            "...) SchedulerOutput(scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens finished_req_ids "
            "kv_cache_block_copies ...)"
        ),
        "vllm.v1.kv_cache_interface": "FullAttentionSpec KVCacheConfig(num_blocks kv_cache_groups ...)",
        "vllm.config": (
            "VllmConfig.__post_init__ VllmConfig.scheduler_config VllmConfig.parallel_config VllmConfig.model_config "
            "VllmConfig.additional_config VllmConfig.speculative_config VllmConfig.kv_transfer_config"
        ),
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
            "block_ids) _get_connector_metadata"
        ),
        "vllm.v1.core.sched.output": (
            "NewRequestData(req_id block_ids num_computed_tokens ...) CachedRequestData(req_ids resumed_req_ids "
            "new_block_ids num_computed_tokens ...) SchedulerOutput(finished_req_ids num_scheduled_tokens ...)"
        ),
        "vllm.v1.kv_cache_interface": "AttentionSpec.unpadded_page_size_bytes",
        "vllm.v1.attention.backends.registry": "AttentionBackendEnum",
        "vllm.distributed.parallel_state": "get_tensor_model_parallel_rank",
        "vllm.config": "KVTransferConfig(kv_connector_extra_config kv_load_failure_policy) ModelConfig.is_hybrid",
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
            "ReqContext(req_id kv_hints) ReqContext.get_offload_key_position(key) ReqContext.get_state "
            "ReqContext.set_state Locality LookupResult.HIT LookupResult.MISS LookupResult.RETRY Medium.STORAGE "
            "RequestOffloadingContext"
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
        "vllm_omni.core.prefix_cache.manager:OmniPrefixCacheManager": (
            "__init__(config view eager) register_policy(policy) new_step_starts(scheduler_output) "
            "save_outputs(hidden_states mm_outputs num_tokens_unpadded num_tokens_padded) materialize(step_id "
            "req_ids) discard_step shutdown"
        ),
        "vllm_omni.core.prefix_cache.interface": (
            "PrefixCacheConfig(num_blocks block_size staging_depth staging_claim_timeout_s ...) "
            "StageCacheOutputs(hidden_states mm_outputs) ModelCachePolicy(needs_full_hidden_states deferred_keys ...) "
            "OmniPrefixCacheStagingTimeoutError OmniPrefixCacheUnmatchError is_hidden_key"
        ),
        "vllm_omni.core.prefix_cache": (
            "OmniPrefixCacheManager check_prefix_cache_kv_groups get_prefix_cache_group_view"
        ),
        "vllm_omni.core.prefix_cache.group_view": (
            "check_prefix_cache_kv_groups(kv_cache_groups) get_prefix_cache_group_view(input_batch block_size "
            "kv_cache_groups)"
        ),
        "vllm_omni.core.prefix_cache.runner_mixin": "get_prefix_cache_group_view OmniPrefixCacheManager",
        "vllm_omni.utils.mm_outputs": "to_payload_element(element idx start end pass_lists_through seq_len)",
    },
}
"""By feature the names it uses; `seam` has the format."""

ATTRIBUTES: dict[str, dict[str, str]] = {
    "attention.shared_prefix": {
        "runner": "attn_groups input_batch",
        "runner.input_batch": "block_table num_computed_tokens_cpu",
        "runner.input_batch.block_table.0": "block_table",
        "runner.input_batch.block_table.0.block_table": "np",
    },
    "eviction": {
        "scheduler": "kv_cache_manager waiting",
        "scheduler.kv_cache_manager": "block_pool coordinator allocate_slots",
        "scheduler.kv_cache_manager.coordinator.single_type_managers.0": "req_to_blocks block_size",
        "scheduler.kv_cache_manager.block_pool": (
            "blocks num_gpu_blocks free_block_queue enable_caching metrics_collector enable_kv_cache_events "
            "hash_block_size cached_block_hash_to_block cached_block_hashes_by_block _reuse_watchers"
        ),
        "scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block": "_cache",
        "scheduler.kv_cache_manager.block_pool.free_block_queue": "num_free_blocks",
    },
    "eviction.gap": {
        "scheduler": (
            "requests use_v2_model_runner max_model_len hash_block_size is_encoder_decoder ec_connector connector "
            "aux_output_connector use_pp dcp_world_size pcp_world_size num_lookahead_tokens scheduler_config "
            "vllm_config"
        ),
        "scheduler.kv_cache_manager": "prefix_cache_stats watermark_blocks enable_caching",
        "scheduler.kv_cache_manager.coordinator.single_type_managers.0": "num_cached_block kv_cache_group_id",
    },
    "eviction.anywhere": {"scheduler.kv_cache_config.kv_cache_groups.0": "kv_cache_spec"},
    "eviction.chunks": {
        "scheduler": (
            "block_size has_mamba_layers max_num_scheduled_tokens scheduler_config vllm_config is_encoder_decoder "
            "connector aux_output_connector use_pp dcp_world_size pcp_world_size num_lookahead_tokens"
        ),
        "scheduler.kv_cache_manager": "coordinator",
    },
    "eviction.explain": {"scheduler": "requests hash_block_size"},
    "hidden_states": {
        "worker": "model_runner vllm_config rank",
        "runner": "execute_model execute_model_state device model model_config",
    },
    "hidden_states.pooling": {"runner": "_pool input_batch", "runner.input_batch": "pooling_params pooling_states"},
}
"""By feature the attributes of objects that an engine has made; `seam.absent` has the format."""

BODIES: dict[str, dict[str, dict[str, str]]] = {
    "eviction": {
        "vllm.v1.core.block_pool:BlockPool.touch": {"0.32": "513cd226d9aa", "0.33": "6731fae0cda4"},
        "vllm.v1.core.block_pool:BlockPool.get_new_blocks": {"0.32": "057e6bbc93c3", "0.33": "057e6bbc93c3"},
        "vllm.v1.core.block_pool:BlockPool.free_blocks": {"0.32": "a8d52468c740", "0.33": "69405eadc30b"},
        "vllm.v1.core.block_pool:BlockPool.unpin_blocks": {"0.32": "0e1bfbec7e76", "0.33": "0e1bfbec7e76"},
        "vllm.v1.core.block_pool:BlockPool._maybe_evict_cached_block": {"0.32": "f382afac91ef", "0.33": "f382afac91ef"},
        "vllm.v1.core.block_pool:BlockPool._remove_cached_block_hashes": {
            "0.32": "5ed00524f34c",
            "0.33": "5ed00524f34c",
        },
        "vllm.v1.core.block_pool:BlockPool._insert_block_hash": {"0.32": "8ea169790383", "0.33": "8ea169790383"},
        "vllm.v1.core.block_pool:BlockPool._notify_reuse": {"0.32": "8e72a256e10a", "0.33": "8e72a256e10a"},
        "vllm.v1.core.block_pool:BlockPool.cache_full_blocks": {"0.32": "db12cb6a9563", "0.33": "0159a39f9acc"},
        "vllm.v1.core.block_pool:BlockPool.cache_partial_block": {"0.32": "87b021d1228e", "0.33": "da19b5678710"},
        "vllm.v1.core.block_pool:BlockPool.move_block_hashes": {"0.32": "5606bd3676c5", "0.33": "5606bd3676c5"},
        "vllm.v1.core.block_pool:BlockPool.evict_blocks": {"0.32": "1409cdbb0b41", "0.33": "1409cdbb0b41"},
        "vllm.v1.core.block_pool:BlockPool.reset_prefix_cache": {"0.32": "562b5985f8fa", "0.33": "562b5985f8fa"},
        "vllm.v1.core.block_pool:BlockHashToBlockMap": {"0.32": "859807dedbb2", "0.33": "859807dedbb2"},
        "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue": {"0.32": "2c2fd4f4ada1", "0.33": "2c2fd4f4ada1"},
        "vllm.v1.core.kv_cache_utils:KVCacheBlock": {"0.32": "c326a99a8376", "0.33": "c326a99a8376"},
    },
    "eviction.gap": {
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": {"0.32": "107050adc22e", "0.33": "107050adc22e"},
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.add_local_computed_blocks": {
            "0.32": "847f8aa6930d",
            "0.33": "847f8aa6930d",
        },
        "vllm.v1.core.sched.scheduler:Scheduler._make_cached_request_data": {
            "0.32": "fed4c94c98ef",
            "0.33": "fed4c94c98ef",
        },
        "vllm.v1.core.sched.output:NewRequestData.from_request": {"0.32": "724929ecc9b9", "0.33": "724929ecc9b9"},
    },
}
"""By feature the bodies it reimplements or imitates, and their digests by series."""

CLASSES: dict[str, str] = {
    "AllPool": "vllm.model_executor.layers.pooler.tokwise.methods:AllPool",
    "AsyncLookupManager": "vllm.v1.kv_offload.tiering.async_lookup:AsyncLookupManager",
    "AsyncScheduler": "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
    "AttentionBackend": "vllm.v1.attention.backend:AttentionBackend",
    "AttentionCGSupport": "vllm.v1.attention.backend:AttentionCGSupport",
    "AttentionImpl": "vllm.v1.attention.backend:AttentionImpl",
    "AttentionLayerBase": "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
    "AttentionMetadata": "vllm.v1.attention.backend:AttentionMetadata",
    "AttentionMetadataBuilder": "vllm.v1.attention.backend:AttentionMetadataBuilder",
    "AttentionSpec": "vllm.v1.kv_cache_interface:AttentionSpec",
    "AttentionType": "vllm.v1.attention.backend:AttentionType",
    "BlockPool": "vllm.v1.core.block_pool:BlockPool",
    "CachePolicy": "vllm.v1.kv_offload.cpu.policies.base:CachePolicy",
    "FullAttentionManager": "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager",
    "FullAttentionSpec": "vllm.v1.kv_cache_interface:FullAttentionSpec",
    "JobResult": "vllm.v1.kv_offload.tiering.base:JobResult",
    "KVCacheBlocks": "vllm.v1.core.kv_cache_manager:KVCacheBlocks",
    "KVCacheLayout": "vllm.v1.kv_cache_layout:KVCacheLayout",
    "KVConnectorBase_V1": "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1",
    "KVConnectorMetadata": "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorMetadata",
    "KVConnectorRole": "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorRole",
    "LRUCachePolicy": "vllm.v1.kv_offload.cpu.policies.lru:LRUCachePolicy",
    "Locality": "vllm.v1.kv_offload.base:Locality",
    "LookupResult": "vllm.v1.kv_offload.base:LookupResult",
    "Medium": "vllm.v1.kv_offload.base:Medium",
    "ModelCachePolicy": "vllm_omni.core.prefix_cache.interface:ModelCachePolicy",
    "MultipleOf": "vllm.v1.attention.backend:MultipleOf",
    "NewRequestData": "vllm.v1.core.sched.output:NewRequestData",
    "OmniPrefixCacheStagingTimeoutError": "vllm_omni.core.prefix_cache.interface:OmniPrefixCacheStagingTimeoutError",
    "OmniPrefixCacheUnmatchError": "vllm_omni.core.prefix_cache.interface:OmniPrefixCacheUnmatchError",
    "PrefixCacheConfig": "vllm_omni.core.prefix_cache.interface:PrefixCacheConfig",
    "RequestOffloadingContext": "vllm.v1.kv_offload.base:RequestOffloadingContext",
    "RequestStatus": "vllm.v1.request:RequestStatus",
    "SchedulingPolicy": "vllm.v1.core.sched.request_queue:SchedulingPolicy",
    "Scheduler": "vllm.v1.core.sched.scheduler:Scheduler",
    "SecondaryTierManager": "vllm.v1.kv_offload.tiering.base:SecondaryTierManager",
    "StageCacheOutputs": "vllm_omni.core.prefix_cache.interface:StageCacheOutputs",
    "current_configuration": "vllm.config:get_current_vllm_config_or_none",
    "get_layers_from_vllm_config": "vllm.config:get_layers_from_vllm_config",
    "get_tensor_model_parallel_rank": "vllm.distributed.parallel_state:get_tensor_model_parallel_rank",
    "is_hidden_key": "vllm_omni.core.prefix_cache.interface:is_hidden_key",
    "make_block_hash_with_group_id": "vllm.v1.core.kv_cache_utils:make_block_hash_with_group_id",
    "to_payload_element": "vllm_omni.utils.mm_outputs:to_payload_element",
}
"""What other files may import from here, and where vLLM has it."""


def __getattr__(name: str) -> Any:
    """Return one of `CLASSES`, or an empty class in place of one that the installed vLLM lacks."""
    if name == "logger":
        return make_logger()
    if name not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return seam.find(CLASSES[name])
    except Exception:
        return type(name, (), {"__doc__": f"{CLASSES[name]}, which the installed vLLM lacks."})


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
    whole = feature.partition(".")[0]
    if whole != feature and (reason := why_not(whole, **objects)):
        return reason
    package = PACKAGES.get(feature, "vllm")
    oldest, newest = SINCE.get(feature, VERSIONS[package][0]), VERSIONS[package][1]
    supported = series_text(oldest, newest)
    try:
        version = str(importlib.import_module(package).__version__)
    except Exception as error:
        behind = series_text((*newest[:-1], newest[-1] + 1))
        wanted = f"{package.replace('_', '-')}>={series_text(oldest)},<{behind}"
        told = "not installed" if isinstance(error, ImportError) else f"got {type(error).__name__}: {error}"
        return f"{package}: {told}, needs {supported}; pip install '{wanted}'"
    if not oldest <= release_of(version, len(oldest)):
        return f"{package}: got {version}, needs {supported}"
    reasons = seam.missing(NAMES[feature]) or seam.changed(BODIES.get(feature, {}))
    reasons = reasons or seam.absent(objects, ATTRIBUTES.get(feature, {}))
    return (
        f"{'; '.join(reasons)}, needed by {package} {version} ({feature}; written for {supported})" if reasons else ""
    )


def check_version(feature: str) -> None:
    """Check that the installed vLLM, or vLLM-Omni, can serve a feature.

    Raises:
        UnsupportedVersionError: It cannot; says what was found and what is needed.

    Examples:
        >>> from pc.integrations.vllm import UnsupportedVersionError, check_version
        >>> try:
        ...     check_version("attention")
        ... except UnsupportedVersionError as error:
        ...     reason = str(error)  # names the versions that are served
    """
    if reason := why_not(feature):
        raise UnsupportedVersionError(reason)


_logged: set[tuple[str, str]] = set()


def available(feature: str, **objects: Any) -> bool:
    """Return whether the installed vLLM can serve a feature; log once why it cannot. Arguments are as for `why_not`."""
    reason = why_not(feature, **objects)
    if not reason:
        say_untested(PACKAGES.get(feature, "vllm").replace("_", "-"))
    if reason and (feature, reason) not in _logged:
        _logged.add((feature, reason))
        make_logger().warning("%s is off, and vLLM's own code runs in its place: %s", feature, reason)
    return not reason


def _main() -> int:
    """Print what of the tables the installed vLLM lacks, and the digests that are not in `BODIES`; 1 if anything is."""
    found = 0
    for feature, table in NAMES.items():
        for reason in (*seam.missing(table), *seam.changed(BODIES.get(feature, {}))):
            print(f"{feature}: {reason}")
            found = 1
    return found


if __name__ == "__main__":
    raise SystemExit(_main())
