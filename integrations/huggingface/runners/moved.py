"""Reuse of text cached at other positions: the rotation of its keys, and recomputation of scattered tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch

from ....triton_ops import move_slots, sparse_gap_attention
from ....triton_ops._attention.dense import arange_i32, as_blocks, full_i32, strided_block_table
from ....triton_ops._core.runtime import KERNELS_ON_CPU
from ..api import DynamicCache, DynamicLayer, cache_argument, keeps_logits, uses_attention_interface
from ..calls import UnsupportedError, refuse_if, refusing
from ..images import alike
from ..layers import GrowingIndexedLayer, filled_layers, like, new_cache, state_layers
from ..probe import LONG, TOKENS, Probed
from ..prompts import Prompt
from ..store.storage import Rotation, Rotations
from ..support import changing_rope, harmless_tokens
from .dispatch import MarkedCall, PagedPass, install, mark, no_mask
from .layout import accepted, forward, read

CHUNK = 1024  # scattered tokens of one pass; each has a row of the mask, as long as the prompt
AGAIN = (3, 4, 5, 10, 17)  # positions that the probe computes again, besides the last nine


def probe_moved(model: Any, probed: Probed) -> Probed:
    """Return `probed` with the rotations of a model's keys, and the way to compute its tokens at scattered positions.

    It must run within `own_passes`.

    Raises:
        UnsupportedError: No rotation explains its keys, or tokens computed at scattered positions differ.
    """
    config = model.config.get_text_config(decoder=True)
    refuse_if(probed.states, 'reuse="anywhere": recurrent states cannot be moved')
    refuse_if(changing_rope(model.config), 'reuse="anywhere": its rotary frequencies change with the length')
    refuse_if(
        "chunked_attention" in (getattr(config, "layer_types", None) or ()), 'reuse="anywhere": it attends in chunks'
    )
    with refusing('reuse="anywhere": its forward pass fails with given positions'):
        probed = replace(probed, rotations=_rotations(model))
    length = TOKENS + (probed.window if 0 < probed.window <= LONG else 0)
    # In PyTorch the operator takes two to three times as long as attention under a mask.
    if (model.device.type != "cpu" or KERNELS_ON_CPU) and _operator_serves(model, probed, length):
        return replace(probed, by_operator=True)
    with refusing('reuse="anywhere": its forward pass fails with a mask for each query'):
        _check_scattered(model, probed, length)
    return probed


def _operator_serves(model: Any, probed: Probed, length: int) -> bool:
    """Return whether the operator, which takes no mask, can replace the model's attention."""
    try:
        if not uses_attention_interface(model) or not install(model):
            return False
        with refusing("its attention does not go through the operator"):
            _check_scattered(model, replace(probed, by_operator=True), length)
    except UnsupportedError:
        return False
    return True


def _rotations(model: Any) -> dict[int, Rotations]:
    """Return the rotations of each layer, from a row of equal tokens whose cache entries differ by position only."""
    # All tokens are equal, so attention returns the same at each position, and every layer has equal inputs.
    cache, found = new_cache(model.config), dict[int, Rotations]()
    forward(model, np.repeat(harmless_tokens(model, 1), TOKENS), 0, TOKENS, cache)
    layers = filled_layers(cache)
    refuse_if(any(isinstance(x, GrowingIndexedLayer) for x in layers.values()), 'reuse="anywhere": it has an indexer')
    known = list(_frequencies(model))
    for index, layer in layers.items():
        keys, values = (_rotation_of(side, known) for side in (layer.keys, layer.values))
        if values is None:
            refuse_if(not found, 'reuse="anywhere": it has learned position embeddings')
            # With attention sinks, a layer's output depends on the number of tokens, so its values differ too.
            refuse_if(
                len(known) != 1,
                'reuse="anywhere": it has several rotary embeddings, and it is unknown which one a layer uses',
            )
            found[index] = next(iter(found.values()))
            continue
        if keys is None:
            raise UnsupportedError('reuse="anywhere": no rotary embedding explains how its keys depend on positions')
        found[index] = keys, values
    return found


def _frequencies(model: Any) -> Any:
    """Yield the inverse frequencies that the model's modules have, or that its config describes."""
    seen: list[torch.Tensor] = []
    for name, buffer in model.named_buffers():
        own = name.rpartition(".")[2]
        if own.endswith("inv_freq") and "original" not in own and buffer.dim() == 1 and buffer.numel():
            seen.append(buffer.float())
    config = model.config.get_text_config(decoder=True)
    rotary = getattr(config, "rotary_dim", None)
    if isinstance(rotary, int) and rotary > 1:
        seen.append(10000.0 ** (-torch.arange(0, rotary, 2, device=model.device).float() / rotary))
    for number, values in enumerate(seen):
        if not any(values.shape == other.shape and torch.equal(values, other) for other in seen[:number]):
            yield values


def _rotation_of(rows: torch.Tensor, known: list[torch.Tensor]) -> Rotation | None:
    """Return the rotation that explains how a layer's rows `[1, heads, tokens, width]` depend on positions, or None."""
    return next((rotation for rotation in _candidates(rows.shape[-1], known) if _explains(rotation, rows)), None)


def _candidates(width: int, known: list[torch.Tensor]) -> list[Rotation]:
    """Return the rotations that fit a row of this width. The first candidate rotates nothing."""
    fitting = [values for values in known if 2 * len(values) <= width]
    rotations: list[Rotation] = [
        (values, is_neox, first)
        for values, is_neox in product(fitting, (True, False))
        for first in dict.fromkeys((0, width - 2 * len(values)))
    ]
    return [(None, True, 0), *rotations]


def _explains(rotation: Rotation, rows: torch.Tensor) -> bool:
    """Return whether each row equals the first row, rotated to its position."""
    heads, tokens, width = rows.shape[1:]
    cache = rows[0].transpose(0, 1)[:1].repeat(2 * tokens, 1, 1).view(2, tokens, heads, width)
    slots = torch.arange(tokens)
    move_slots(cache, None, slots, slots + tokens, slots, *rotation)
    return alike(cache[1].transpose(0, 1), rows[0])


class PlacedLayer(PagedPass, DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """A layer that holds all tokens of a row, `[1, heads, tokens, width]`, and writes new ones at their positions.

    With `by_operator`, its keys are marked, so the model's attention calls `attend`. Otherwise the model computes the
    attention, with a mask.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, window: int, by_operator: bool) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True
        self.dtype, self.device = keys.dtype, keys.device
        self._window, self._by_operator = window, by_operator

    def begin(self, at: torch.Tensor) -> None:
        """Set the positions of the next tokens."""
        self._at = at.to(self.device)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Write new keys and values and return all of them in the order of their positions."""
        self.keys.index_copy_(2, self._at, key_states)
        self.values.index_copy_(2, self._at, value_states)
        if not self._by_operator:
            return self.keys, self.values
        return mark(self.keys.view(self.keys.shape), self), self.values

    def attend(self, call: MarkedCall) -> torch.Tensor:
        """See `PagedPass`."""
        query, window, length = call.query, call.window, call.key.shape[2]
        refuse_if((window or 0) != self._window, f"a layer attends over a window of {window}, not {self._window}")
        keys, values, steps = as_blocks(call.key.transpose(1, 2), call.value.transpose(1, 2))
        device = query.device
        tables = strided_block_table(device, 1, length // keys.shape[1], *steps)
        batch = (tables, full_i32(device, 1, length), arange_i32(device, 2, query.shape[2]))
        out: torch.Tensor = sparse_gap_attention(
            query[0].transpose(0, 1), keys, values, *batch, self._at.to(torch.int32), call.scale, self._window,
            softcap=call.softcap, sinks=call.sinks, max_query_len=query.shape[2], max_seq_len=length,
        )  # fmt: skip
        return out.unsqueeze(0)


@torch.no_grad()
def compute_scattered(
    model: Any, tokens: np.ndarray, positions: np.ndarray, cache: DynamicCache, probed: Probed
) -> Any:
    """Compute a row's tokens at ascending `positions` over a cache with all other tokens; return the last output."""
    placed, length = like(cache), len(tokens)
    for index, layer in filled_layers(cache).items():
        for side in (layer.keys, layer.values):  # uninitialized: a masked NaN times 0 would be NaN
            side[:, :, torch.from_numpy(positions).to(side.device)] = 0
        sides = (layer.keys[:, :, :length], layer.values[:, :, :length])
        placed.layers[index] = PlacedLayer(*sides, probed.windows.get(index, 0), probed.by_operator)
    outputs = None
    options: dict[str, Any] = {"logits_to_keep": 1} if keeps_logits(model) else {}
    for begin in range(0, len(positions), CHUNK):
        at = torch.from_numpy(positions[begin : begin + CHUNK]).to(model.device)
        for layer in placed.layers:
            if isinstance(layer, PlacedLayer):
                layer.begin(at)
        windows = probed.windows
        outputs = model(
            input_ids=torch.from_numpy(tokens).to(model.device)[at][None],
            attention_mask=no_mask(len(at), at.device) if probed.by_operator else _masks(model, at, length, windows),
            **accepted(model, position_ids=at[None], cache_position=at),
            **{cache_argument(model): placed},
            use_cache=True,
            return_dict=True,
            **options,
        )
    return outputs


def _masks(model: Any, at: torch.Tensor, length: int, windows: Mapping[int, int]) -> Any:
    """Return masks to add to scores, `[1, 1, queries, tokens]`, by layer type if windows differ."""
    config, keys = model.config.get_text_config(decoder=True), torch.arange(length, device=at.device)
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    reach = {kind: windows.get(number, 0) for number, kind in enumerate(kinds)}

    def mask(window: int) -> torch.Tensor:
        hidden = keys > at[:, None]
        if window:
            hidden |= keys <= at[:, None] - window
        added = torch.zeros(hidden.shape, dtype=model.dtype, device=at.device)
        return added.masked_fill_(hidden, torch.finfo(model.dtype).min)[None, None]

    if len(set(reach.values())) == 1:
        return mask(next(iter(reach.values())))
    return {kind: mask(window) for kind, window in reach.items()}


def _check_scattered(model: Any, probed: Probed, length: int) -> None:
    """Raise UnsupportedError if tokens computed again at scattered positions differ from those of a normal pass."""
    tokens, whole = harmless_tokens(model, length), new_cache(model.config)
    want = forward(model, tokens, 0, length, whole).logits[0, -1]
    kept = {i: (layer.keys.clone(), layer.values.clone()) for i, layer in filled_layers(whole).items()}
    refuse_if(
        any(keys.shape[2] != length for keys, _ in kept.values()) or state_layers(whole), "its cache drops tokens"
    )
    positions = np.array([*AGAIN, *range(length - 9, length)])
    got = compute_scattered(model, tokens, positions, whole, probed).logits[0, -1]
    layers = filled_layers(whole)
    same = alike(want, got, model.dtype) and all(
        alike(old, new, model.dtype)
        for i, pair in kept.items()
        for old, new in zip(pair, (layers[i].keys, layers[i].values), strict=True)
    )
    refuse_if(not same, 'reuse="anywhere": tokens computed at scattered positions get other values than in a row')


def compute_moved(model: Any, prompt: Prompt, end: int, room: int, cache: DynamicCache, probed: Probed) -> None:
    """Fill an empty cache of one row with a prompt's first `end` tokens: read the cached ones, compute the others.

    `room` is the number of free columns that the cache keeps after these tokens.
    """
    known = np.zeros(len(prompt.tokens), np.bool_)
    known[: prompt.hit.cached] = True
    for start, behind in prompt.hit.moved:
        known[start:behind] = True
    known[prompt.hit.repaired] = False
    read(cache, prompt, end, room)
    positions = (~known[:end]).nonzero()[0]
    if positions.size:
        compute_scattered(model, prompt.tokens[:end], positions, cache, probed)
