"""`python -m pc warmup`: the kinds of layers that a model's config tells of, and their kernels, compiled ahead."""

from __future__ import annotations

import time
from typing import Any

import torch

from . import warmup

CACHE_DTYPES = {"float8": torch.float8_e4m3fn, "float8_e4m3fn": torch.float8_e4m3fn, "fp8": torch.float8_e4m3fn}
CACHE_DTYPES |= {"int8": torch.int8}


def layer_kinds(config: Any, tensor_parallel: int = 1) -> list[dict[str, Any]]:
    """Arguments of `pc.warmup` for each kind of attention layer of a transformers config, on one of so many devices.

    Raises:
        ValueError: Heads that so many devices cannot share.
        UnsupportedError: Layers that are neither full nor sliding-window attention.
    """
    from transformers import AutoModelForCausalLM

    from .integrations.huggingface.paged.layers import layer_windows

    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    if heads % tensor_parallel:
        raise ValueError(f"tensor_parallel: got {tensor_parallel}, needs a divisor of {heads} heads")
    if rank := getattr(text, "kv_lora_rank", None):
        width = rank + text.qk_rope_head_dim
        return [{"num_heads": heads // tensor_parallel, "num_kv_heads": 1, "head_dim": width, "value_dim": rank}]
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    shape = {
        "num_heads": heads // tensor_parallel,
        "num_kv_heads": max(1, kv_heads // tensor_parallel),  # few are on several devices each
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
    }
    options = {
        "softcap": getattr(text, "attn_logit_softcapping", None) or 0.0,
        "alibi": bool(getattr(text, "alibi", False)) or text.model_type in ("bloom", "mpt"),
    }
    with torch.device("meta"):  # no config tells of learned sinks
        model = AutoModelForCausalLM.from_config(config)
    options["sinks"] = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    windows = layer_windows(config)
    kinds = [0] * (len(windows) < text.num_hidden_layers) + sorted(set(windows.values()))
    given = {name: value for name, value in options.items() if value}
    return [shape | given | ({"window": window} if window else {}) for window in kinds]


def run_warmup(
    model: str,
    device: str | None,
    dtype: str | None,
    cache_dtype: str | None,
    block_size: int,
    tensor_parallel: int,
    workers: int,
) -> int:
    """Compiles every kind of layer, a line for each; the exit status."""
    from transformers import AutoConfig

    from .integrations.huggingface.calls import UnsupportedError

    if cache_dtype is not None and cache_dtype not in CACHE_DTYPES:
        print(f"cache_dtype: got {cache_dtype!r}, needs one of {', '.join(CACHE_DTYPES)}")
        return 2
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        config = AutoConfig.from_pretrained(model)
        own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
        given = own if dtype is None else getattr(torch, dtype)
        stored = None if cache_dtype is None else CACHE_DTYPES[cache_dtype]
        for kind in layer_kinds(config, tensor_parallel):
            begin = time.perf_counter()
            warmup(**kind, block_size=block_size, dtype=given, cache_dtype=stored, device=device, workers=workers)
            said = ", ".join(f"{name} {value}" for name, value in kind.items())
            print(f"{time.perf_counter() - begin:6.1f} s  {said}", flush=True)
    except (OSError, ValueError, AttributeError, RuntimeError, UnsupportedError) as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    if device == "cpu":
        print("nothing was compiled: kernels run on a GPU, and on a CPU PyTorch does; name --device cuda there")
    return 0
