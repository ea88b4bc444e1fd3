"""The forward pass over a text whose keys and values a press compresses.

A named press chooses tokens when attention is computed, and does not touch the model. An object of kvpress puts hooks
on modules, so it gets a twin of the model, which shares every tensor and nothing else. Therefore other calls never see
its hooks or the attributes that it sets. Such a press shortens a layer of the cache, or sets `masked_key_indices`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch

from ....triton_ops import paged_attention
from ...presses import kept_tokens
from ..api import CACHE_NAMES, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, takes_cache
from ..calls import UnsupportedError, refuse_if
from ..layers import index_reach
from ..runners.dispatch import MarkedCall, PagedPass, install, mark
from ..runners.layout import inputs_of
from ..support import changing_rope, check_model, is_compiled
from .kept import Content, WindowLayer, keep


def check_compressible(model: Any) -> None:
    """Raise UnsupportedError for a model whose keys and values cannot be compressed."""
    check_model(model)
    refuse_if(changing_rope(model.config), "its rotary embeddings change with the length")
    refuse_if(is_compiled(model), "torch.compile runs its forward pass")
    adds = index_reach(model.config, "keep_window_size") is not None  # Doge, in the mask that it makes for each layer
    refuse_if(adds, "its attention adds values of its own to scores")
    if model.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise UnsupportedError(f"its weights are {model.dtype}, needs float32, float16 or bfloat16")


def read(model: Any, tokens: torch.Tensor, press: Any, budget: float, key: bytes) -> Content:
    """Run the model over a text and keep the tokens that a press chooses.

    Raises:
        UnsupportedError: The model cannot be compressed, or not with this press.
    """
    cache = DynamicCache(config=model.config)
    kept: dict[int, Any] = {}
    peak = 0

    def look() -> None:
        """Update `peak`, the most bytes of whole and compressed layers. A view counts with all memory that it holds."""
        nonlocal peak
        whole = [(layer.keys, layer.values) for layer in cache.layers if layer.is_initialized]
        packed = [layer[:2] for layer in kept.values()]
        held = [t.untyped_storage() for pair in (*whole, *packed) for t in pair if t is not None]
        peak = max(peak, sum({s.data_ptr(): s.nbytes() for s in held}.values()))

    for index, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedError(f"a layer of its cache is a {type(layer).__name__}")
        if type(layer) is DynamicLayer and isinstance(press, str):
            cache.layers[index] = _ReadLayer(index, press, budget, kept, look)
    full = [i for i, layer in enumerate(cache.layers) if isinstance(layer, DynamicLayer) and not layer.is_sliding]
    refuse_if(not full, "every layer has a window")
    refuse_if(not install(model), "its attention is not called through transformers' interface")
    if isinstance(press, str):
        model.base_model(**_inputs(model, tokens, cache))
    else:
        _read_by_hooks(model, tokens, press, cache, kept, look, set(full))
    refuse_if(set(full) - kept.keys(), "its attention is not called through transformers' interface")
    for index, layer in enumerate(cache.layers):
        if layer.is_sliding:
            window = torch.tensor(layer.sliding_window)
            kept[index] = WindowLayer(layer.keys.clone(), layer.values.clone(), window)
    position = len(tokens)
    if _turns_keys(press):
        refuse_if(len(full) < len(cache.layers), "a press that moves keys to new positions, in a model with windows")
        position = int(kept[full[0]].kept[0])
    layers = dict(sorted(kept.items()))
    kept.clear()  # breaks a reference cycle, which would hold memory until garbage collection
    return Content(layers, tokens, position, peak, key)


def _inputs(model: Any, tokens: torch.Tensor, cache: DynamicCache) -> dict[str, Any]:
    """Return the inputs that generate would make for a whole text, for the model without its head."""
    inputs = inputs_of(model, tokens.numpy(), 0, len(tokens), cache)
    inputs.pop("logits_to_keep", None)
    return inputs


class _ReadLayer(PagedPass, DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """A layer of the cache that is compressed when attention is computed.

    It marks the keys that it returns, and attention over marked keys calls `attend`.
    """

    keys: torch.Tensor | None
    values: torch.Tensor | None

    def __init__(self, index: int, press: str, budget: float, kept: dict[int, Any], look: Callable[[], None]) -> None:
        super().__init__()
        self.index, self.press, self.budget, self.kept, self.look = index, press, budget, kept, look

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Return keys that are marked with this layer, and the values."""
        self.lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states, value_states
        self.caches(value_states)
        return mark(key_states.view_as(key_states), self), value_states

    def attend(self, call: MarkedCall) -> torch.Tensor:
        """Keep the tokens that the press chooses. Return attention over the text `[1, tokens, num_heads, head_dim]`."""
        refuse_if(call.window is not None, "a layer without a window in its cache has one in its attention")
        query, key, value, scale = call[:4]
        length = query.shape[2]
        table, lens, starts = (
            torch.tensor(t, dtype=torch.int32, device=query.device) for t in ([[0]], [length], [0, length])
        )
        sides = (query[0].transpose(0, 1), key.transpose(1, 2), value.transpose(1, 2))  # one block of the whole text
        given: dict[str, Any] = {"softcap": call.softcap, "sinks": call.sinks, "max_query_len": length}
        out = paged_attention(*sides, table, lens, starts, scale, max_seq_len=length, **given)
        chosen = kept_tokens(self.press, query[0], key[0], value[0], scale, self.budget)
        self.kept[self.index] = keep(key[0], value[0], chosen)
        self.look()
        self.keys = self.values = None
        return out[None]


def _read_by_hooks(
    model: Any,
    tokens: torch.Tensor,
    press: Any,
    cache: DynamicCache,
    kept: dict[int, Any],
    look: Callable[[], None],
    full: set[int],
) -> None:
    """Run the model over a text with a press of kvpress. Layers that the press left whole are packed at the end."""
    twin = _twin(model)
    modules = _attention_modules(twin)
    refuse_if(full - modules.keys(), "its attention modules have no layer_idx")

    def pack(index: int) -> None:
        layer, masked = cache.layers[index], modules[index].__dict__.pop("masked_key_indices", None)
        keys, values = layer.keys[0], layer.values[0]
        chosen = torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device)
        if masked is not None:
            chosen[masked[1], masked[2]] = False
        kept[index] = keep(keys, values, chosen)
        if keys.shape[1] < len(tokens):  # which tokens remain is unknown
            kept[index] = kept[index]._replace(chosen=torch.empty(0, 0, dtype=torch.uint8))
        look()
        # New tensors, because an empty view would hold all of the memory.
        layer.keys, layer.values = (side.new_empty(1, len(side), 0, side.shape[2]) for side in (keys, values))

    def pack_if_pressed(module: Any, *_: Any) -> None:
        layer = cache.layers[module.layer_idx]
        look()
        if layer.keys.shape[2] < len(tokens) or vars(module).get("masked_key_indices") is not None:
            pack(module.layer_idx)

    def pass_cache(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Give the press's hook, which runs next, the cache under every name that it may look up."""
        for name in CACHE_NAMES:
            kwargs.setdefault(name, cache)

    for index in full:
        modules[index].register_forward_hook(pass_cache, with_kwargs=True)
    with press(twin):
        for index in full:
            modules[index].register_forward_hook(pack_if_pressed)  # runs after the press's hook; deleted with the twin
        places = torch.arange(len(tokens), device=model.device)  # kvpress needs them, and transformers passes them on
        twin.base_model(**_inputs(twin, tokens, cache), cache_position=places)
    for index in sorted(full - kept.keys()):
        pack(index)


def _twin(model: Any) -> Any:
    """Return a copy of a model's modules that shares every tensor with it."""
    shared = {id(t): t for t in itertools.chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)


def _attention_modules(model: Any) -> dict[int, Any]:
    """Return for each layer the innermost module that gets the cache."""
    found: dict[int, Any] = {}
    for module in model.modules():
        index = vars(module).get("layer_idx")
        if isinstance(index, int) and takes_cache(module.forward):
            found[index] = module  # an inner module comes later and replaces the outer one
    return found


def _turns_keys(press: Any) -> bool:
    """Return whether a press of kvpress moves the kept tokens to new positions, counted from 0."""
    if isinstance(press, str):
        return False
    if type(press).__name__ == "KeyRerotationPress" or getattr(press, "rerotate_keys", False):
        return True
    inner = [getattr(press, "press", None), *(getattr(press, "presses", None) or ())]
    return any(_turns_keys(p) for p in inner if p is not None)
