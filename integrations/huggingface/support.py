"""What can be served: of a model once, when caching is enabled, and of a call, before its first token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache, GenerationMixin
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


class UnsupportedError(Exception):
    """Raised, before anything is changed, when a model or a call cannot be served; its text says why."""


# Arguments of the forward pass that this adapter computes itself, or that change nothing in a token.
SERVED_ARGUMENTS = frozenset(
    {
        "attention_mask",
        "position_ids",
        "past_key_values",
        "use_cache",
        "logits_to_keep",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "cache_position",
    }
)


def check_model(model: Any) -> None:
    """Raises UnsupportedError for a model whose KV cannot be cached by prefix; says why."""
    config = model.config
    if type(model).generate is not GenerationMixin.generate or type(model)._sample is not GenerationMixin._sample:
        raise UnsupportedError("it has a generate of its own")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError("it is an encoder-decoder model")
    if config.get_text_config(decoder=True) is not config:
        raise UnsupportedError("it takes more than text, and its prompt is not identified by token ids alone")
    if getattr(model, "_is_stateful", False):
        raise UnsupportedError("it keeps a recurrent state, which has no blocks")
    if not getattr(config, "is_causal", True):
        raise UnsupportedError("its attention is not causal")
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedError("its attention does not go through transformers' AttentionInterface")
    layer_windows(config)
    if any(p.device.type == "meta" for p in model.parameters()):
        raise UnsupportedError("some of its weights are on the meta device")


def layer_windows(config: Any) -> dict[int, int]:
    """The layers with a sliding window, and its tokens: what transformers itself would cache for each layer.

    Raises:
        UnsupportedError: A layer is neither full attention nor a sliding window.
    """
    other = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other:
        raise UnsupportedError(f"it has layers of {', '.join(sorted(other))}")
    windows = {}
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is DynamicSlidingWindowLayer:
            windows[index] = layer.sliding_window
        elif type(layer) is not DynamicLayer:
            raise UnsupportedError(f"layer {index} keeps a {type(layer).__name__}")
    return windows


def check_call(model: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any]) -> None:
    """Raises UnsupportedError for a call whose tokens could differ, or whose result needs tensors not cached."""
    mode = str(getattr(generation_config.get_generation_mode(), "value", ""))
    if mode not in ("greedy_search", "sample"):
        raise UnsupportedError(f"generation mode {mode} is served by the model's own generate")
    if model.training:
        raise UnsupportedError("the model is in training mode; call model.eval()")
    if torch.is_autocast_enabled(model.device.type):
        raise UnsupportedError("autocast is on, and keys and values would not be those computed without it")
    if not model_kwargs.get("use_cache", True):
        raise UnsupportedError("use_cache=False asks for no cache")
    if generation_config.cache_implementation is not None:
        raise UnsupportedError(
            f"cache_implementation={generation_config.cache_implementation!r} asks for another cache"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(generation_config, name, False) or model_kwargs.get(name):
            raise UnsupportedError(f"{name}=True needs tensors that are not there for cached tokens")
    other = sorted(k for k, v in model_kwargs.items() if v is not None and k not in SERVED_ARGUMENTS)
    if other:
        raise UnsupportedError(f"the arguments {other} could change what a token's KV is")
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise UnsupportedError(f"input_ids of shape {list(input_ids.shape)} hold no prompt")
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if mask is not None and not bool(mask[:, -1].all()):
        raise UnsupportedError("the batch is padded on the right")
    if positions is not None and not torch.equal(
        positions.expand(input_ids.shape), expected_positions(input_ids, mask)
    ):
        raise UnsupportedError("position_ids are not those of the tokens that attention_mask leaves")


def expected_positions(input_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The positions transformers gives to a left-padded batch, `[batch, length]` int64."""
    ones = torch.ones_like(input_ids) if mask is None else mask.long()
    positions = ones.cumsum(-1) - 1
    return positions.masked_fill(ones == 0, 0)


def rope_keys(config: Any, prompt_lens: list[int], max_length: int) -> tuple[str, ...] | None:
    """Extra keys for rotary embeddings whose frequencies depend on the length of the sequence.

    "longrope" uses one set of frequencies up to the length the model was first trained at and another beyond,
    "dynamic" changes them with every length beyond it (transformers, modeling_rope_utils.dynamic_rope_update). A key
    rotated under one set must not be read under another.

    Raises:
        UnsupportedError: The frequencies would change during this call.
    """
    for rope in _rope_parameters(config):
        kind = _rope_type(rope)
        if kind not in ("dynamic", "longrope"):
            continue
        limit = (
            rope.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or config.max_position_embeddings
        )
        if max_length <= limit:
            continue
        if kind == "longrope" and min(prompt_lens) > limit:
            return ("longrope",)
        raise UnsupportedError(f"{kind} rotary embeddings change at {limit} tokens, which this call may cross")
    return None


def rope_types(config: Any) -> set[Any]:
    """The kinds of rotary embeddings of a model."""
    return {_rope_type(rope) for rope in _rope_parameters(config)}


def _rope_type(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type"))


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """The parameter dictionaries of rotary embeddings; some models have one per kind of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if any(isinstance(value, dict) for value in rope.values()):
        yield from (value for value in rope.values() if isinstance(value, dict))
    else:
        yield rope
