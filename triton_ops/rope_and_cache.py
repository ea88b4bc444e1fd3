"""The operator that applies rotary embeddings to queries and keys and writes keys and values into the cache.

A head's features are rotated in pairs (a, b), with cos and sin from row p of cos_sin for position p:

    a' = a * cos - b * sin
    b' = b * cos + a * sin

Pairs are (i, i + rotary_dim / 2), as in GPT-NeoX and Llama, or (2i, 2i + 1) if interleaved, as in GPT-J. Features from
rotary_dim on are unchanged. One kernel reads query, key and value once and writes each once, and computes in float32.
See https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._attention.constants import next_power_of_2
from ._core.cache import aligned
from ._core.checks import FLOATS, INDEX_DTYPES, bad_argument, check_tensor, describe, is_same_memory, lowest_entry
from ._core.launch import Launch
from ._core.operator import operator
from ._core.quantize import code_kind, scale_kind
from .reshape_and_cache import cache_tensors, check_write, check_write_values, reshape_and_cache, reshape_and_cache_cpu


def _check(args: Any) -> None:
    """Check the metadata of a call."""
    check_write(args)
    key, value, cos_sin = args.key, args.value, args.cos_sin
    if value.shape != key.shape:
        raise bad_argument("value", f"shape {list(value.shape)}", f"{list(key.shape)} as key")
    if is_same_memory(args.key_cache, args.value_cache):
        raise bad_argument("value_cache", "the memory of key_cache", "its own, since keys are rotated and values not")
    num_tokens, _, head_dim = key.shape
    layout, sizes = "[num_tokens, num_heads, head_dim]", (num_tokens, None, head_dim)
    check_tensor("query", args.query, layout, (key.dtype,), key.device, sizes, rows=True)
    check_tensor("positions", args.positions, "[num_tokens]", INDEX_DTYPES, key.device, (num_tokens,), rows=True)
    check_tensor("cos_sin", cos_sin, "[max_positions, rotary_dim]", FLOATS, key.device)
    rotary_dim = cos_sin.shape[1]
    if not cos_sin.is_contiguous() or rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        needs = f"a contiguous tensor with an even rotary_dim of at most {head_dim}"
        raise bad_argument("cos_sin", describe(cos_sin), needs)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate the first features of x `[num_tokens, heads, head_dim]`; cos and sin `[num_tokens, rotary_dim / 2]`."""
    rotary_dim = 2 * cos.shape[1]
    first, second = slice(0, rotary_dim // 2), slice(rotary_dim // 2, rotary_dim)
    if interleaved:
        first, second = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out[..., rotary_dim:] = x[..., rotary_dim:]
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    a, b = x[..., first].float(), x[..., second].float()
    out[..., first] = (a * cos).addcmul_(b, sin, value=-1)
    out[..., second] = (b * cos).addcmul_(a, sin)
    return out


def _rope_and_cache_cpu(args: Any) -> torch.Tensor:
    lowest_entry("positions", args.positions, args.cos_sin.shape[0], least=0)
    cos, sin = args.cos_sin[args.positions.long()].chunk(2, -1)
    rotated = rotate(args.key, cos, sin, args.interleaved)
    reshape_and_cache_cpu(args._replace(key=rotated))
    return rotate(args.query, cos, sin, args.interleaved)


def _build(args: Any) -> Callable[[Any], torch.Tensor]:
    """Return a function that rotates and writes for calls of this kind, with one launch."""
    from .kernels.rope_and_cache import _rope_and_cache_kernel

    num_tokens, num_heads, head_dim = args.query.shape
    block_d = next_power_of_2(head_dim)
    block_h = max(1, min(next_power_of_2(num_heads), 2048 // block_d))
    kv_heads = args.key.shape[1]
    constexprs = {
        "KIND": code_kind(args.key_cache.dtype),
        "SCALES": scale_kind(args.k_scale, args.v_scale),
        "INTERLEAVED": args.interleaved,
        "ROTARY_DIM": args.cos_sin.shape[1],
        "NUM_HEADS": num_heads,
        "KV_HEADS": kv_heads,
        "BLOCK_SIZE": args.key_cache.shape[1],
        "HEAD_DIM": head_dim,
        "BLOCK_H": block_h,
        "BLOCK_K": next_power_of_2(kv_heads),
        "BLOCK_D": block_d,
    }
    packed = [stride for tensor in (args.query, args.key, args.value) for stride in tensor.stride()[:2]]
    launch = Launch(
        _rope_and_cache_kernel,
        constexprs,
        (num_tokens, max(1, -(-num_heads // block_h)), 1),
        (*packed, *args.key_cache.stride()[:3], *args.value_cache.stride()[:3]),
        same_alignment=aligned(*args),
    )
    is_packed = args.query.stride() == (num_heads * head_dim, head_dim, 1)

    def run(args: Any) -> torch.Tensor:
        query = args.query
        # For a contiguous tensor `empty_like` takes half the time of `new_empty`.
        out: torch.Tensor = torch.empty_like(query) if is_packed else query.new_empty(query.shape)
        if num_tokens:
            written = cache_tensors(args, kv_heads)
            launch((out, query, args.positions, args.cos_sin, args.key, args.value, *written))
        return out

    return run


def _check_values(args: Any) -> None:
    lowest_entry("positions", args.positions, args.cos_sin.shape[0], least=0)
    check_write_values(args)


@operator(
    check=_check,
    run=_rope_and_cache_cpu,
    build=_build,
    check_values=_check_values,
    mutates=("key_cache", "value_cache"),
    docs_from=(reshape_and_cache,),
)
def rope_and_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    interleaved: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, write keys and values into the cache, and return the rotated queries.

    query and key are not changed. Keys are rounded to their dtype before they are quantized, so the cache gets the same
    content as from a rotation followed by `reshape_and_cache`.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, float16, bfloat16 or float32, with a contiguous last dimension.
        key: `[num_tokens, num_kv_heads, head_dim]`, with the query's dtype.
        value: The values, with the shape and dtype of key.
        positions: `[num_tokens]` int32 or int64, each token's row of cos_sin.
        cos_sin: `[max_positions, rotary_dim]`, contiguous. A row has cosines in its first half and sines in its second.
            rotary_dim is even and at most head_dim.
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, as for `reshape_and_cache`. It is written to.
        value_cache: The cache of values, with the layout and dtype of key_cache.
        interleaved: Whether a pair of features is (2i, 2i + 1); otherwise (i, i + rotary_dim / 2).

    Returns:
        The rotated query, `[num_tokens, num_heads, head_dim]`, contiguous.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A shape or device is invalid. For CPU tensors and in debug mode also: a slot or position is out of
            range.
        RuntimeError: A tensor requires grad while grad mode is on.

    Examples:
        >>> keys, values = torch.zeros(2, 4, 16, 2, 64).unbind()
        >>> query, key, value = torch.randn(3, 4, 64), torch.randn(3, 2, 64), torch.randn(3, 2, 64)
        >>> angles = torch.arange(128.0)[:, None] * 10000 ** -(torch.arange(32) / 32)
        >>> cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)  # a row for each position
        >>> slots, positions = torch.tensor([16, 17, 18]), torch.tensor([0, 1, 2])
        >>> query = pc.rope_and_cache(query, key, value, positions, cos_sin, keys, values, slots)
        >>> query.shape, torch.equal(keys[1, 0], key[0])  # position 0 is not rotated
        (torch.Size([3, 4, 64]), True)
    """
    return query.new_empty(query.shape)
