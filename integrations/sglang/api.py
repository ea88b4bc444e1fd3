"""Every private name of SGLang that this adapter uses. No other file imports SGLang or names its modules.

A feature is served if the installed SGLang has what the tables here declare for it. See `seam` for their format.

- `NAMES`: functions, methods with the parameters we use, fields and attributes of SGLang's classes.
- `REGISTRATION`: functions that add our names to SGLang's options. A feature needs only the functions under its key.
- `ATTRIBUTES`: attributes of objects that the engine makes. Code that receives such an object calls `why_not(feature,
  runner=runner)`.
- `BODIES`: methods that this adapter replaces as a whole, with a digest for each release that was read. A feature is
  refused if an installed body has another digest.

To use another name of SGLang, add it to `NAMES` or `ATTRIBUTES` under the feature that needs it. Other files can then
import it from here. `python -m pc.integrations.sglang.api` checks the tables against the installed SGLang.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from .. import seam
from ..seam import UnsupportedVersionError as UnsupportedVersionError
from ..tested import TESTED

logger = logging.getLogger("sglang.pc")
"""SGLang shows the messages of loggers below its own."""

PREFIX, CORE = "pc_", "pc"
"""The prefix of our policies' names in `--radix-eviction-policy`, and the name of the tree core that they use."""

REGISTRATION: dict[str, dict[str, str]] = {
    "attention": {
        "sglang.srt.arg_groups.choices": (
            "add_attention_backend_choices add_deterministic_attention_backend_choices "
            "add_radix_supported_deterministic_attention_backend_choices"
        ),
        "sglang.srt.layers.attention.attention_registry": "register_attention_backend(name) ATTENTION_BACKENDS",
    },
    "eviction": {
        "sglang.srt.arg_groups.choices": "add_radix_eviction_policy_choices",
        "sglang.srt.mem_cache.utils": "_EVICTION_POLICY_FACTORIES",
        "sglang.srt.mem_cache.evict_policy": "LRUStrategy",
        "sglang.srt.mem_cache.registry": "default_radix_cache_factory(ctx)",
        "sglang.srt.mem_cache.registry:TreeCacheBuildContext": "__init__(params disable_radix_cache ...)",
    },
}
"""For each feature, the functions that add our names to SGLang's options. SGLang rejects names that were not added."""

NAMES: dict[str, dict[str, str]] = {
    "attention": {
        "sglang.srt.layers.attention.base_attn_backend:AttentionBackend": (
            "init_forward_metadata(forward_batch) init_forward_metadata_out_graph(forward_batch in_capture) "
            "init_forward_metadata_in_graph(forward_batch) init_cuda_graph_state(max_bs max_num_tokens) "
            "get_cuda_graph_seq_len_fill_value() update_verify_buffers_to_fill_after_draft(spec_info cuda_graph_bs) "
            "forward_extend(q k v layer forward_batch save_kv_cache) "
            "forward_decode(q k v layer forward_batch save_kv_cache) needs_cpu_seq_lens verify_mask"
        ),
        "sglang.srt.layers.attention.verify_mask": "VerifyMask(buffer mode max_bs) VerifyMask.buffer",
        "sglang.srt.layers.radix_attention": "AttentionType.DECODER",
        "sglang.srt.layers.radix_attention:RadixAttention": (
            "tp_q_head_num qk_head_dim scaling logit_cap sliding_window_size is_cross_attention attn_type use_irope "
            "pos_encoding_mode logit_capping_method xai_temperature_len layer_id k_scale v_scale"
        ),
        "sglang.srt.mem_cache.memory_pool": (
            "KVWriteLoc.for_batch(forward_batch swa_loc) MHATokenToKVPool.get_key_buffer(layer_id) "
            "MHATokenToKVPool.get_value_buffer(layer_id) "
            "MHATokenToKVPool.set_kv_buffer(layer loc_info cache_k cache_v k_scale v_scale)"
        ),
        "sglang.srt.mem_cache.swa_memory_pool:SWAKVPool": (
            "translate_loc_from_full_to_swa(kv_indices) layers_mapping swa_kv_pool"
        ),
        "sglang.srt.model_executor.forward_batch_info": (
            "ForwardBatch(forward_mode batch_size req_pool_indices seq_lens out_cache_loc seq_lens_cpu extend_seq_lens "
            "extend_seq_lens_cpu positions spec_info encoder_lens ...) ForwardMode.is_idle() ForwardMode.is_decode() "
            "ForwardMode.is_target_verify() ForwardMode.is_decode_or_idle() ForwardMode.is_dllm_extend() "
            "ForwardMode.is_draft_extend_v2()"
        ),
        "sglang.srt.runtime_context": "get_exec() get_parallel()",
        "sglang.srt.speculative.eagle_utils": "TreeMaskMode.QLEN_ONLY default_tree_mask_mode()",
    },
    "eviction": {
        "sglang.srt.mem_cache.registry": "create_unified_radix_cache(ctx cache_class)",
        "sglang.srt.mem_cache.cache_init_params": (
            "CacheInitParams(eviction_policy eviction_policy_config tree_core_backend pp_size attn_cp_size ...)"
        ),
        "sglang.srt.runtime_context": "get_memory()",
        "sglang.srt.mem_cache.unified_cache.tree_core_registry": "register_tree_core_backend(name factory)",
        "sglang.srt.mem_cache.unified_cache.components": "ComponentType.FULL",
        "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface": (
            "EvictDeviceNextNodeResult EvictDeviceNextNodeResult.node_id EvictDeviceNextNodeResult.made_progress"
        ),
        "sglang.srt.mem_cache.unified_cache.unified_tree_core:UnifiedTreeCore": (
            "__init__(params components) reset() set_hicache_enabled() _add_new_node(parent key value ...) "
            "_split_node(key child split_len) _remove_leaf_from_parent(node) inc_lock_ref(node_id) "
            "dec_lock_ref(node_id params) evict_device_start(component_type request_cnt) "
            "evict_device_next_node(component_type tracker) evict_device_end(component_type) _is_device_leaf(node) "
            "node_by_id(node_id) page_size root_node"
        ),
        "sglang.srt.mem_cache.unified_cache.unified_tree_core:UnifiedTreeNode": (
            "children parent key id component_data"
        ),
        "sglang.srt.mem_cache.radix_cache:RadixKey": "raw_token_ids() is_bigram extra_key cache_salt",
        "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache": (
            "__init__(params) checkpoint_into_tree(req up_to ...) _evict(params) tree_core tp_world_size"
        ),
    },
}
"""For each feature, the names that it uses, by module or module:class, with the parameters that it uses."""

ATTRIBUTES: dict[str, dict[str, str]] = {
    "attention": {
        "runner": (
            "token_to_kv_pool device model_config is_draft_worker page_size req_to_token_pool use_mla_backend "
            "kv_cache_dtype"
        ),
        "runner.model_config": "context_len is_encoder_decoder is_multimodal head_dim get_num_kv_heads",
        "runner.req_to_token_pool": "req_to_token",
    },
    "eviction": {
        "context": "params disable_radix_cache is_hybrid_swa is_hybrid_ssm enable_hierarchical_cache",
        "context.params": (
            "eviction_policy eviction_policy_config page_size token_to_kv_pool_allocator enable_session_radix_cache"
        ),
    },
}
"""For each feature and object, attributes of objects that the engine makes."""

_CORE = "sglang.srt.mem_cache.unified_cache.unified_tree_core:UnifiedTreeCore"
_CACHE = "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache"
BODIES: dict[str, dict[str, dict[str, str]]] = {
    "eviction": {
        f"{_CORE}.evict_device_start": {"0.5.23": "ddc56a68e641"},
        f"{_CORE}.evict_device_next_node": {"0.5.23": "74dd21d3d1e5"},
        f"{_CORE}.evict_device_end": {"0.5.23": "15f24b5a97a2"},
        f"{_CACHE}._evict": {"0.5.23": "958a84f8997c"},
        f"{_CACHE}._evict_components": {"0.5.23": "b10af967a54b"},
    },
}
"""For each feature, the replaced methods and their callers, with the digests of their bodies by release."""

PATHS = seam.paths([*REGISTRATION.values(), *NAMES.values()])
"""The classes and functions that other files may import from here, and their paths in SGLang."""


def __getattr__(name):  # type: ignore[no-untyped-def]  # untyped, so that mypy accepts imported names as classes
    """Return the class or function of `PATHS` with this name, or an empty class if the installed SGLang lacks it."""
    if name not in PATHS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return seam.find_or_stand_in(PATHS[name])


# Which features the installed SGLang can serve


def why_not(feature: str, **objects: Any) -> str:
    """Return the reason why the installed SGLang cannot serve a feature, or "".

    Args:
        feature: A key of `NAMES`.
        **objects: Objects of SGLang whose attributes are checked too, under the names that `ATTRIBUTES` uses.
    """
    tables = [REGISTRATION[feature], NAMES[feature]]
    bodies, attributes = BODIES.get(feature, {}), ATTRIBUTES[feature]
    return seam.why_not(feature, "sglang", TESTED["sglang"], tables, bodies, objects, attributes)


def check_version(feature: str) -> None:
    """Check that the installed SGLang can serve a feature.

    Raises:
        UnsupportedVersionError: It cannot. The message names the installed and the supported versions.

    Examples:
        >>> from pc.integrations.sglang import UnsupportedVersionError, check_version
        >>> try:
        ...     check_version("attention")
        ... except UnsupportedVersionError as error:
        ...     reason = str(error)  # names the versions that are served
    """
    seam.check_served("sglang", why_not(feature))


def announce(what: str) -> None:
    """Log an active feature and the version of SGLang."""
    from ... import __version__

    logger.info("pc %s, sglang %s: %s", __version__, importlib.import_module("sglang").__version__, what)


# Registration of our names with SGLang


def can_register(feature: str) -> bool:
    """Return whether the names of a feature can be added to SGLang's options.

    That may be possible even if `why_not` gives a reason. SGLang's own code then serves these names.
    """
    return not seam.missing(REGISTRATION[feature])


def register_backend(name: str, make: Callable[[Any], Any]) -> None:
    """Make `--attention-backend` accept a name, for which `make(runner)` returns the backend."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    choices.add_attention_backend_choices([name])
    choices.add_deterministic_attention_backend_choices([name])
    choices.add_radix_supported_deterministic_attention_backend_choices([name])
    register_attention_backend(name)(make)


def stock_backend(runner: Any) -> Any:
    """Return SGLang's own attention backend for a model runner: Torch on a CPU, else Triton."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    on_cpu = str(getattr(runner, "device", "cuda")).startswith("cpu")
    return ATTENTION_BACKENDS["torch_native" if on_cpu else "triton"](runner)


def register_policies(
    names: Sequence[str], make_cache: Callable[[Any, Any], Any], refuse: Callable[..., Any] | None
) -> None:
    """Make `--radix-eviction-policy` accept names.

    Args:
        names: Names of policies. The first selects SGLang's own lru.
        make_cache: Takes the context of an engine and SGLang's own factory; returns the engine's radix cache.
        refuse: Takes the name of a policy other than the first. Returns a function that raises an error; SGLang calls
            that function to rank single leaves by the policy. None: SGLang's lru ranks them.
    """
    from sglang.srt.arg_groups import choices
    from sglang.srt.mem_cache import registry, utils
    from sglang.srt.mem_cache.evict_policy import LRUStrategy

    choices.add_radix_eviction_policy_choices([*names])
    for name in names:
        utils._EVICTION_POLICY_FACTORIES[name] = LRUStrategy if refuse is None or name == names[0] else refuse(name)
    sglangs = registry.default_radix_cache_factory
    registry.default_radix_cache_factory = lambda ctx: make_cache(ctx, sglangs)


def register_core(name: str, make: Callable[[Any, Any], Any]) -> None:
    """Register a tree core under a name, which a unified cache's parameter `tree_core_backend` may have.

    `make(params, components)` returns the core.
    """
    from sglang.srt.mem_cache.unified_cache.tree_core_registry import register_tree_core_backend

    register_tree_core_backend(name, make)


def with_lru(context: Any) -> Any:
    """Return a copy of an engine's context with SGLang's own lru policy."""
    return dataclasses.replace(context, params=dataclasses.replace(context.params, eviction_policy="lru"))


if __name__ == "__main__":
    raise SystemExit(seam.print_differences([REGISTRATION, NAMES], BODIES))
