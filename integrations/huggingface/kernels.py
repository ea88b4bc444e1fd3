"""The check of the kernels that a model needs, before they serve it."""

from __future__ import annotations

from typing import Any

from ...triton_ops._core.checks import FLOATS
from ...triton_ops._verify import Shape
from ...triton_ops._verify.remembered import first_fault
from .calls import UnsupportedError


def wrong_kernel(model: Any, block_size: int, use: str) -> UnsupportedError | None:
    """Return an error that names a kernel that the model needs and that is wrong on its device; None if all are right.

    A kernel is wrong if its result differs from PyTorch's. The kernels run once for each device and version, compiled
    as for the model's layers; see `pc check`.

    Args:
        model: A model on its device.
        block_size: Number of tokens in a block.
        use: The purpose that needs the kernels; see `first_fault`.
    """
    if model.dtype not in FLOATS:  # refused elsewhere, by its name
        return None
    fault = first_fault(model.device, _shape(model, block_size), use)
    if fault is None:
        return None
    reason = f"the kernel of pc.{fault.operator} is wrong on {model.device}"
    return UnsupportedError(reason, f"{fault.case}: {fault.problem}; run `python -m pc check`")


def _shape(model: Any, block_size: int) -> Shape:
    """Return the attention layers of a model from its config, or usual sizes where the config does not say."""
    config = model.config.get_text_config(decoder=True)
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "sliding_window")
    try:
        heads, kv_heads, head_dim, width, window = (getattr(config, name, None) for name in names)
    except RuntimeError:  # layers differ, as in Gemma-4, and transformers refuses to name one value
        return Shape(model.dtype, block_size=block_size)
    if not isinstance(heads, int) or heads < 1:
        return Shape(model.dtype, block_size=block_size)
    kv_heads = kv_heads or heads
    head_dim = head_dim or (width // heads if isinstance(width, int) else None)
    if not (isinstance(kv_heads, int) and isinstance(head_dim, int) and heads % kv_heads == 0):
        return Shape(model.dtype, block_size=block_size)
    windows = (window,) if isinstance(window, int) and window > 0 else ()
    return Shape(model.dtype, heads, kv_heads, head_dim, block_size, windows)
