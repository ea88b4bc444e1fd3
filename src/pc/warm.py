"""`python -m pc warmup`, which compiles the kernels for the kinds of attention layers in a model's config."""

from __future__ import annotations

import time
from typing import Any

import torch

from . import warmup
from ._console import choose_device

CACHE_DTYPES = {"float8": torch.float8_e4m3fn, "float8_e4m3fn": torch.float8_e4m3fn, "fp8": torch.float8_e4m3fn}
CACHE_DTYPES |= {"int8": torch.int8}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def layer_kinds(config: Any, tensor_parallel: int = 1) -> list[dict[str, Any]]:
    """Return the arguments of `pc.warmup` for each kind of attention layer in a transformers config.

    Args:
        config: The model's config.
        tensor_parallel: Number of devices that share the heads. The arguments are for one of them.

    Raises:
        ValueError: The number of heads is not a multiple of `tensor_parallel`.
        UnsupportedError: A layer is neither full nor sliding-window attention.
    """
    from transformers import AutoModelForCausalLM

    from .integrations.huggingface.runners.packed import layer_windows

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
        "num_kv_heads": max(1, kv_heads // tensor_parallel),  # with fewer KV heads than devices, devices share a head
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
    }
    options = {
        "softcap": getattr(text, "attn_logit_softcapping", None) or 0.0,
        "alibi": bool(getattr(text, "alibi", False)) or text.model_type in ("bloom", "mpt"),
    }
    with torch.device("meta"):  # only the model's parameters show whether it has learned sinks
        model = AutoModelForCausalLM.from_config(config)
    options["sinks"] = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    windows = layer_windows(config)
    kinds = [0] * (len(windows) < text.num_hidden_layers) + sorted(set(windows.values()))
    used = {name: value for name, value in options.items() if value}
    return [shape | used | ({"window": window} if window else {}) for window in kinds]


def run_warmup(
    model: str,
    device: str | None,
    dtype: str | None,
    cache_dtype: str | None,
    block_size: int,
    tensor_parallel: int,
    workers: int,
) -> int:
    """Compile the kernels of each kind of layer, print a line for each and return the exit status."""
    from transformers import AutoConfig

    from .integrations.huggingface.calls import UnsupportedError

    for name, value, known in (("dtype", dtype, DTYPES), ("cache_dtype", cache_dtype, CACHE_DTYPES)):
        if value is not None and value not in known:
            print(f"{name}: got {value!r}, needs one of {', '.join(known)}")
            return 2
    try:
        place = choose_device(device)
        config = AutoConfig.from_pretrained(model)
        own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
        query_dtype = own if dtype is None else DTYPES[dtype]
        stored = None if cache_dtype is None else CACHE_DTYPES[cache_dtype]
        for kind in layer_kinds(config, tensor_parallel):
            begin = time.perf_counter()
            warmup(**kind, block_size=block_size, dtype=query_dtype, cache_dtype=stored, device=place, workers=workers)
            said = ", ".join(f"{name} {value}" for name, value in kind.items())
            print(f"{time.perf_counter() - begin:6.1f} s  {said}", flush=True)
    except (OSError, ValueError, AttributeError, RuntimeError, UnsupportedError) as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    if place.type == "cpu":
        print("nothing was compiled: on a CPU, PyTorch computes the operators; with a GPU pass --device cuda")
    return 0
