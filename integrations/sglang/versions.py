"""Which SGLang is served, the interfaces of it that each feature builds on, and what our parts are called there."""

from __future__ import annotations

import logging

from ..plugin import UnsupportedVersionError as UnsupportedVersionError
from ..plugin import check_installed

OLDEST = NEWEST = (0, 5, 23)
"""SGLang changes these interfaces between releases, so each one is served once it has been run."""

BACKEND = "pc"
"""What `--attention-backend` takes."""

PREFIX, CORE = "pc_", "pc"
"""What our policies begin with in `--radix-eviction-policy`, and what SGLang calls the core of the tree under them."""

logger = logging.getLogger("sglang.pc")

INTERFACES: dict[str, dict[str, str]] = {
    "attention": {
        "sglang.srt.arg_groups.choices": (
            "add_attention_backend_choices add_deterministic_attention_backend_choices "
            "add_radix_supported_deterministic_attention_backend_choices"
        ),
        "sglang.srt.layers.attention.attention_registry": "register_attention_backend(name)",
        "sglang.srt.layers.attention.base_attn_backend:AttentionBackend": (
            "init_forward_metadata(forward_batch) init_forward_metadata_out_graph(forward_batch in_capture) "
            "init_forward_metadata_in_graph(forward_batch) init_cuda_graph_state(max_bs max_num_tokens) "
            "get_cuda_graph_seq_len_fill_value update_verify_buffers_to_fill_after_draft(spec_info cuda_graph_bs) "
            "forward_extend(q k v layer forward_batch save_kv_cache) "
            "forward_decode(q k v layer forward_batch save_kv_cache) needs_cpu_seq_lens verify_mask"
        ),
        "sglang.srt.layers.attention.verify_mask": "VerifyMask(buffer mode max_bs)",
        "sglang.srt.layers.radix_attention": (
            "AttentionType.DECODER RadixAttention(num_heads head_dim scaling num_kv_heads layer_id logit_cap "
            "v_head_dim sliding_window_size is_cross_attention pos_encoding_mode logit_capping_method attn_type "
            "use_irope)"
        ),
        "sglang.srt.mem_cache.memory_pool": (
            "KVWriteLoc.for_batch(forward_batch swa_loc) MHATokenToKVPool.get_key_buffer(layer_id) "
            "MHATokenToKVPool.get_value_buffer(layer_id) "
            "MHATokenToKVPool.set_kv_buffer(layer loc_info cache_k cache_v k_scale v_scale)"
        ),
        "sglang.srt.mem_cache.swa_memory_pool": "SWAKVPool.translate_loc_from_full_to_swa(kv_indices)",
        "sglang.srt.model_executor.forward_batch_info": (
            "ForwardBatch(forward_mode batch_size req_pool_indices seq_lens out_cache_loc seq_lens_cpu extend_seq_lens "
            "extend_seq_lens_cpu positions spec_info encoder_lens) ForwardMode.TARGET_VERIFY"
        ),
        "sglang.srt.runtime_context": "get_exec get_parallel",
        "sglang.srt.speculative.eagle_utils": "TreeMaskMode.QLEN_ONLY default_tree_mask_mode",
    },
    "eviction": {
        "sglang.srt.arg_groups.choices": "add_radix_eviction_policy_choices",
        "sglang.srt.mem_cache.utils": "_EVICTION_POLICY_FACTORIES",
        "sglang.srt.mem_cache.evict_policy": "LRUStrategy",
        "sglang.srt.mem_cache.registry": (
            "default_radix_cache_factory(ctx) create_unified_radix_cache(ctx cache_class) "
            "TreeCacheBuildContext(params disable_radix_cache enable_hierarchical_cache)"
        ),
        "sglang.srt.mem_cache.cache_init_params": (
            "CacheInitParams(page_size token_to_kv_pool_allocator eviction_policy eviction_policy_config "
            "tree_core_backend enable_session_radix_cache)"
        ),
        "sglang.srt.mem_cache.unified_cache.tree_core_registry": "register_tree_core_backend(name factory)",
        "sglang.srt.mem_cache.unified_cache.unified_tree_core:UnifiedTreeCore": (
            "__init__(params components) reset set_hicache_enabled _add_new_node(parent key value) "
            "_split_node(key child split_len) _remove_leaf_from_parent(node) inc_lock_ref(node_id) "
            "dec_lock_ref(node_id params) evict_device_start(component_type request_cnt) "
            "evict_device_next_node(component_type tracker) evict_device_end(component_type) _is_device_leaf(node) "
            "node_by_id(node_id)"
        ),
        "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache": (
            "__init__(params) checkpoint_into_tree(req up_to) _evict(params)"
        ),
    },
}
"""By feature: what it builds on, by module or module:class, and of each name the parameters it relies on."""


def check_version(feature: str) -> None:
    """Checks that the installed SGLang is in range and has the interfaces that a feature builds on.

    Raises:
        UnsupportedVersionError: It is not; says what was found and what is needed.

    Examples:
        >>> from pc.integrations.sglang import UnsupportedVersionError, check_version
        >>> try:
        ...     check_version("attention")
        ... except UnsupportedVersionError as error:
        ...     reason = str(error)  # names the versions that are served
    """
    check_installed("sglang", OLDEST, NEWEST, feature, INTERFACES[feature])


def announce(what: str) -> None:
    """Says in the log what is active, and beside which SGLang; some of its processes have none yet when they start."""
    import sglang

    from ... import __version__

    logger.info("pc %s, sglang %s: %s", __version__, sglang.__version__, what)
