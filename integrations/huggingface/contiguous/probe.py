"""A look at a model before it is served: whether it goes on from a cached prefix as if it had computed it itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..api import DynamicCache, cache_argument, positions
from ..calls import UnsupportedError, refuse_if, refusing
from ..images import ImageSplit, alike
from ..support import eval_mode, harmless_tokens
from .layers import (
    GrowingWindowLayer,
    States,
    attention_layers,
    install_scan,
    new_cache,
    num_tokens,
    put_states,
    state_layers,
    take_states,
)
from .layout import accepted, forward
from .prompts import RowImages, clear_of, prompts_of, runs
from .storage import Specs, TokenSpec

TOKENS, CUT, PAD = 29, 16, 3  # length of the probe, where it is cut, and by how much it is padded
LONG = 256  # longer windows are not looked at when caching is enabled, but when a prompt is first longer


@dataclass(frozen=True)
class Probed:
    """What a model keeps of a token."""

    specs: Specs
    states: States  # of a row; empty without
    windows: dict[int, int]  # of each layer that has one
    counts_padding: bool  # whether a token's KV depends on how many masked columns are before it
    continues_padded: bool  # whether it goes on from a cached prefix behind masked columns

    @property
    def window(self) -> int:
        """The longest window of its layers, 0 without."""
        return max(self.windows.values(), default=0)


@torch.no_grad()
def probe(model: Any) -> Probed:
    """Computes a short row at once, in two parts, and behind padding; UnsupportedError: it fails, or they differ."""
    # Keys, values and states are compared, not logits alone: random or idle states hardly show in those.
    install_scan(model)
    with eval_mode(model):
        whole = _in_parts(model, TOKENS, CUT)
        specs, states = _specs(whole), take_states(whole, 0)
        refuse_if(not specs and not states, "it fills no transformers cache")
        windows = {i: x.sliding_window for i, x in enumerate(whole.layers) if isinstance(x, GrowingWindowLayer)}
        window = max(windows.values(), default=0)
        if 0 < window <= LONG:
            probe_window(model, window)
        counts_padding, continues = _behind_padding(model, whole) if specs else (False, True)
    return Probed(specs, states, windows, counts_padding, continues)


@torch.no_grad()
def probe_window(model: Any, window: int) -> None:
    """Raises UnsupportedError where a prompt longer than the window is attended to past what the cache keeps of it."""
    with eval_mode(model):
        _in_parts(model, window + TOKENS, window + CUT)


@torch.no_grad()
def probe_images(
    model: Any, input_ids: torch.Tensor, mask: torch.Tensor | None, images: RowImages
) -> ImageSplit | None:
    """How a row goes on from a prefix before, behind and within its first image; UnsupportedError: it does not."""
    # None where the images do not show it.
    prompt = next((p for p in prompts_of(input_ids, mask, images) if p.items), None)
    if prompt is None:
        return None
    run = runs(prompt.items)[0]
    first, end = run[0].first - prompt.pad, run[-1].end - prompt.pad
    length = clear_of(prompt.items, min(len(prompt.tokens), end + CUT) + prompt.pad) - prompt.pad
    with refusing("its forward pass fails behind a cached prefix beside images"):
        whole = new_cache(model.config)
        want = forward(model, prompt.tokens, 0, length, whole, prompt.inputs(0, length)).logits[0, -1]

        def same(cut: int, computed: bool = True) -> bool:
            parts = new_cache(model.config)
            if computed:
                forward(model, prompt.tokens, 0, cut, parts, prompt.inputs(0, cut))
            parts = _restored(model, parts if computed else whole, cut)
            got = forward(model, prompt.tokens, cut, length, parts, prompt.inputs(cut, length)).logits[0, -1]
            return _close(whole, parts) and alike(want, got)

        cuts = [cut for cut in (first, end) if 0 < cut < length]
        refuse_if(not all(map(same, cuts)), "it does not go on from a cached prefix beside images")
        within = (first + end) // 2
        if not cuts:
            return None
        if within == first:
            return ImageSplit()
        computes = same(within)
        return ImageSplit(computes, computes or (not state_layers(whole) and same(within, computed=False)))


def _in_parts(model: Any, length: int, cut: int) -> DynamicCache:
    """The cache of a row computed at once; UnsupportedError: it is another in two parts, or the model fails."""
    tokens = harmless_tokens(model, length)
    with refusing("its forward pass fails over a cache that it has not filled itself"):
        whole, first = new_cache(model.config), new_cache(model.config)
        want = forward(model, tokens, 0, length, whole).logits[0, -1]
        forward(model, tokens, 0, cut, first)
        parts = _restored(model, first)
        got = forward(model, tokens, cut, length, parts).logits[0, -1]
        same = _close(whole, parts) and alike(want, got)
    refuse_if(not same, "it does not go on from a cached prefix as if it had computed it")
    return whole


def _kept(cache: DynamicCache) -> dict[int, Any]:
    """The layers that have filled themselves; others read the keys of one of them."""
    return {i: layer for i, layer in attention_layers(cache).items() if layer.keys is not None}


def _specs(cache: DynamicCache) -> Specs:
    specs: Specs = {}
    for index, layer in _kept(cache).items():
        for side in (layer.keys, layer.values):
            if side.dim() != 4 or side.shape[2] != TOKENS:
                raise UnsupportedError("its cache does not keep keys and values by head and token")
        keys, values = (
            TokenSpec(side.shape[1], side.shape[3], side.dtype, side.device) for side in (layer.keys, layer.values)
        )
        specs[index] = (keys, values)
    return specs


def _restored(model: Any, cache: DynamicCache, length: int | None = None) -> DynamicCache:
    """A cache with what one has, or has of its first tokens, put in as from blocks."""
    fresh = new_cache(model.config)
    layers = attention_layers(fresh)
    for index, own in _kept(cache).items():
        layer = layers[index]
        if hasattr(layer, "adopt"):
            keys, values = own.keys[:, :, :length].clone(), own.values[:, :, :length].clone()
            layer.adopt(keys, values, keys.shape[2])
        else:
            layer.update(own.keys[:, :, :length], own.values[:, :, :length])
    if state_layers(cache):
        put_states(fresh, [take_states(cache, 0)])
    return fresh


def _close(whole: DynamicCache, parts: DynamicCache, skipped: int = 0) -> bool:
    """Whether keys, values and states agree; the second cache has so many columns before them."""
    others = attention_layers(parts)
    pairs = [
        (getattr(layer, side), getattr(others[i], side)[:, :, skipped:])
        for i, layer in _kept(whole).items()
        for side in ("keys", "values")
    ]
    if not skipped:
        pairs += zip(take_states(whole, 0).values(), take_states(parts, 0).values(), strict=True)
    return all(a.shape == b.shape and alike(a, b) for a, b in pairs)


def _behind_padding(model: Any, whole: DynamicCache) -> tuple[bool, bool]:
    """Whether masked columns before a row change its keys and values, and whether it goes on behind them."""
    tokens = harmless_tokens(model, TOKENS)
    ids = torch.from_numpy(np.concatenate([np.full(PAD, tokens[0]), tokens]))[None].to(model.device)
    ids = torch.cat([ids, ids.roll(1, 1)])  # a mask without a hole in any row may be dropped
    mask = torch.ones_like(ids)
    mask[0, :PAD] = 0

    def compute(end: int, cache: DynamicCache) -> torch.Tensor:
        part = mask[:, :end]
        inputs = model.prepare_inputs_for_generation(
            ids[:, :end],
            next_sequence_length=end - num_tokens(cache),
            **{cache_argument(model): cache},
            attention_mask=part,
            **accepted(model, position_ids=positions(model, ids[:, :end], part)),
            is_first_iteration=num_tokens(cache) == 0,
            use_cache=True,
        )
        logits: torch.Tensor = model(**inputs, return_dict=True).logits[:, -1]
        return logits

    try:
        padded, first = new_cache(model.config), new_cache(model.config)
        want = compute(ids.shape[1], padded)
        if state_layers(padded):
            return not _close(whole, _row(padded), PAD), True
        compute(CUT, first)
        parts = _restored(model, first)
        got = compute(ids.shape[1], parts)
        return not _close(whole, _row(padded), PAD), alike(want, got) and _close(_row(padded, PAD), _row(parts), PAD)
    except Exception:
        return True, False


def _row(cache: DynamicCache, skipped: int = 0) -> DynamicCache:
    """The first row of a cache without its first columns, to be looked at."""
    row = DynamicCache()
    for index, layer in _kept(cache).items():
        row.update(layer.keys[:1, :, skipped:], layer.values[:1, :, skipped:], index)
    return row
