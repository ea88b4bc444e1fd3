"""Writes new keys and values into their cache slots, quantizing where the cache is quantized.

cache[slot // block_size, slot % block_size] = key[token], or round(key[token] / scale) clamped to what the cache's type
holds. Moves 2 * num_tokens * num_kv_heads * head_dim elements in and out; slot -1 writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ._attention.checks import MAX_HEAD_DIM, QUERY_DTYPES, check_cache
from ._attention.constants import next_power_of_2
from ._checks import bad_argument, check_tensor, describe, refuse_grad
from ._debug import debug_mode_enabled
from ._launcher import KernelLaunch, aligned
from ._library import operator
from ._quantize import as_codes, code_kind, equal_scales, quantize, refuse_nan, scale_kind, to_code
from ._repeated import Repeated
from ._triton import require_triton, tl, triton


def check_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Checks the arguments of a cache write, from metadata alone; raises TypeError, ValueError or RuntimeError."""
    check_tensor("key", key, 3, "[num_tokens, num_kv_heads, head_dim]", QUERY_DTYPES)
    check_tensor("value", value, 3, "[num_tokens, num_kv_heads, head_dim]", (key.dtype,), key.device)
    if value.shape[:2] != key.shape[:2]:
        needs = f"{list(key.shape[:2])} as key, and any head_dim"
        raise bad_argument("value", f"shape {list(value.shape)}", needs)
    if not 1 <= key.shape[2] <= MAX_HEAD_DIM:
        raise bad_argument("key", f"head_dim {key.shape[2]}", f"1 to {MAX_HEAD_DIM}")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.stride(2) != 1 and tensor.shape[2] > 1:
            raise bad_argument(name, f"strides {list(tensor.stride())}", "a contiguous last dimension")
    check_cache(key_cache, value_cache, "key", key, key.shape[1], k_scale, v_scale, value.shape[2])
    check_tensor("slot_mapping", slot_mapping, 1, "[num_tokens]", (torch.int64,), key.device)
    if slot_mapping.shape[0] != key.shape[0]:
        raise bad_argument("slot_mapping", describe(slot_mapping), f"{key.shape[0]} elements, one per token of key")
    refuse_grad(key=key, value=value, key_cache=key_cache, value_cache=value_cache)


def check_write_values(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> bool:
    """Checks that every slot is -1 or in the cache, and tells whether one is -1; on a device it synchronizes.

    In debug mode NaN on its way into int8 is refused as well.
    """
    if debug_mode_enabled() and key_cache.dtype == torch.int8:
        written = slot_mapping >= 0
        refuse_nan("key", key[written])
        refuse_nan("value", value[written])
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    if not slot_mapping.numel():
        return False
    low, high = (bound.item() for bound in torch.aminmax(slot_mapping))
    if low < -1 or high >= num_slots:
        raise bad_argument("slot_mapping", f"values from {low} to {high}", f"-1 to {num_slots - 1}")
    return low < 0


def reshape_and_cache_cpu(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """What `pc.reshape_and_cache` writes, in PyTorch on CPU tensors."""
    check_write(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    if check_write_values(key, value, key_cache, slot_mapping):
        rows = torch.nonzero(slot_mapping >= 0).squeeze(1)
        key, value, slot_mapping = key[rows], value[rows], slot_mapping[rows]
    for source, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        if scale is not None:
            source = quantize(source, scale, cache.dtype)
        if cache.dtype.itemsize == 1:  # neither write knows float8
            source, cache = source.view(torch.uint8), cache.view(torch.uint8)
        block_size = cache.shape[1]
        if cache.stride(0) == block_size * cache.stride(1):
            cache.flatten(0, 1).index_copy_(0, slot_mapping, source)
        else:
            cache[slot_mapping // block_size, slot_mapping % block_size] = source


@triton.jit(do_not_specialize=["num_rows"])
def _reshape_and_cache_kernel(
    key_ptr, value_ptr,  # [num_tokens, KV_HEADS, HEAD_DIM or VALUE_DIM]
    key_cache_ptr, value_cache_ptr,  # [num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM or VALUE_DIM]
    slots_ptr,  # [num_tokens]
    k_scale_ptr, v_scale_ptr,
    num_rows,
    stride_kt, stride_kh, stride_vt, stride_vh,
    stride_kcb, stride_kct, stride_kch, stride_vcb, stride_vct, stride_vch,
    KIND: tl.constexpr, SCALES: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles,), a row being one token and one head; key and value."""
    row = tl.cast(tl.program_id(0), tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_d = tl.arange(0, BLOCK_D)
    token = row // KV_HEADS
    head = row % KV_HEADS
    slot = tl.load(slots_ptr + token, mask=row < num_rows, other=-1)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    mask_k = (slot >= 0)[:, None] & (offs_d[None, :] < HEAD_DIM)
    mask_v = (slot >= 0)[:, None] & (offs_d[None, :] < VALUE_DIM)
    k = tl.load(key_ptr + (token * stride_kt + head * stride_kh)[:, None] + offs_d[None, :], mask=mask_k, other=0.0)
    v = tl.load(value_ptr + (token * stride_vt + head * stride_vh)[:, None] + offs_d[None, :], mask=mask_v, other=0.0)
    if SCALES > 0:
        k_scale = tl.load(k_scale_ptr + head * (SCALES - 1), mask=slot >= 0, other=1.0).to(tl.float32)
        v_scale = tl.load(v_scale_ptr + head * (SCALES - 1), mask=slot >= 0, other=1.0).to(tl.float32)
        k = to_code(k.to(tl.float32), k_scale[:, None], KIND)
        v = to_code(v.to(tl.float32), v_scale[:, None], KIND)
    k_row = block * stride_kcb + offset * stride_kct + head * stride_kch
    v_row = block * stride_vcb + offset * stride_vct + head * stride_vch
    tl.store(key_cache_ptr + k_row[:, None] + offs_d[None, :], k, mask=mask_k)
    tl.store(value_cache_ptr + v_row[:, None] + offs_d[None, :], v, mask=mask_v)


def _prepare(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> Callable[..., None]:
    require_triton("reshape_and_cache")
    check_write(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    num_tokens, kv_heads, head_dim = key.shape
    block_d = next_power_of_2(max(head_dim, value.shape[2]))
    block_r = max(1, 2048 // block_d)
    constexprs = {
        "KIND": code_kind(key_cache.dtype),
        "SCALES": scale_kind(k_scale, v_scale),
        "KV_HEADS": kv_heads,
        "BLOCK_SIZE": key_cache.shape[1],
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value.shape[2],
        "BLOCK_R": block_r,
        "BLOCK_D": block_d,
    }
    num_rows = num_tokens * kv_heads
    grid = (-(-num_rows // block_r), 1, 1)
    strides = (*key.stride()[:2], *value.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3])
    is_aligned = aligned(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    launch = KernelLaunch(constexprs, 4, None, is_aligned)
    numbers = (num_rows, *strides)
    is_packed = slot_mapping.is_contiguous()

    def run(
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        if num_rows == 0:
            return
        scales: tuple[torch.Tensor | None, ...] = (key, key)
        if k_scale is not None:
            scales = equal_scales(k_scale, v_scale, kv_heads)
            key_cache, value_cache = as_codes(key_cache), as_codes(value_cache)
        slots = slot_mapping if is_packed else slot_mapping.contiguous()
        launch.launch(
            _reshape_and_cache_kernel, grid, (key, value, key_cache, value_cache, slots, *scales), numbers
        )  # fmt: skip

    return run


def _check_values(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *scales: object,
) -> None:
    check_write_values(key, value, key_cache, slot_mapping)


_launch_reshape_and_cache = Repeated(_prepare, _check_values)


@operator(cpu=reshape_and_cache_cpu, launch=_launch_reshape_and_cache, mutates=("key_cache", "value_cache"))
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
        value: Like key; its head_dim may be another, as with latent attention whose keys and values are expanded.
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, written to; any strides with a contiguous last
            dimension; key's dtype, or float8_e4m3fn or int8 with k_scale.
        value_cache: Like key_cache, with value's head_dim.
        slot_mapping: `[num_tokens]` int64, block number * block_size + offset; -1 writes nothing.
        k_scale: One float or one per KV head; what is stored is key / k_scale, rounded to nearest and saturated. NaN
            stays NaN in float8_e4m3fn; int8 has none and stores 0, which debug mode refuses.
        v_scale: The same for values.

    Raises:
        TypeError: An argument of a wrong type or dtype.
        ValueError: A wrong shape or device; on CPU tensors and in debug mode also a slot out of range.
        RuntimeError: A tensor that requires grad while grad mode is on.

    Examples:
        >>> keys, values = torch.zeros(2, 4, 16, 2, 64).unbind()  # 4 blocks of 16 slots, 2 KV heads
        >>> key, value = torch.randn(2, 3, 2, 64).unbind()  # three tokens, the last of them padding
        >>> pc.reshape_and_cache(key, value, keys, values, torch.tensor([16, 17, -1]))
        >>> torch.equal(keys[1, :2], key[:2]), keys.count_nonzero().item() == 2 * 2 * 64
        (True, True)
    """
    check_write(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
