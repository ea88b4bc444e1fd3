"""A call of generate as transformers has prepared it, and the checks that decide whether it can be served."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .api import (
    CACHE,
    CACHE_NAMES,
    STOPS,
    DynamicCache,
    StoppingCriteriaList,
    StopStringCriteria,
    intercepts_operations,
    is_of_hub,
    keeps_parametrized,
    need,
    prepared_config,
)
from .calls import UnsupportedError, refuse_if
from .images import Images
from .support import check_processes, precision_keys

BY_TOKEN = ("greedy_search", "sample")
BY_TOKEN_OUTPUTS = ("output_attentions", "output_hidden_states")
OWN_CACHE = f"{CACHE} of your own"
ANOTHER_CACHE = "cache_implementation asks for another cache"
_WITH_CACHE = ("assistant_early_exit", "assistant_model", "prefill_chunk_size", "prompt_lookup_num_tokens", "use_mtp")
CONTINUED = "_pc_continued"  # attribute that marks a cache as the result of a served call

_OF_HUB = ("constraints", "force_words_ids", "penalty_alpha", "num_beam_groups", "dola_layers")
"""Settings that may select a decoding loop from the hub."""

SERVED_ARGUMENTS = frozenset((
    *CACHE_NAMES, "attention_mask", "position_ids", "use_cache", "logits_to_keep", "return_dict",
    "output_attentions", "output_hidden_states", "output_router_logits", "cache_position", "token_type_ids",
    "mm_token_type_ids", "labels",
))  # fmt: skip
"""Arguments of the forward pass with which a call is served: generate makes them, or KV does not depend on them."""


@dataclass
class Loop:
    """One call of generate, just before its decoding loop starts."""

    function: Callable[..., Any]  # `GenerationMixin._sample` or another
    mode: str  # the loop's name in `GenerationMode`
    model: Any
    input_ids: torch.Tensor  # [batch, length], rows repeated for beams and several answers
    generation_config: Any  # as prepared by generate
    options: dict[str, Any]  # other arguments of the loop
    model_kwargs: dict[str, Any]  # arguments of the forward pass, with the cache but without outputs of a vision tower
    own_processors: bool  # whether the caller passed logits processors
    images: Images | None = None  # removed from the arguments
    adapters: list[str] | None = None  # PEFT adapter of each row, if the caller named adapters
    extra_keys: tuple[Any, ...] = ()  # all that KV depends on besides tokens
    salt: Any = None  # only calls with an equal salt share blocks
    returns: float | None = None  # probability that the conversation resumes soon
    unchanged: Callable[[], bool] = lambda: True  # returns whether the model still has these `extra_keys`
    answered: bool = False  # whether the first token's logits were computed

    def run(self, model: Any = None, options: dict[str, Any] | None = None, **inputs: Any) -> Any:
        """Run the loop and return its result. Arguments replace the loop's model and some of its options and inputs."""
        return self.function(
            self.model if model is None else model,
            self.input_ids,
            generation_config=self.generation_config,
            **self.options | (options or {}),
            **self.model_kwargs | inputs,
        )

    def stream_prompt(self) -> None:
        """Give the prompt to the caller's streamer, if there is one, as generate does before it runs its own loop."""
        if "streamer" in self.options:
            self.options["streamer"].put(self.input_ids.cpu())

    @functools.cached_property
    def mask(self) -> torch.Tensor | None:
        """The attention mask `[batch, length]`; None if it masks no token."""
        mask = self.model_kwargs.get("attention_mask")
        return None if mask is None or bool((mask == 1).all()) else mask

    @functools.cached_property
    def requested_outputs(self) -> dict[str, Any]:
        """The outputs of each token that the caller asked for, such as hidden states and attention weights."""
        config = self.generation_config
        wanted = {n: getattr(config, n, None) or self.model_kwargs.get(n) for n in BY_TOKEN_OUTPUTS}
        return {name: value for name, value in wanted.items() if value and config.return_dict_in_generate}

    @functools.cached_property
    def by_token(self) -> bool:
        """Whether the loop is greedy search or sampling, with one row for each row of the caller."""
        return self.mode in BY_TOKEN and self.repeats == 1

    @functools.cached_property
    def by_row(self) -> bool:
        """Whether the result has a row for each row of the cache."""
        return self.mode in (*BY_TOKEN, "assisted_generation")

    @property
    def has_types(self) -> bool:
        """Whether a call without images has token types. Only the loop's own passes then hand them to the model."""
        return self.images is None and self.model_kwargs.get("token_type_ids") is not None

    @functools.cached_property
    def repeats(self) -> int:
        """The number of rows in `input_ids` for each row of the caller."""
        return max(self.generation_config.num_beams or 1, self.generation_config.num_return_sequences or 1)

    @functools.cached_property
    def cache_name(self) -> str:
        """The argument name of the cache in the model's forward pass."""
        return next((name for name in CACHE_NAMES if name in self.model_kwargs), CACHE)

    @property
    def cache(self) -> Any:
        """The cache that transformers made or the caller passed."""
        return self.model_kwargs.get(self.cache_name)

    @functools.cached_property
    def continued(self) -> Any:
        """The cache of an earlier result that this call continues, or None."""
        return self.cache if hasattr(self.cache, CONTINUED) else None

    def continued_state(self) -> list[tuple[Any, dict[str, Any]]]:
        """Return the state of the layers of a continued cache, for `restore_continued`."""
        cache = self.continued
        return [] if cache is None else [(layer, dict(vars(layer))) for layer in cache.layers]

    @staticmethod
    def restore_continued(state: list[tuple[Any, dict[str, Any]]]) -> None:
        """Restore the layers of a continued cache. Calls only append, so the buffers still hold the earlier tokens."""
        for layer, attributes in state:
            vars(layer).clear()
            vars(layer).update(attributes)


def check_arguments(arguments: dict[str, Any]) -> None:
    """Raise UnsupportedError if arguments of generate exclude the call from the cache."""
    refuse_if(arguments.get("custom_generate") is not None, "custom_generate")
    refuse_if(arguments.get("synced_gpus"), "synced_gpus")
    if arguments.get("cache_implementation") == "paged":  # generate then runs generate_batch and no decoding loop
        raise UnsupportedError(ANOTHER_CACHE, "paged")
    given = [arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None]
    refuse_if(not all(getattr(cache, CONTINUED, None) is not None for cache in given), OWN_CACHE)
    check_processes()


def take_stop_strings(model: Any, arguments: dict[str, Any]) -> None:
    """Replace `stop_strings` by a stopping criterion, because generate does not pass the tokenizer to a custom loop.

    Raises:
        UnsupportedError: A generation config has stop strings, or the tokenizer is needed for token healing.
    """
    configs = [c for c in (arguments.get("generation_config"), model.generation_config) if c is not None]
    if arguments.get("token_healing") or any(getattr(c, "token_healing", False) for c in configs):
        raise UnsupportedError("token healing")
    refuse_if(any(getattr(c, "stop_strings", None) for c in configs), "stop_strings of a generation config")
    if arguments.get("stop_strings") and arguments.get("tokenizer") is not None:
        need(STOPS)
        criterion = StopStringCriteria(arguments["tokenizer"], arguments.pop("stop_strings"))
        arguments["stopping_criteria"] = StoppingCriteriaList([*(arguments.get("stopping_criteria") or ()), criterion])


def ask_for_cache(model: Any, arguments: dict[str, Any]) -> None:
    """Set `use_cache` if the model's defaults disable the cache, as MPT's do, and the caller says nothing about it.

    A call stays as it is if it wants another kind of cache, because then it falls back. It also stays as it is if it
    wants the outputs of every step, because without a cache these have all tokens. Assisted decoding and chunked
    prefill raise the errors of the model's own generate, which needs a cache for them.
    """
    own, default = arguments.get("generation_config"), model.generation_config
    if arguments.get("use_cache") is not None or getattr(own, "use_cache", None) is not None:
        return
    for name in ("cache_implementation", *_WITH_CACHE, *BY_TOKEN_OUTPUTS):
        if arguments.get(name) or getattr(own, name, None) or getattr(default, name, None):
            return
    if any(getattr(each, "use_cache", None) is False for each in (default, model.config.get_text_config(decoder=True))):
        arguments["use_cache"] = True


def check_mode(model: Any, arguments: dict[str, Any]) -> None:
    """Raise UnsupportedError for a decoding loop that transformers loads from the hub."""
    own = arguments.get("generation_config")
    configs = [vars(c) for c in (own, model.generation_config) if c is not None]
    if any(known.get(name) is not None for known in (arguments, *configs) for name in _OF_HUB):
        given = {name: value for name, value in arguments.items() if name in vars(model.generation_config)}
        mode = prepared_config(model, own, **given).get_generation_mode(arguments.get("assistant_model"))
        refuse_if(is_of_hub(mode), f"generation mode {mode.value}")


def changed_by_torch(model: Any) -> str:
    """Return why torch may compute other keys and values on this thread than the model alone; "" if it does not."""
    if torch.is_autocast_enabled(model.device.type):
        return "autocast is on, which changes keys and values"
    if keeps_parametrized(model):
        return "torch.nn.utils.parametrize.cached() keeps weights as they were"
    return "a mode of torch intercepts operations and may change them" if intercepts_operations() else ""


def watch_torch(model: Any) -> Callable[[], bool]:
    """Return a function that returns whether torch computes a model's keys and values on this thread as it does now."""
    precision = precision_keys(model)
    return lambda: not changed_by_torch(model) and precision_keys(model) == precision


def check_loop(loop: Loop) -> None:
    """Raise UnsupportedError for a call whose tokens could differ from those of the model's own generate."""
    model, kwargs, config = loop.model, loop.model_kwargs, loop.generation_config
    prepare = vars(model).get("prepare_inputs_for_generation", type(model).prepare_inputs_for_generation)
    module = getattr(prepare, "__globals__", {}).get("__name__")  # not `__module__`, which functools.wraps copies
    if not str(module).startswith("transformers."):
        raise UnsupportedError("prepare_inputs_for_generation is overridden")
    refuse_if(model.training, "the model is in training mode; call model.eval()")
    refuse_if(model.device.type == "meta", "some of its weights are on the meta device")
    if reason := changed_by_torch(model):
        raise UnsupportedError(reason)
    refuse_if(not kwargs.get("use_cache", True), "use_cache=False asks for no cache")
    if config.cache_implementation is not None:
        raise UnsupportedError(ANOTHER_CACHE, config.cache_implementation)
    refuse_if(isinstance(config.max_length, float), "max_length is a float")
    refuse_if(type(kwargs.get(loop.cache_name)) is not DynamicCache, "its state is not kept in a transformers cache")
    encoded = kwargs.get("mm_encoder_outputs")
    given = [k for k, v in kwargs.items() if v is not None and not (v is encoded and not any((v or {}).values()))]
    other = sorted(set(given) - SERVED_ARGUMENTS)
    refuse_if(other, f"arguments that could change a token's KV: {', '.join(other)}")
    types = [kwargs[k] for k in ("token_type_ids", "mm_token_type_ids") if kwargs.get(k) is not None]
    if loop.images is None and any(bool(t.any()) for t in types):
        raise UnsupportedError("token types could change a token's KV")
    ids, mask, positions = loop.input_ids, kwargs.get("attention_mask"), kwargs.get("position_ids")
    refuse_if(ids.dim() != 2 or ids.shape[1] == 0, "input_ids hold no prompt", f"shape {list(ids.shape)}")
    refuse_if(mask is not None and mask.dim() != 2, "attention_mask has more than two dimensions")
    if loop.mask is not None:
        others = (loop.mask != 0) & (loop.mask != 1)  # transformers adds the values up to positions
        refuse_if(bool(others.any()), "attention_mask has values other than 0 and 1")
    if loop.images is not None:
        if config.prefill_chunk_size:
            raise UnsupportedError("chunks of a prompt may cut an image")
    elif positions is not None and not _are_expected(positions, ids, mask):
        raise UnsupportedError("position_ids differ from those that transformers derives from attention_mask")


def _are_expected(positions: torch.Tensor, input_ids: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Return whether positions `[..., batch, length]` are those that transformers assigns to text."""
    if positions.shape[-1] != input_ids.shape[1]:
        return False
    if mask is None:
        return bool((positions == torch.arange(positions.shape[-1], device=positions.device)).all())
    expected = expected_positions(input_ids, mask)
    return bool((positions == expected.expand(positions.shape[:-2] + expected.shape)).all())


def expected_positions(input_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the positions that transformers assigns to a left-padded batch, `[batch, length]` int64."""
    ones = torch.ones_like(input_ids) if mask is None else mask.long()
    positions = ones.cumsum(-1) - 1
    return positions.masked_fill(ones == 0, 0)
