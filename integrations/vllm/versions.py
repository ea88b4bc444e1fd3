"""Which vLLM is served, and the interfaces of it that each feature builds on."""

from __future__ import annotations

from ..plugin import UnsupportedVersionError as UnsupportedVersionError
from ..plugin import check_installed

VERSIONS = {"vllm": ((0, 32), (0, 33)), "vllm_omni": ((0, 30), (0, 30))}
"""By package: the oldest and the newest series that is served."""

SINCE = {"offload": (0, 33)}
"""By feature: the oldest series, where it is not that of its package."""

INTERFACES: dict[str, dict[str, str]] = {
    "attention": {
        "vllm.v1.attention.backends.registry": "register_backend(backend class_path)",
        "vllm.v1.attention.backend": (
            "AttentionBackend.validate_configuration(head_size dtype kv_cache_dtype block_size use_mla has_sink "
            "use_sparse use_mm_prefix use_per_head_quant_scales device_capability attn_type has_sliding_window) "
            "AttentionImpl.forward(layer query key value kv_cache attn_metadata output output_scale "
            "output_block_scale) CommonAttentionMetadata(query_start_loc seq_lens num_reqs num_actual_tokens "
            "max_query_len max_seq_len block_table_tensor slot_mapping causal rswa_prefix_lens)"
        ),
        "vllm.v1.attention.backend:AttentionMetadataBuilder": (
            "__init__(kv_cache_spec layer_names vllm_config device) build(common_prefix_len common_attn_metadata "
            "fast_build)"
        ),
        "vllm.v1.kv_cache_layout": "KVCacheLayout",
        "vllm.v1.attention.backends.mla.cpu_mla": (
            "CPUMLABackend CPUMLAImpl.forward_mqa(q kv_c_and_k_pe_cache attn_metadata layer)"
        ),
        "vllm.v1.attention.selector": "_cached_get_attn_backend.cache_clear",
        "vllm.v1.worker.gpu_model_runner": "GPUModelRunner._build_attention_metadata(num_reqs for_cudagraph_capture)",
    },
    "eviction": {
        "vllm.v1.core.block_pool:BlockPool": (
            "touch(blocks) get_new_blocks(num_blocks) free_blocks(ordered_blocks) unpin_blocks(blocks on_reuse) "
            "_maybe_evict_cached_block(block) _notify_reuse(blocks) cache_full_blocks(request blocks "
            "num_cached_blocks num_full_blocks block_size kv_cache_group_id) cache_partial_block(request block "
            "num_tokens kv_cache_group_id block_size) move_block_hashes(src_block dst_block) evict_blocks(block_ids) "
            "reset_prefix_cache"
        ),
        "vllm.v1.core.kv_cache_utils": (
            "KVCacheBlock(block_id ref_cnt pool is_null _block_hash _block_hash_num_tokens) "
            "make_block_hash_with_group_id(block_hash group_id)"
        ),
        "vllm.v1.core.block_pool": "BlockHashToBlockMap.insert(key block) BlockHashToBlockMap.get_one_block(key)",
        "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue": (
            "popleft_n(n) append_n(blocks) prepend_n(blocks) remove(block)"
        ),
        "vllm.v1.core.kv_cache_manager:KVCacheManager": (
            "allocate_slots(request num_new_tokens new_computed_blocks full_sequence_must_fit has_scheduled_reqs) "
            "prefix_cache_lookup_enabled(request) get_block_ids(request_id)"
        ),
        "vllm.v1.core.kv_cache_manager": "KVCacheBlocks(blocks)",
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": (
            "find_longest_cache_hit(block_hashes max_cache_hit_length) cache_blocks(request num_computed_tokens)"
        ),
        "vllm.v1.core.single_type_kv_cache_manager": "FullAttentionManager",
        "vllm.v1.core.sched.output": (
            "NewRequestData.from_request(request block_ids prefill_token_ids) CachedRequestData(req_ids new_block_ids "
            "num_computed_tokens num_output_tokens)"
        ),
        "vllm.v1.request": "RequestStatus.RUNNING",
        "vllm.v1.core.sched.scheduler:Scheduler": (
            "__init__(vllm_config kv_cache_config) _free_blocks(request) _free_request_blocks(request) "
            "_preempt_request(request) make_stats _reserve_prefill_lookahead(request num_computed_tokens "
            "num_new_tokens)"
        ),
        "vllm.v1.core.sched.async_scheduler": "AsyncScheduler",
        "vllm.v1.engine.core": "EngineCore._initialize_kv_caches(vllm_config)",
        "vllm.v1.kv_cache_interface": "FullAttentionSpec",
        "vllm.v1.request:Request": "update_block_hashes",
        "vllm.v1.worker.gpu_model_runner": "GPUModelRunner._update_states(scheduler_output)",
        "vllm.v1.metrics.loggers": "StatLoggerManager.record(scheduler_stats engine_idx) PrometheusStatLogger",
        "vllm.v1.metrics.stats": "SchedulerStats(num_kv_fetch_reqs_by_stage)",
        "vllm.config": "VllmConfig.__post_init__ SchedulerConfig(scheduler_cls async_scheduling)",
    },
    "hidden_states": {
        "vllm.v1.worker.gpu_model_runner": "ExecuteModelState(hidden_states aux_hidden_states)",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner": (
            "execute_model(scheduler_output) _pool(hidden_states num_scheduled_tokens)"
        ),
        "vllm.v1.pool.metadata": "PoolingStates.clean",
        "vllm.pooling_params": "PoolingParams(task skip_reading_prefix_cache) PoolingParams.verify(model_config)",
        "vllm.model_executor.layers.pooler.tokwise.methods": "AllPool",
        "vllm.v1.worker.gpu_worker:Worker": "initialize_from_config(kv_cache_config) compile_or_warm_up_model",
        "vllm.v1.core.sched.output": (
            "NewRequestData(req_id prompt_token_ids sampling_params block_ids num_computed_tokens) "
            "NewRequestData.prompt_len CachedRequestData(req_ids resumed_req_ids new_block_ids num_computed_tokens) "
            "SchedulerOutput(scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens finished_req_ids "
            "kv_cache_block_copies)"
        ),
        "vllm.config": "VllmConfig.__post_init__",
    },
    "connector": {
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": (
            "__init__(vllm_config role kv_cache_config) get_required_kvcache_layout(vllm_config) "
            "register_kv_caches(kv_caches) get_num_new_matched_tokens(request num_computed_tokens) "
            "update_state_after_alloc(request blocks num_external_tokens) build_connector_meta(scheduler_output) "
            "get_block_ids_with_load_errors start_load_kv(forward_context) wait_for_save"
        ),
        "vllm.v1.core.sched.output": (
            "NewRequestData(req_id block_ids num_computed_tokens) CachedRequestData(req_ids resumed_req_ids "
            "new_block_ids num_computed_tokens)"
        ),
        "vllm.v1.kv_cache_interface": "AttentionSpec.unpadded_page_size_bytes",
        "vllm.config": "KVTransferConfig(kv_connector_extra_config kv_load_failure_policy) ModelConfig.is_hybrid",
    },
    "offload": {
        "vllm.v1.kv_offload.cpu.policies.base:CachePolicy": (
            "__init__(cache_capacity) get(key) insert(key chunk req_context) remove(key) touch(keys req_context) "
            "on_request_access(keys req_context) on_request_finished(key_groups insertion_only_keys reused_keys "
            "req_context) evict(n protected) clear mark_evictable(key) mark_non_evictable(key)"
        ),
        "vllm.v1.kv_offload.base": "ReqContext(req_id kv_hints) ReqContext.get_offload_key_position(key)",
        "vllm.v1.kv_offload.tiering.base:SecondaryTierManager": (
            "__init__(offloading_spec primary_kv_view tier_type backpressure_detector) lookup(key req_context) "
            "submit_store(job_metadata) submit_load(job_metadata) get_finished_jobs on_new_request(req_context) "
            "on_request_finished(req_context) on_schedule_end(context) drain_jobs shutdown"
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
            "PrefixCacheConfig(num_blocks block_size staging_depth staging_claim_timeout_s) "
            "StageCacheOutputs(hidden_states mm_outputs) ModelCachePolicy(needs_full_hidden_states deferred_keys)"
        ),
        "vllm_omni.core.prefix_cache.group_view": "check_prefix_cache_kv_groups(kv_cache_groups)",
        "vllm_omni.core.prefix_cache.runner_mixin": (
            "get_prefix_cache_group_view(input_batch block_size kv_cache_groups) OmniPrefixCacheManager"
        ),
    },
}
"""By feature: what it builds on, by module or module:class, and of each name the parameters it relies on."""

PACKAGES = {"omni": "vllm_omni"}
"""By feature: whose interfaces these are, where it is not vLLM."""


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
    check_installed(package, SINCE.get(feature, oldest), newest, feature, INTERFACES[feature])
