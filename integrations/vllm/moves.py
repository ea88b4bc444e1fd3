"""Text that moved, in vLLM's workers: they copy KV to other slots and rotate the keys before a forward pass.

An engine asks its workers at the start whether they can do it (`prepare`). A step's `SchedulerOutput` names the moves.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...triton_ops import move_slots
from .api import ask_workers, call_around_update, why_not

PREPARATIONS = {"pc_cannot_move": __name__}
"""By attribute of `model_config`, the module whose `prepare(worker)` prepares a worker or returns why it cannot."""

Slots = npt.NDArray[np.int64]
Move = Callable[..., None]

BACKENDS = ("CUSTOM", "FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION")
"""Attention backends that store a token's key and value next to each other in the last dimension, features in order."""

ANGLE, LENGTH = 0.03, 0.02
"""The largest accepted error of angles (in radians) and of lengths in a rotary table, which bfloat16 rounds."""


def follow_engines() -> None:
    """Have engines of this process prepare their workers, as `PREPARATIONS` says, before schedulers are made."""

    def prepare_all(vllm_config: Any, ask: Callable[[Callable[[Any], str]], str]) -> None:
        for attribute, module in PREPARATIONS.items():
            setattr(vllm_config.model_config, attribute, ask(importlib.import_module(module).prepare))

    ask_workers(prepare_all)


def prepare(worker: Any) -> str:
    """Have a worker apply moves before each forward pass; return why it cannot, or "". Its caches must exist."""
    if reason := why_not("eviction.anywhere", worker=worker):
        return reason
    runner = worker.model_runner
    try:
        layers = moves_of_layers(runner.get_model(), worker.vllm_config)
    except ValueError as error:
        return str(error)

    def move(names: list[str], output: Any) -> None:
        if moves := getattr(output, "pc_moves", None):
            apply(layers, moves, runner.device)

    call_around_update(runner, move)
    return ""


@torch.no_grad()
def apply(layers: list[Move], moves: list[tuple[Slots, Slots, Slots]], device: torch.device) -> None:
    """Copy KV in all layers and rotate the keys. Each move has source slots, target slots and numbers of positions."""
    columns = [np.concatenate(column) for column in zip(*moves, strict=True)]
    sources, targets, deltas = (torch.from_numpy(column).to(device) for column in columns)
    for move in layers:
        move(source_slots=sources, target_slots=targets, deltas=deltas)


def moves_of_layers(model: Any, vllm_config: Any) -> list[Move]:
    """Return for each layer `move_slots` with the layer's keys, values and rotation.

    Raises:
        ValueError: The rotation of a layer is unknown. The message names the cause.
    """
    config = vllm_config.model_config
    for name in ("no_rope_layers", "no_rope_layer_interval", "nope_layer_interval"):
        if getattr(config.hf_text_config, name, None):
            raise ValueError("layers without positions")
    if config.uses_mrope:
        raise ValueError("rotary embeddings with several positions a token")
    layers, known = list[Move](), dict[int, torch.Tensor]()
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        cache = getattr(layer, "kv_cache", None)
        if cache is None or not hasattr(layer, "get_attn_backend"):
            raise ValueError(f"layer {name}, which is no attention")
        backend, size = layer.get_attn_backend().get_name(), getattr(layer, "head_size", 0)
        if backend not in BACKENDS:
            raise ValueError(f"the attention backend {backend}, which may keep keys in an order of its own")
        shared = getattr(layer, "kv_sharing_target_layer_name", None)
        if layer.sliding_window is not None or shared is not None:
            raise ValueError(f"layer {name}, which has {'a window' if shared is None else 'no KV of its own'}")
        if cache.dim() != 4 or cache.shape[-1] != 2 * size or not cache.dtype.is_floating_point:
            raise ValueError(f"a KV cache of shape {list(cache.shape)} in {cache.dtype}")
        rotary = _rotary_beside(model, name)
        if id(rotary) not in known:
            known[id(rotary)] = frequencies(rotary.cos_sin_cache)
        keys, values = cache.transpose(1, 2).split(size, dim=-1)
        inv_freq = known[id(rotary)].to(cache.device)
        layers.append(partial(move_slots, keys, values, inv_freq=inv_freq, is_neox=bool(rotary.is_neox_style)))
    if not layers:
        raise ValueError("a model without attention")
    return layers


def _rotary_beside(model: Any, layer: str) -> Any:
    """Return the rotary embedding in the module that contains an attention layer. Raise ValueError without one."""
    try:
        siblings = model.get_submodule(layer.rpartition(".")[0]).children()
    except AttributeError:
        siblings = iter(())
    found = [each for each in siblings if hasattr(each, "is_neox_style")]
    if len(found) != 1:
        raise ValueError(f"layer {layer}, beside which is no rotary embedding")
    if not hasattr(found[0], "cos_sin_cache") or hasattr(found[0], "mrope_section"):
        raise ValueError(f"rotary embeddings of the kind {type(found[0]).__name__}")
    return found[0]


def frequencies(table: torch.Tensor) -> torch.Tensor:
    """Return the inverse frequencies `[rotary_dim / 2]`, float32, of a rotary table.

    Args:
        table: `[positions, rotary_dim]`, cosines and then sines.

    Raises:
        ValueError: The angles of the table do not grow in proportion to the position.
    """
    if table.dim() != 2 or len(table) < 2 or not table.shape[1]:
        raise ValueError(f"a rotary table of shape {list(table.shape)}")
    positions = torch.tensor(sorted({1 << at for at in range(len(table).bit_length() - 1)} | {len(table) - 1}))
    cosines, sines = table[positions.to(table.device)].double().cpu().chunk(2, dim=-1)
    angles, inv_freq = torch.atan2(sines, cosines), torch.zeros(table.shape[1] // 2, dtype=torch.float64)
    for angle, position in zip(angles, positions.tolist(), strict=True):  # each is twice as exact as the one before
        inv_freq += torch.remainder(angle - inv_freq * position + math.pi, 2 * math.pi).sub(math.pi) / position
    apart = torch.remainder(angles - positions[:, None] * inv_freq + math.pi, 2 * math.pi).sub(math.pi).abs()
    lengths = torch.hypot(cosines, sines)
    if apart.max() > ANGLE or (lengths / lengths[0].clamp_min(1e-9) - 1).abs().max() > LENGTH:
        raise ValueError("rotary embeddings whose frequencies follow the length")
    return inv_freq.float()
