"""Fingerprints of the blocks that two engines may share, and the tier that stores them."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ....cache.tiers.tier import Layout, Tier
from ..api import AttentionSpec, registered_attention
from ..reasons import refuse_diffusion

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
SAMPLES, SAMPLE_BYTES = 64, 4096
OPTIONS: dict[str, tuple[str, ...]] = {
    "disk": ("path", "capacity_bytes"),
    "mooncake": (
        *("metadata_server", "master", "hostname", "segment_bytes", "transfer_bytes", "protocol", "device"),
        *("batch_blocks", "retry_seconds"),
    ),
}
"""The options of `kv_connector_extra_config` for each tier."""
LEAST = {"writer_bytes": 1, "capacity_bytes": 1, "segment_bytes": 0, "transfer_bytes": 0, "batch_blocks": 1}
"""The smallest value of each option that must be an integer."""


def block_bytes(kv_cache_config: Any) -> int:
    """Return the bytes of one block in all layers."""
    (group,) = kv_cache_config.kv_cache_groups
    return len(group.layer_names) * int(group.kv_cache_spec.unpadded_page_size_bytes)


def describe(vllm_config: Any, kv_cache_config: Any, options: Mapping[str, Any]) -> str:
    """Return a fingerprint of all that decides the bytes of a block besides its tokens. Raises as `digest_of_weights`.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: Its KV cache configuration, with one group.
        options: `kv_connector_extra_config`. If it has `model`, that name replaces the digest of the weights, those of
            a draft model too.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    (group,) = kv_cache_config.kv_cache_groups
    config = model.hf_config.to_dict()
    config.pop("_name_or_path", None)
    backend = getattr(vllm_config.attention_config, "backend", None)
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    said: dict[str, Any] = {
        "model": options.get("model") or digest_of_weights(model),
        "config": config,
        "dtype": str(model.dtype),
        "longest": model.max_model_len,  # decides the frequencies of LongRoPE and the scores of some models
        "implementation": str(model.model_impl),  # may keep the features of keys in another order
        "media": getattr(model.multimodal_config, "mm_processor_kwargs", None),  # no part of the hashes of media
        "quantization": [str(model.quantization), str(model.quantization_config)],
        "load_format": str(vllm_config.load_config.load_format),
        "seed": model.seed,
        "cache": str(cache.cache_dtype),
        "spec": str(group.kv_cache_spec),
        "layers": sorted(group.layer_names),
        "ranks": vllm_config.parallel_config.tensor_parallel_size,
        # Kernels of some backends keep keys in their own order.
        "backends": [str(backend), *(registered_attention(each) for each in ("CPU_ATTN", "CUSTOM"))],
        "device": _device(str(vllm_config.device_config.device_type)),
        "hashes": [str(cache.prefix_caching_hash_algo), os.environ.get("PYTHONHASHSEED")],
    }
    if draft is not None and draft.model != model.model and not options.get("model"):
        said["draft"] = digest_of_weights(draft)  # its layers are in the blocks too
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def _device(kind: str) -> str:
    """Return the kind of device. For a CPU, add its instruction set, which decides how vLLM's kernels order keys."""
    instructions = f"{torch.backends.cpu.get_cpu_capability()} {torch.cpu._is_amx_tile_supported()}"
    return f"{kind} {instructions}" if kind == "cpu" else kind


def digest_of_weights(model_config: Any) -> str:
    """Return a digest of a model's weight files: of their names, their sizes and samples of their bytes.

    Raises:
        ValueError: The model has no weights on this machine.
    """
    folder = Path(model_config.model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(str(folder), revision=model_config.revision, local_files_only=True))
        except Exception as error:
            raise ValueError(
                f"model: got {model_config.model}, whose weights are in no folder here; needs "
                f'kv_connector_extra_config={{"model": "a name for these weights"}}'
            ) from error
    files = sorted({file for pattern in WEIGHTS for file in folder.glob(pattern)})
    if not files:
        raise ValueError(f"model: got {folder} without weights, needs some of {', '.join(WEIGHTS)}")
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with open(path, "rb") as file:
            for part in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * part // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def layout_of(fingerprint: str, rank: int, size: int) -> Layout:
    """Return the layout of the blocks, `size` bytes each, of one tensor-parallel rank, for a `describe` fingerprint."""
    return Layout(f"vllm {fingerprint} rank {rank}", {"kv": ((size,), torch.uint8)})


def open_tier(options: Mapping[str, Any], layout: Layout, gives: bool = True) -> Tier:
    """Open the tier that `kv_connector_extra_config` names.

    Args:
        options: `tier` is "disk", "mooncake" or "module:function", a function of the layout and the options.
        layout: The layout of the blocks.
        gives: Whether this process gives memory to a store. A process that only looks up keys gives none.

    Raises:
        ValueError: There is no such tier, or it has no such option.
    """
    kind = options.get("tier")
    if isinstance(kind, str) and ":" in kind:
        module, _, name = kind.partition(":")
        make: Callable[[Layout, Mapping[str, Any]], Tier] = getattr(importlib.import_module(module), name)
        return make(layout, options)
    if str(kind) not in OPTIONS:
        raise ValueError(f"tier: got {kind!r}, needs {', '.join(map(repr, OPTIONS))} or 'module:function'")
    check_options(options)
    given = {name: options[name] for name in OPTIONS[str(kind)] if options.get(name) is not None}
    given |= {name: int(given[name]) for name in LEAST.keys() & given.keys()}  # JSON has 1e12 as a float
    if kind == "disk":
        from ....cache.tiers.disk import DiskTier

        return DiskTier(os.fspath(given.pop("path")), layout, **given)
    from ....cache.tiers.mooncake import MooncakeTier

    if not gives:
        given |= {"segment_bytes": 0, "batch_blocks": 1}
    return MooncakeTier.connect(layout, **given)


def check_options(options: Mapping[str, Any]) -> None:
    """Check the options of a tier, those of another package's tier only where this package reads them.

    Raises:
        ValueError: An option is unknown, missing or out of range.
    """
    kind = options.get("tier")
    known = OPTIONS.get(str(kind))
    for name in LEAST.keys() & {"writer_bytes", *(known or ())}:
        value = options.get(name)
        if value is not None and (type(value) not in (int, float) or value % 1 or value < LEAST[name]):
            needs = f"needs an integer of at least {LEAST[name]}"
            raise ValueError(f"kv_connector_extra_config: {name}: got {value!r}, {needs}")
    if known is None:
        return
    common = ("tier", "model", "writer_bytes")
    for name in options:
        if name not in (*common, *known):
            raise ValueError(f"kv_connector_extra_config: got {name!r}, needs some of {', '.join((*common, *known))}")
    for name in {"disk": ("path",), "mooncake": ("metadata_server", "master")}[str(kind)]:
        if options.get(name) is None:
            raise ValueError(f"kv_connector_extra_config: got no {name!r}, needs it for the tier {kind!r}")


def check_connector(vllm_config: Any, kv_cache_config: Any) -> None:
    """Check that blocks of a tier can serve an engine.

    Raises:
        ValueError: They cannot. The message names the reason.
    """
    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, AttentionSpec):
        raise ValueError(f"kv_cache_groups: got {', '.join(kinds)}, needs one group of attention layers")
    refuse_diffusion(vllm_config, "TierConnector")
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) != 1:
            raise ValueError(f"{name}: got {getattr(parallel, name)}, needs 1")
    if vllm_config.lora_config is not None:
        raise ValueError(
            "lora_config: got adapters, needs None: hashes of blocks have an adapter's name, not its weights"
        )
    cache = vllm_config.cache_config
    if "xxhash" in str(cache.prefix_caching_hash_algo) and not os.environ.get("PYTHONHASHSEED"):
        raise ValueError(
            f"prefix_caching_hash_algo: got {cache.prefix_caching_hash_algo}, whose hashes differ from process to "
            "process; needs sha256, or PYTHONHASHSEED set"
        )
    model = vllm_config.model_config
    if model.runner_type == "pooling" and not model.is_prefix_caching_supported:
        raise ValueError(
            "pooler_config: got a pooler that needs the rows of all tokens, as MEAN and CLS; needs one that serves "
            "prefix hits, as LAST: loaded blocks have no rows"
        )
    media = model.multimodal_config
    if getattr(media, "mm_processor_cache_gb", None) == 0 and not cache.enable_prefix_caching:
        raise ValueError(
            "mm_processor_cache_gb: got 0 without prefix caching, so vLLM numbers media from 1 in each engine, "
            "and hashes of blocks do not tell them apart; needs more than 0, or enable_prefix_caching"
        )
    if cache.prefix_match_unit not in (None, groups[0].kv_cache_spec.block_size):
        raise ValueError(f"prefix_match_unit: got {cache.prefix_match_unit}, needs the block size")
