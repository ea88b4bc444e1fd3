"""Writes new keys and values into their cache slots, quantizing where the cache is quantized.

cache[slot // block_size, slot % block_size] = key[token], or round(key[token] / scale) clamped to what the cache's type
holds. Moves 2 * num_tokens * num_kv_heads * head_dim elements in and out; slot -1 writes nothing.
"""

from __future__ import annotations

import torch

from ._attention.checks import MAX_HEAD_DIM, QUERY_DTYPES, check_cache, refuse_grad
from ._checks import bad_argument, check_tensor, describe
from ._library import define

_SCHEMA = (
    "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
    "Tensor? k_scale=None, Tensor? v_scale=None) -> ()"
)


def _check(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    check_tensor("key", key, 3, "[num_tokens, num_kv_heads, head_dim]", QUERY_DTYPES)
    check_tensor("value", value, 3, "[num_tokens, num_kv_heads, head_dim]", (key.dtype,), key.device)
    if value.shape != key.shape:
        raise bad_argument("value", f"shape {list(value.shape)}", f"{list(key.shape)} as key")
    if not 1 <= key.shape[2] <= MAX_HEAD_DIM:
        raise bad_argument("key", f"head_dim {key.shape[2]}", f"1 to {MAX_HEAD_DIM}")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.stride(2) != 1 and tensor.shape[2] > 1:
            raise bad_argument(name, f"strides {list(tensor.stride())}", "a contiguous last dimension")
    check_cache(key_cache, value_cache, "key", key, key.shape[1], k_scale, v_scale)
    check_tensor("slot_mapping", slot_mapping, 1, "[num_tokens]", (torch.int64,), key.device)
    if slot_mapping.shape[0] != key.shape[0]:
        raise bad_argument("slot_mapping", describe(slot_mapping), f"{key.shape[0]} elements, one per token of key")
    refuse_grad(key=key, value=value, key_cache=key_cache, value_cache=value_cache)


def _check_values(key_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    if slot_mapping.numel():
        low, high = (int(bound) for bound in torch.aminmax(slot_mapping))
        if low < -1 or high >= num_slots:
            raise bad_argument("slot_mapping", f"values from {low} to {high}", f"-1 to {num_slots - 1}")


def quantize(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values / scale in the nearest code of `dtype`, saturating; ties to even.

    Args:
        values: `[num_tokens, num_kv_heads, head_dim]`.
        scale: One element, or one per KV head.
        dtype: float8_e4m3fn or int8.
    """
    scaled = values.float() / scale.float().view(-1, 1)
    if dtype == torch.int8:
        return scaled.round_().clamp_(-128, 127).to(dtype)
    return scaled.clamp_(-448.0, 448.0).to(dtype)


def reshape_and_cache_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """What `pc.reshape_and_cache` writes, in PyTorch on CPU tensors."""
    _check(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    _check_values(key_cache, slot_mapping)
    if bool((slot_mapping < 0).any()):
        rows = torch.nonzero(slot_mapping >= 0).squeeze(1)
        key, value, slot_mapping = key[rows], value[rows], slot_mapping[rows]
    block_size = key_cache.shape[1]
    index = (slot_mapping // block_size, slot_mapping % block_size)
    for source, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        if scale is not None:
            source = quantize(source, scale, cache.dtype)
        if cache.dtype.itemsize == 1:  # index_put_ knows no float8
            source, cache = source.view(torch.uint8), cache.view(torch.uint8)
        cache[index] = source


def _fake(*args: object, **kwargs: object) -> None:
    return None


define(
    "reshape_and_cache",
    _SCHEMA,
    reference=reshape_and_cache_reference,
    launcher=reshape_and_cache_reference,
    fake=_fake,
)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Writes the keys and values of new tokens into their slots of the cache.

    Two tokens with one slot are undefined: either may be what stays.

    Args:
        key: `[num_tokens, num_kv_heads, head_dim]`, float16, bfloat16 or float32; contiguous last dimension.
        value: Like key.
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, written to; any strides with a contiguous last
            dimension; key's dtype, or float8_e4m3fn or int8 with k_scale.
        value_cache: Like key_cache.
        slot_mapping: `[num_tokens]` int64, block number * block_size + offset; -1 writes nothing.
        k_scale: One float or one per KV head; what is stored is key / k_scale, rounded to nearest and saturated.
        v_scale: The same for values.

    Raises:
        TypeError: An argument of a wrong type or dtype.
        ValueError: A wrong shape or device; on CPU tensors and in debug mode also a slot out of range.
        RuntimeError: A tensor that requires grad while grad mode is on.
    """
    torch.ops.pc.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
