"""The probe of a model before it is served: a row that continues from a cached prefix must equal one computed whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .api import DynamicCache, cache_argument, positions, takes
from .calls import UnsupportedError, refuse_if, refusing
from .functions import Functions
from .identity import has_own_code, restored_holders, restored_hooks
from .images import ImageSplit, alike
from .layers import (
    GrowingWindowLayer,
    States,
    attention_layers,
    filled_layers,
    install_scan,
    new_cache,
    num_tokens,
    put_states,
    state_layers,
    take_states,
)
from .loop import Loop
from .prompts import RowImages, clear_of, prompts_of, runs
from .runners.layout import accepted, fill, forward
from .store.storage import Rotations, Specs, TensorSpec
from .support import changing_rope, harmless_tokens, kept_deltas, padding_token
from .visits import apart

TOKENS, CUT, PAD = 29, 16, 3  # tokens of the probe, tokens of its first part, columns of padding
LONG = 256  # longer windows are not probed at once, but when a prompt first exceeds the window
EVICTS = "something removes tokens from its cache, such as a hook that evicts"


@dataclass(frozen=True)
class Probed:
    """The cache entries that a model stores per token, and how it treats padding."""

    specs: Specs
    states: States  # the recurrent states of a row; empty if the model has none
    windows: dict[int, int]  # by layer, of those with a window
    counts_padding: bool  # whether a token's KV depends on the number of masked columns before it
    continues_padded: bool  # whether a row with masked columns before it can continue from a cached prefix
    continues_typed: bool  # whether a row with zeros as `token_type_ids` can do so; PaliGemma 2 then attends both ways
    # Only for reuse="anywhere", from `probe_moved`. `by_operator`: whether `pc.sparse_gap_attention` computes attention
    # of tokens at scattered positions. Otherwise the model computes it, with a mask.
    rotations: Mapping[int, Rotations] = field(default_factory=dict)  # by layer
    by_operator: bool = False

    @property
    def window(self) -> int:
        """The longest window of its layers; 0 if no layer has one."""
        return max(self.windows.values(), default=0)


@contextlib.contextmanager
def own_passes(model: Any) -> Iterator[Functions]:
    """Let this thread run forward passes of its own within a block: without gradients, documents and rows' settings.

    Hooks that count or record passes hold afterwards what they held before, and hooks that remove themselves are there
    again, so a call finds them as the user left them.
    The block gets the functions of the model's forward pass.
    The model is in eval mode within the block. If it is already, submodules in training mode are left as they are:
    calls are served with them, so they must pass the probe.
    """
    training = [m for m in model.modules() if m.training] if model.training else []
    with torch.no_grad(), kept_deltas(model), apart(), restored_hooks(model), restored_holders(model) as found:
        try:
            if training:
                model.eval()
            yield found
        finally:
            for m in training:
                m.training = True


def probe(model: Any) -> Probed:
    """Compute a short row at once, in two parts, and after padding, and compare the results, within `own_passes`.

    Raises:
        UnsupportedError: The model fails, or the results differ.
    """
    # Logits alone are not enough: untrained models hardly use their states, so wrong states hardly change the logits.
    install_scan(model)
    whole = _in_parts(model, TOKENS, CUT)
    specs, states = _specs(whole), take_states(whole, 0)
    refuse_if(not specs and not states, "it fills no transformers cache")
    windows = {i: x.sliding_window for i, x in enumerate(whole.layers) if isinstance(x, GrowingWindowLayer)}
    window = max(windows.values(), default=0)
    if 0 < window <= LONG:
        probe_window(model, window)
    counts_padding, continues = _behind_padding(model, whole) if specs else (False, True)
    typed = not takes(model.forward, "token_type_ids") or _continues_typed(model)
    with contextlib.suppress(Exception):  # a hook may count passes of one token, see `set_by_forward`
        forward(model, harmless_tokens(model, 1), 0, 1, new_cache(model.config))
    return Probed(specs, states, windows, counts_padding, continues, typed)


def probe_window(model: Any, window: int) -> None:
    """Raise UnsupportedError if a prompt longer than the window needs more tokens than the cache keeps."""
    with own_passes(model):
        _in_parts(model, window + TOKENS, window + CUT)


def probe_hooks(model: Any, length: int, reach: int | None) -> int:
    """Compute a row in two halves, as `probe` does, because a hook may look at positions within a forward pass.

    A hook that changes `output[:, 200:]`, for example, shows that only in passes of more than 200 tokens.

    Args:
        model: The model.
        length: Number of tokens of a prompt.
        reach: Number of tokens beyond which the model selects keys, so that its parts may differ; None if it does not.

    Returns:
        The number of tokens of the row: twice `length`, so that few rows are needed, if the model takes that many.

    Raises:
        UnsupportedError: The halves differ from the whole row.
    """
    config = model.config.get_text_config(decoder=True)
    most = length if changing_rope(config) else getattr(config, "max_position_embeddings", None) or length
    length = max(length, min(2 * length, most, reach or most))
    with own_passes(model):
        _in_parts(model, length, length // 2)
    return length


def probe_images(loop: Loop, images: RowImages) -> ImageSplit | None:
    """Return whether a row may be cut inside images, probed at its first image; None if that image allows no probe.

    Raises:
        UnsupportedError: The row does not continue from a prefix that ends before or after the image.
    """
    model = loop.model
    prompt = next((p for p in prompts_of(loop.input_ids, loop.mask, images) if p.items), None)
    if prompt is None:
        return None
    run = runs(prompt.items)[0]
    first, end = run[0].first - prompt.pad, run[-1].end - prompt.pad
    length = clear_of(prompt.items, min(len(prompt.tokens), end + CUT) + prompt.pad) - prompt.pad
    with refusing("its forward pass fails after a cached prefix of a prompt with images"):
        whole = new_cache(model.config)
        want = forward(model, prompt.tokens, 0, length, whole, prompt.inputs(0, length)).logits[0, -1]

        def same(cut: int, computed: bool = True) -> bool:
            parts = new_cache(model.config)
            if computed:
                forward(model, prompt.tokens, 0, cut, parts, prompt.inputs(0, cut))
            parts = _restored(model, parts if computed else whole, cut)
            got = forward(model, prompt.tokens, cut, length, parts, prompt.inputs(cut, length)).logits[0, -1]
            return _close(model, whole, parts) and alike(want, got, model.dtype)

        cuts = [cut for cut in (first, end) if 0 < cut < length]
        refuse_if(
            not all(map(same, cuts)),
            "it computes other values when it continues from a cached prefix of a prompt with images",
        )
        within = (first + end) // 2
        if not cuts:
            return None
        if within == first:
            return "never"
        if same(within):
            return "computed"
        return "read" if not state_layers(whole) and same(within, computed=False) else "never"


def _continues_typed(model: Any) -> bool:
    try:
        _in_parts(model, TOKENS, CUT, typed=True)
    except UnsupportedError:
        return False
    return True


def _in_parts(model: Any, length: int, cut: int, typed: bool = False) -> DynamicCache:
    """Compute a row at once and in two parts, compare the caches, and return that of the whole row.

    With code of the user's, the last token is a third part, which decode steps and long hits also compute alone. If
    `typed`, the row's `token_type_ids` are zeros.

    Raises:
        UnsupportedError: The two caches differ, or the model fails.
    """
    tokens = harmless_tokens(model, length)

    def given(end: int) -> dict[str, Any] | None:
        if not typed:
            return None
        ids = torch.from_numpy(tokens[:end])[None].to(model.device)
        own = accepted(model, position_ids=positions(model, ids, torch.ones_like(ids)))
        return own | {"token_type_ids": torch.zeros_like(ids)}

    with refusing("its forward pass fails"):
        whole, first = new_cache(model.config), new_cache(model.config)
        outputs = forward(model, tokens, 0, length, whole, given(length))
        want = outputs.logits[0, -1]
        refuse_if(len(whole.layers) != len(first.layers), "its forward pass adds layers to its cache")
    with refusing("its forward pass fails with a restored cache"):
        wrapped = any(hasattr(value, "self_attention_cache") for value in outputs.values())
        refuse_if(wrapped, "it keeps its state in a cache for cross-attention")
        forward(model, tokens, 0, cut, first, given(cut))
        parts = _restored(model, first)
        if has_own_code(model):  # it may treat a pass of one token in another way
            forward(model, tokens, cut, length - 1, parts, given(length - 1))
            cut = length - 1
        got = forward(model, tokens, cut, length, parts, given(length)).logits[0, -1]
        same = _close(model, whole, parts) and alike(want, got, model.dtype)
    evicts = any(layer.keys.dim() == 4 and layer.keys.shape[2] < length for layer in filled_layers(whole).values())
    refuse_if(not same, EVICTS if evicts else "it computes other values when it continues from a cached prefix")
    return whole


def _specs(cache: DynamicCache) -> Specs:
    """Return the shapes of the keys and values that each layer of a cache keeps per token.

    Raises:
        UnsupportedError: A layer does not keep them by head and token.
    """
    specs: Specs = {}
    for index, layer in filled_layers(cache).items():
        sides = (layer.keys, layer.values)
        by_token = all(side.dim() == 4 and side.shape[2] == TOKENS for side in sides)
        refuse_if(not by_token, "its cache does not keep keys and values by head and token")
        keys, values = (TensorSpec((side.shape[1], side.shape[3]), side.dtype, side.device) for side in sides)
        specs[index] = (keys, values)
    return specs


def _restored(model: Any, cache: DynamicCache, length: int | None = None) -> DynamicCache:
    """Return a new cache with the first `length` tokens (None: all) of `cache`, restored as from blocks."""
    fresh = new_cache(model.config)
    layers = attention_layers(fresh)
    for index, own in filled_layers(cache).items():
        keys, values = own.keys[:, :, :length].clone(), own.values[:, :, :length].clone()
        fill(layers[index], keys, values, keys.shape[2])
    if state_layers(cache):
        put_states(fresh, [take_states(cache, 0)])
    return fresh


def _close(model: Any, whole: DynamicCache, parts: DynamicCache, skipped: int = 0) -> bool:
    """Return whether keys, values and states agree; the second cache has `skipped` more columns before them."""
    others = attention_layers(parts)
    pairs = [
        (getattr(layer, side), getattr(others[i], side)[:, :, skipped:])
        for i, layer in filled_layers(whole).items()
        for side in ("keys", "values")
    ]
    if not skipped:
        pairs += zip(take_states(whole, 0).values(), take_states(parts, 0).values(), strict=True)
    return all(alike(a, b, model.dtype) for a, b in pairs)


def _behind_padding(model: Any, whole: DynamicCache) -> tuple[bool, bool]:
    """Return whether masked columns before a row change its KV, and whether such a row continues from a prefix."""
    tokens, pad = harmless_tokens(model, TOKENS), padding_token(model)
    ids = torch.from_numpy(np.concatenate([np.full(PAD, tokens[0] if pad < 0 else pad), tokens]))[None]
    # In the second row no column is masked: models may ignore columns that all rows mask.
    ids = torch.cat([ids, ids.roll(1, 1)]).to(model.device)
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
            return not _close(model, whole, _row(padded), PAD), True
        compute(CUT, first)
        parts = _restored(model, first)
        got = compute(ids.shape[1], parts)
        continues = alike(want, got, model.dtype) and _close(model, _row(padded, PAD), _row(parts), PAD)
        return not _close(model, whole, _row(padded), PAD), continues
    except Exception:
        return True, False


def _row(cache: DynamicCache, skipped: int = 0) -> DynamicCache:
    """Return the first row of a cache without its first `skipped` columns."""
    row = DynamicCache()
    for index, layer in filled_layers(cache).items():
        row.update(layer.keys[:1, :, skipped:], layer.values[:1, :, skipped:], index)
    return row
