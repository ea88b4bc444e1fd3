"""What can be served: of a model once, when caching is enabled, and of a call, before its first token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, GenerationMixin
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GENERATION_MODES_MAPPING

from .loop import Loop


class UnsupportedError(Exception):
    """Raised, before anything is changed, when a model or a call cannot be served.

    Args:
        reason: Why, in words that are the same for every call of the kind.
        detail: What is particular to this one.

    Examples:
        >>> from transformers import MambaConfig, MambaForCausalLM
        >>> from pc.integrations.huggingface import UnsupportedError, enable_continuous_batching
        >>> sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
        >>> model = MambaForCausalLM(MambaConfig(**sizes)).eval()
        >>> try:
        ...     handle = enable_continuous_batching(model)
        ... except UnsupportedError as error:
        ...     print(str(error).partition(":")[0], "is not served")
        MambaForCausalLM is not served
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason
        self.detail = detail


OWN_CACHE = "past_key_values of your own is served by the model's own generate"
CONTINUED = "_pc_continued"
"""Attribute by which a cache is known as the result of a served call."""

_OF_HUB = ("constraints", "force_words_ids", "penalty_alpha", "num_beam_groups", "dola_layers")
"""Settings that may choose a decoding loop of the hub."""

# Arguments of the forward pass that generate makes itself, or that change nothing in a token's KV.
SERVED_ARGUMENTS = frozenset(
    {
        "attention_mask",
        "position_ids",
        "past_key_values",
        "cache_params",
        "use_cache",
        "logits_to_keep",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "cache_position",
        "token_type_ids",
        "mm_token_type_ids",
    }
)


def check_model(model: Any) -> None:
    """Raises UnsupportedError for a model whose KV cannot be cached by prefix; says why."""
    config = model.config
    if type(model).generate is not GenerationMixin.generate or type(model)._sample is not GenerationMixin._sample:
        raise UnsupportedError("it has a generate of its own")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError("it is an encoder-decoder model")
    if not model._supports_default_dynamic_cache():
        raise UnsupportedError("its state is not kept in a transformers cache")
    if any(p.device.type == "meta" for p in model.parameters()):
        raise UnsupportedError("some of its weights are on the meta device")


def check_arguments(arguments: dict[str, Any]) -> None:
    """Raises UnsupportedError for arguments of generate under which nothing of a call can be cached."""
    for name in ("custom_generate", "synced_gpus"):
        if arguments.get(name):
            raise UnsupportedError(f"{name} is served by the model's own generate")
    given = [arguments[name] for name in ("past_key_values", "cache_params") if arguments.get(name) is not None]
    if not all(getattr(cache, CONTINUED, None) is not None for cache in given):
        raise UnsupportedError(OWN_CACHE)
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise UnsupportedError("several processes generate together")


def take_stop_strings(model: Any, arguments: dict[str, Any]) -> None:
    """Turns `stop_strings` and `tokenizer` into a criterion: generate drops the tokenizer of a custom decoding loop.

    Raises:
        UnsupportedError: They stand in a generation config, or the tokenizer is needed for more.
    """
    configs = [c for c in (arguments.get("generation_config"), model.generation_config) if c is not None]
    if arguments.get("token_healing") or any(getattr(c, "token_healing", False) for c in configs):
        raise UnsupportedError("token healing is served by the model's own generate")
    if any(getattr(c, "stop_strings", None) for c in configs):
        raise UnsupportedError("stop_strings of a generation config are served by the model's own generate")
    if arguments.get("stop_strings") and arguments.get("tokenizer") is not None:
        criterion = StopStringCriteria(arguments["tokenizer"], arguments.pop("stop_strings"))
        arguments["stopping_criteria"] = StoppingCriteriaList([*(arguments.get("stopping_criteria") or ()), criterion])


def check_mode(model: Any, arguments: dict[str, Any]) -> None:
    """Raises UnsupportedError for a decoding loop that transformers takes from the hub."""
    own = arguments.get("generation_config")
    configs = [vars(c) for c in (own, model.generation_config) if c is not None]
    if any(known.get(name) is not None for known in (arguments, *configs) for name in _OF_HUB):
        given = {name: value for name, value in arguments.items() if name in vars(model.generation_config)}
        config, _ = model._prepare_generation_config(own, **given)
        mode = config.get_generation_mode(arguments.get("assistant_model"))
        if "/" in GENERATION_MODES_MAPPING[mode]:
            raise UnsupportedError(f"generation mode {mode.value} is served by the model's own generate")


def check_loop(loop: Loop) -> None:
    """Raises UnsupportedError for a call whose tokens could differ from those of the model's own generate."""
    model, kwargs, config = loop.model, loop.model_kwargs, loop.generation_config
    prepare = vars(model).get("prepare_inputs_for_generation", type(model).prepare_inputs_for_generation)
    if not str(getattr(prepare, "__module__", "")).startswith("transformers."):
        raise UnsupportedError("prepare_inputs_for_generation is overridden")
    if model.training:
        raise UnsupportedError("the model is in training mode; call model.eval()")
    if torch.is_autocast_enabled(model.device.type):
        raise UnsupportedError("autocast is on, and keys and values would not be those computed without it")
    if not kwargs.get("use_cache", True):
        raise UnsupportedError("use_cache=False asks for no cache")
    if config.cache_implementation is not None:
        raise UnsupportedError("cache_implementation asks for another cache", config.cache_implementation)
    if type(kwargs.get(loop.cache_name)) is not DynamicCache:
        raise UnsupportedError("its state is not kept in a transformers cache")
    encoded = kwargs.get("mm_encoder_outputs")
    given = [k for k, v in kwargs.items() if v is not None and not (v is encoded and not any((v or {}).values()))]
    other = sorted(set(given) - SERVED_ARGUMENTS)
    if other:
        raise UnsupportedError(f"arguments that could change what a token's KV is: {', '.join(other)}")
    types = [kwargs[k] for k in ("token_type_ids", "mm_token_type_ids") if kwargs.get(k) is not None]
    if loop.images is None and any(bool(t.any()) for t in types):
        raise UnsupportedError("token types could change what a token's KV is")
    ids, mask, positions = loop.input_ids, kwargs.get("attention_mask"), kwargs.get("position_ids")
    if ids.dim() != 2 or ids.shape[1] == 0:
        raise UnsupportedError("input_ids hold no prompt", f"shape {list(ids.shape)}")
    if mask is not None and mask.dim() != 2:
        raise UnsupportedError("attention_mask has more than two dimensions")
    if loop.images is not None:
        if config.prefill_chunk_size:
            raise UnsupportedError("chunks of a prompt may cut an image")
    elif positions is not None and not _are_expected(positions, ids, mask):
        raise UnsupportedError("position_ids are not those of the tokens that attention_mask leaves")


def call_keys(loop: Loop) -> tuple[str, ...]:
    """Extra keys of a call: arguments that change KV without saying so in a token."""
    given = loop.model_kwargs.get("token_type_ids") is not None
    return ("token_type_ids",) if given else ()


def _are_expected(positions: torch.Tensor, input_ids: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether positions, `[..., batch, length]` of one or several axes, are those transformers gives to text."""
    if positions.shape[-1] != input_ids.shape[1]:
        return False
    if mask is None:
        return bool((positions == torch.arange(positions.shape[-1], device=positions.device)).all())
    expected = expected_positions(input_ids, mask)
    return bool((positions == expected.expand(positions.shape[:-2] + expected.shape)).all())


def expected_positions(input_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The positions transformers gives to a left-padded batch, `[batch, length]` int64."""
    ones = torch.ones_like(input_ids) if mask is None else mask.long()
    positions = ones.cumsum(-1) - 1
    return positions.masked_fill(ones == 0, 0)


def rope_keys(config: Any, prompt_lens: list[int], max_length: int) -> tuple[str, ...]:
    """Extra keys for rotary embeddings whose frequencies depend on the length of the sequence.

    "longrope" uses one set of frequencies up to the length the model was first trained at and another beyond,
    "dynamic" changes them with every length beyond it (transformers, modeling_rope_utils.dynamic_rope_update). A key
    rotated under one set must not be read under another.

    Raises:
        UnsupportedError: The frequencies would change during this call.
    """
    config = config.get_text_config(decoder=True)
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
        raise UnsupportedError(f"{kind} rotary embeddings change at a length which this call may cross", str(limit))
    return ()


def rope_types(config: Any) -> set[Any]:
    """The kinds of rotary embeddings of a model."""
    return {_rope_type(rope) for rope in _rope_parameters(config.get_text_config(decoder=True))}


def _rope_type(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type"))


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """The parameter dictionaries of rotary embeddings; some models have one per kind of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if any(isinstance(value, dict) for value in rope.values()):
        yield from (value for value in rope.values() if isinstance(value, dict))
    else:
        yield rope


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Eval mode for a while; every submodule gets its own mode back."""
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        yield
    finally:
        for m in training:
            m.training = True


def harmless_tokens(model: Any, count: int) -> np.ndarray:
    """Token ids that differ and stand for no image and no other placeholder, `[count]` int64."""
    config = model.config.get_text_config(decoder=True)
    special: set[int] = set()
    for c in (model.config, config):
        for name, value in vars(c).items():
            if name.endswith(("token_id", "token_index", "token_ids")):
                special |= {v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)}
    candidates = (np.arange(count + 4 * len(special) + 64, dtype=np.int64) * 7919 + 13) % config.vocab_size
    chosen: np.ndarray = candidates[~np.isin(candidates, list(special))][:count]
    return chosen
