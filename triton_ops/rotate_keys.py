"""The operator that copies blocks of keys and rotates each to another position, to reuse cached text there.

A key's features are rotated in pairs (a, b). For a block that moves by delta and a pair with inverse frequency w:

    a' = a * cos(delta * w) - b * sin(delta * w)
    b' = b * cos(delta * w) + a * sin(delta * w)

Rotations add up, so a key for position p becomes the key for p + delta. The operator reads and writes the bytes of n
blocks once and rotates in float32. Angles are float64, because at 128k positions float32 angles are wrong by 0.01. See
https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._core.checks import lowest_entry
from ._core.operator import operator
from .move_slots import Moves, build_move, check_moved_keys, move_on_cpu


def _check(args: Any) -> None:
    check_moved_keys(args, "source_ids", "target_ids", "deltas")


def _moves_of(args: Any) -> Any:
    """Check values and return the call as one of `move_slots`: a slot for each token of a block, and no values.

    All slots of an absent block are negative, as absent slots are.
    """
    for name in ("source_ids", "target_ids"):
        lowest_entry(name, getattr(args, name), args.key_cache.shape[0])
    size, device = args.key_cache.shape[1], args.key_cache.device
    indexes = (args.source_ids, args.target_ids, args.deltas)
    sources, targets, deltas = (x.to(device, non_blocking=True).long().unsqueeze(1) for x in indexes)
    nth = torch.arange(size, device=device)
    sources, targets = ((ids * size + nth).flatten() for ids in (sources, targets))
    deltas = deltas.expand(-1, size).flatten()
    return Moves(args.key_cache, None, sources, targets, deltas, args.inv_freq, args.is_neox, args.first)


def _build(args: Any) -> Callable[[Any], None]:
    launch = build_move(_moves_of(args))
    return lambda args: launch(_moves_of(args))


@operator(check=_check, run=lambda args: move_on_cpu(_moves_of(args)), build=_build, mutates=("key_cache",))
def rotate_keys(
    key_cache: torch.Tensor,
    source_ids: torch.Tensor,
    target_ids: torch.Tensor,
    deltas: torch.Tensor,
    inv_freq: torch.Tensor,
    is_neox: bool = True,
    first: int = 0,
) -> None:
    """Copy blocks of keys and rotate each by a number of positions, to reuse cached text at other positions.

    Values do not depend on positions, so copy them with `pc.copy_blocks`. A block may be its own target. The result is
    undefined if a target appears twice, or is the source of another entry.

    Args:
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, float16, bfloat16, float32, float8_e4m3fn or
            int8, any strides with a contiguous last dimension. It holds keys rotated for their positions, and is
            written to. Quantized keys are rounded again with their scale and saturate at the type's limits.
        source_ids: `[n]` int32 or int64, on the cache's device or the host. -1 writes zeros to the target.
        target_ids: `[n]`, like source_ids. -1 writes nothing.
        deltas: `[n]` int32 or int64, the target position minus the source position; may be negative.
        inv_freq: `[rotary_dim / 2]` float32 or float64, the inverse frequency of each pair in radians for each
            position, from the model's rotary embedding with its scaling. Features from rotary_dim on are copied.
        is_neox: Whether pairs are (i, i + rotary_dim / 2), as in GPT-NeoX and Llama. False: (2i, 2i + 1), as in GPT-J.
        first: The first column that is rotated. Columns before it are copied. For the latent rows of DeepSeek's models,
            pass 512 and `cache.unsqueeze(2)`.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A shape or device is invalid. For ids in host memory, and in debug mode, also: a block is out of
            range.
        RuntimeError: A tensor requires grad while grad mode is on.

    Examples:
        >>> keys = torch.randn(8, 16, 2, 64)
        >>> inv_freq = 10000.0 ** (-torch.arange(0, 64, 2) / 64)
        >>> ids, deltas = torch.tensor([0, 1]), torch.tensor([160, 160], dtype=torch.int32)
        >>> pc.rotate_keys(keys, ids, ids + 4, deltas, inv_freq)  # blocks 4 and 5: the same keys 160 tokens later
    """
