"""What can be served: of a model once, when caching is enabled, and of a call, before its first token."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .api import (
    CACHE,
    CACHE_NAMES,
    CACHING,
    STOPS,
    DynamicCache,
    StoppingCriteriaList,
    StopStringCriteria,
    drop_cache,
    eos_tokens,
    has_own_generate,
    is_of_hub,
    keeps_dynamic_cache,
    need,
    prepared_config,
)
from .calls import UnsupportedError, refuse_if
from .images import Images

BY_TOKEN = ("greedy_search", "sample")
BY_TOKEN_OUTPUTS = ("output_attentions", "output_hidden_states")
OWN_CACHE = f"{CACHE} of your own"
CONTINUED = "_pc_continued"  # attribute by which a cache is known as the result of a served call

CHANGING_ROPE = ("dynamic", "longrope")
"""Rotary embeddings that change their own buffers with the length; `rope_keys` takes them into account."""

_OF_HUB = ("constraints", "force_words_ids", "penalty_alpha", "num_beam_groups", "dola_layers")
"""Settings that may choose a decoding loop of the hub."""

SERVED_ARGUMENTS = frozenset((
    *CACHE_NAMES, "attention_mask", "position_ids", "use_cache", "logits_to_keep", "return_dict",
    "output_attentions", "output_hidden_states", "output_router_logits", "cache_position", "token_type_ids",
    "mm_token_type_ids", "labels",
))  # fmt: skip
"""Arguments of the forward pass that generate makes itself, or that change nothing in a token's KV."""


class RecordedCriteria(StoppingCriteriaList):  # type: ignore[misc]  # transformers is untyped here
    """Stopping criteria that remember which rows have stopped."""

    finished: torch.Tensor | None = None
    _drops = False

    @classmethod
    def of(cls, loop: Loop) -> RecordedCriteria:
        """Those of a loop."""
        criteria, config = cls(loop.options["stopping_criteria"]), loop.generation_config
        # Rows that met an eos are padded from then on, so that only a caller who asked for logits sees theirs.
        seen = loop.own_processors or config.output_scores or config.output_logits
        criteria._drops = not seen and any(hasattr(c, "eos_token_id") for c in criteria)
        return criteria

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        """Which rows stop now, as transformers' own list says."""
        done = super().__call__(input_ids, scores, **kwargs)
        self.finished = done if self.finished is None else self.finished | done
        return done

    def dropped(self, num_rows: int) -> list[bool]:
        """Of each row whether it has stopped, so that what is computed of it from now on is not seen."""
        if not self._drops or self.finished is None:
            return [False] * num_rows
        finished: list[bool] = self.finished.tolist()
        return finished


@dataclass
class Loop:
    """One call of generate at the moment when its loop would begin."""

    function: Callable[..., Any]  # `GenerationMixin._sample` or another
    mode: str  # its name, as `GenerationMode` has it
    model: Any
    input_ids: torch.Tensor  # [batch, length], rows repeated for beams and several answers
    generation_config: Any  # as prepared
    options: dict[str, Any]  # other arguments of the loop
    model_kwargs: dict[str, Any]  # arguments of the forward pass; the cache is among them, no output of a vision tower
    own_processors: bool  # whether the caller gave logits processors
    images: Images | None = None  # what was taken out of the arguments
    adapters: list[str] | None = None  # PEFT's of each row, where the caller named them
    keys: tuple[Any, ...] = ()  # what KV depends on besides tokens
    salt: Any = None  # whose blocks may be shared
    returns: float | None = None  # probability that the conversation goes on soon
    unchanged: Callable[[], bool] = lambda: True  # whether the model is what `keys` stand for
    answered: bool = False  # whether the loop has the logits of its first token

    def run(self, model: Any = None, options: dict[str, Any] | None = None, **inputs: Any) -> Any:
        """The loop over `model`, the model itself where none is given, with some options and inputs replaced."""
        return self.function(
            self.model if model is None else model,
            self.input_ids,
            generation_config=self.generation_config,
            **self.options | (options or {}),
            **self.model_kwargs | inputs,
        )

    def run_over(self, model: Any, criteria: RecordedCriteria) -> Any:
        """The loop over what stands in the model's place and keeps its keys and values itself."""
        result = self.run(model, {"stopping_criteria": criteria})
        drop_cache(result)  # the empty one that transformers made
        return result

    @functools.cached_property
    def mask(self) -> torch.Tensor | None:
        """`[batch, length]`; None where no token is left out."""
        mask = self.model_kwargs.get("attention_mask")
        return None if mask is None or bool(mask.all()) else mask

    @property
    def requested_outputs(self) -> dict[str, Any]:
        """What of every token the caller wants to see: hidden states, attention weights."""
        config = self.generation_config
        wanted = {n: getattr(config, n, None) or self.model_kwargs.get(n) for n in BY_TOKEN_OUTPUTS}
        return {name: value for name, value in wanted.items() if value and config.return_dict_in_generate}

    @property
    def by_token(self) -> bool:
        """Whether it computes each row that the caller gave token by token."""
        return self.mode in BY_TOKEN and self.repeats == 1

    @property
    def by_row(self) -> bool:
        """Whether its result has a row for each row of the cache."""
        return self.mode in (*BY_TOKEN, "assisted_generation")

    @property
    def repeats(self) -> int:
        """How often each row that the caller gave stands in `input_ids`."""
        return max(self.generation_config.num_beams or 1, self.generation_config.num_return_sequences or 1)

    @property
    def cache_name(self) -> str:
        """The name under which the model's forward takes its cache."""
        return next((name for name in CACHE_NAMES if name in self.model_kwargs), CACHE)

    @property
    def cache(self) -> Any:
        """The cache that transformers made, or the caller gave."""
        return self.model_kwargs.get(self.cache_name)

    @property
    def continued(self) -> Any:
        """The result of an earlier call that it goes on with in place of blocks, if it does."""
        return self.cache if hasattr(self.cache, CONTINUED) else None

    def continued_state(self) -> list[tuple[Any, dict[str, Any]]]:
        """What the layers of a cache are that the call goes on with, for `restore_continued`."""
        cache = self.continued
        return [] if cache is None else [(layer, dict(vars(layer))) for layer in cache.layers]

    @staticmethod
    def restore_continued(state: list[tuple[Any, dict[str, Any]]]) -> None:
        """Leaves out what a call has put into the layers: buffers are only written behind what they hold."""
        for layer, attributes in state:
            vars(layer).clear()
            vars(layer).update(attributes)

    @property
    def eos(self) -> list[int]:
        """Tokens that end an answer."""
        return eos_tokens(self.generation_config)


def check_model(model: Any) -> None:
    """Raises UnsupportedError for a model whose KV cannot be cached by prefix; says why."""
    need(CACHING)
    config = model.config
    refuse_if(has_own_generate(model), "it has a generate of its own")
    refuse_if(getattr(config, "is_encoder_decoder", False), "it is an encoder-decoder model")
    refuse_if(not keeps_dynamic_cache(model), "its state is not kept in a transformers cache")
    refuse_if(any(p.device.type == "meta" for p in model.parameters()), "some of its weights are on the meta device")


def check_arguments(arguments: dict[str, Any]) -> None:
    """Raises UnsupportedError for arguments of generate under which nothing of a call can be cached."""
    for name in ("custom_generate", "synced_gpus"):
        refuse_if(arguments.get(name), f"{name}")
    given = [arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None]
    refuse_if(not all(getattr(cache, CONTINUED, None) is not None for cache in given), OWN_CACHE)
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    refuse_if(initialized and torch.distributed.get_world_size() > 1, "several processes generate together")


def take_stop_strings(model: Any, arguments: dict[str, Any]) -> None:
    """Turns `stop_strings` and `tokenizer` into a criterion: generate drops the tokenizer of a custom decoding loop."""
    # UnsupportedError: they stand in a generation config, or the tokenizer is needed for more.
    configs = [c for c in (arguments.get("generation_config"), model.generation_config) if c is not None]
    if arguments.get("token_healing") or any(getattr(c, "token_healing", False) for c in configs):
        raise UnsupportedError("token healing")
    refuse_if(any(getattr(c, "stop_strings", None) for c in configs), "stop_strings of a generation config")
    if arguments.get("stop_strings") and arguments.get("tokenizer") is not None:
        need(STOPS)
        criterion = StopStringCriteria(arguments["tokenizer"], arguments.pop("stop_strings"))
        arguments["stopping_criteria"] = StoppingCriteriaList([*(arguments.get("stopping_criteria") or ()), criterion])


def ask_for_cache(model: Any, arguments: dict[str, Any]) -> None:
    """Turns the cache on where the model's own defaults leave it out, as MPT's do, and the caller says nothing."""
    own = arguments.get("generation_config")
    if arguments.get("use_cache") is None and getattr(own, "use_cache", None) is None:
        configs = (model.generation_config, model.config.get_text_config(decoder=True))
        if any(getattr(config, "use_cache", None) is False for config in configs):
            arguments["use_cache"] = True


def check_mode(model: Any, arguments: dict[str, Any]) -> None:
    """Raises UnsupportedError for a decoding loop that transformers takes from the hub."""
    own = arguments.get("generation_config")
    configs = [vars(c) for c in (own, model.generation_config) if c is not None]
    if any(known.get(name) is not None for known in (arguments, *configs) for name in _OF_HUB):
        given = {name: value for name, value in arguments.items() if name in vars(model.generation_config)}
        mode = prepared_config(model, own, **given).get_generation_mode(arguments.get("assistant_model"))
        refuse_if(is_of_hub(mode), f"generation mode {mode.value}")


def check_loop(loop: Loop) -> None:
    """Raises UnsupportedError for a call whose tokens could differ from those of the model's own generate."""
    model, kwargs, config = loop.model, loop.model_kwargs, loop.generation_config
    prepare = vars(model).get("prepare_inputs_for_generation", type(model).prepare_inputs_for_generation)
    if not str(getattr(prepare, "__module__", "")).startswith("transformers."):
        raise UnsupportedError("prepare_inputs_for_generation is overridden")
    refuse_if(model.training, "the model is in training mode; call model.eval()")
    if torch.is_autocast_enabled(model.device.type):
        raise UnsupportedError("autocast is on, and keys and values would not be those computed without it")
    refuse_if(not kwargs.get("use_cache", True), "use_cache=False asks for no cache")
    if config.cache_implementation is not None:
        raise UnsupportedError("cache_implementation asks for another cache", config.cache_implementation)
    refuse_if(type(kwargs.get(loop.cache_name)) is not DynamicCache, "its state is not kept in a transformers cache")
    encoded = kwargs.get("mm_encoder_outputs")
    given = [k for k, v in kwargs.items() if v is not None and not (v is encoded and not any((v or {}).values()))]
    other = sorted(set(given) - SERVED_ARGUMENTS)
    refuse_if(other, f"arguments that could change what a token's KV is: {', '.join(other)}")
    types = [kwargs[k] for k in ("token_type_ids", "mm_token_type_ids") if kwargs.get(k) is not None]
    if loop.images is None and any(bool(t.any()) for t in types):
        raise UnsupportedError("token types could change what a token's KV is")
    ids, mask, positions = loop.input_ids, kwargs.get("attention_mask"), kwargs.get("position_ids")
    refuse_if(ids.dim() != 2 or ids.shape[1] == 0, "input_ids hold no prompt", f"shape {list(ids.shape)}")
    refuse_if(mask is not None and mask.dim() != 2, "attention_mask has more than two dimensions")
    if loop.images is not None:
        if config.prefill_chunk_size:
            raise UnsupportedError("chunks of a prompt may cut an image")
    elif positions is not None and not _are_expected(positions, ids, mask):
        raise UnsupportedError("position_ids are not those of the tokens that attention_mask leaves")


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
        if kind not in CHANGING_ROPE:
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


def changing_rope(config: Any) -> str | None:
    """The kind of a model's rotary embeddings that change with the length, None where none do."""
    kinds = {_rope_type(rope) for rope in _rope_parameters(config.get_text_config(decoder=True))}
    return next((kind for kind in CHANGING_ROPE if kind in kinds), None)


def _rope_type(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type"))


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """The parameter dictionaries of rotary embeddings; some models have one per kind of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if any(isinstance(value, dict) for value in rope.values()):
        yield from (value for value in rope.values() if isinstance(value, dict))
    else:
        yield rope


def float32_precision() -> tuple[str, ...]:
    """Return the precisions that torch may compute float32 in, whichever of its two interfaces has set them."""
    backends: Any = torch.backends
    places = [backends, backends.mkldnn, backends.mkldnn.matmul, backends.mkldnn.conv]
    places += [backends.cuda.matmul, backends.cudnn, backends.cudnn.conv]
    return tuple(str(getattr(place, "fp32_precision", None)) for place in places)


def modeling_globals(model: torch.nn.Module) -> list[dict[str, Any]]:
    """The globals of the files that define the forwards of a model's modules, each once."""
    found = [getattr(inspect.unwrap(kind.forward), "__globals__", {}) for kind in {type(m) for m in model.modules()}]
    return list({id(names): names for names in found}.values())


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
