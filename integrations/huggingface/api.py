"""Every private name of transformers that this adapter uses, and every name that depends on the version.

No other file of the adapter imports a submodule of transformers or names a private attribute. A feature is served if
the installed transformers has what `NAMES` declares for it; see `pc.integrations.seam` for the format.

- `look` checks all names. It runs when a handle is made.
- `need` raises an UnsupportedError if the installed transformers cannot serve a feature. The call then falls back.
- `CLASSES` are the classes of `NAMES`, and some more, which other files import from here. A class that transformers
  lacks is imported as an empty class, so that importing a module does not fail before its feature is refused.

To use another name of transformers, add it to `NAMES` under the feature that needs it, and add a plain function here.
`python -m pc.integrations.huggingface` checks `NAMES` against the installed transformers.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .. import seam
from ..tested import TESTED, release, text_of
from .calls import UnsupportedError, callers_level, refuse_if

CACHING = "prefix caching"
ASSISTED = "assisted decoding"
CHUNKS = "chunked prefill"
STATES = "recurrent states"
SPARSE = "sparse attention"
IMAGES = "images"
STOPS = "stop strings"
PACKED = "packed passes"

NAMES: dict[str, dict[str, str]] = {
    CACHING: {
        "transformers.generation.utils": (
            "GENERATION_MODES_MAPPING GenerateDecoderOnlyOutput(sequences scores logits attentions hidden_states ...)"
        ),
        "transformers.generation.utils:GenerationMixin": (
            "generate(inputs generation_config logits_processor stopping_criteria synced_gpus assistant_model "
            "streamer custom_generate ...) "
            "_sample(input_ids logits_processor stopping_criteria generation_config ...) "
            "_beam_search(input_ids logits_processor stopping_criteria generation_config ...) "
            "_prefill(input_ids generation_config model_kwargs ...) "
            "prepare_inputs_for_generation(input_ids next_sequence_length attention_mask is_first_iteration ...) "
            "_prepare_generation_config(generation_config) "
            "_prepare_position_ids_for_generation(inputs_tensor model_kwargs) "
            "_supports_default_dynamic_cache _supports_logits_to_keep() "
            "_validate_generation_mode(generation_mode generation_config generation_mode_kwargs)"
        ),
        "transformers.generation.configuration_utils:GenerationConfig": "get_generation_mode(assistant_model)",
        "transformers.generation.stopping_criteria:StoppingCriteriaList": "__call__(input_ids scores)",
        "transformers.modeling_outputs": "CausalLMOutputWithPast(logits)",
        "transformers.cache_utils:Cache": "__init__(layers layer_class_to_replicate) layers",
        "transformers.cache_utils:DynamicCache": "__init__(config)",
        "transformers.cache_utils:CacheLayerMixin": "get_seq_length() keys values is_initialized",
        "transformers.cache_utils:DynamicLayer": (
            "update(key_states value_states) lazy_initialization(key_states value_states) crop "
            "reorder_cache(beam_idx) batch_repeat_interleave(repeats) batch_select_indices(indices) is_sliding"
        ),
        "transformers.cache_utils:DynamicSlidingWindowLayer": (
            "__init__(sliding_window) update(key_states value_states) sliding_window cumulative_length"
        ),
    },
    ASSISTED: {
        "transformers.generation.utils:GenerationMixin": (
            "_assisted_decoding(input_ids logits_processor stopping_criteria generation_config ...)"
        ),
        "transformers.cache_utils:Cache": "activate_past_recording()",
        "transformers.cache_utils:DynamicLayer": "crop(tokens_to_remove)",
        "transformers.cache_utils:DynamicSlidingWindowLayer": "crop(tokens_to_remove) record_past",
    },
    CHUNKS: {"transformers.generation.configuration_utils:GenerationConfig": "_mask_length"},
    STATES: {
        "transformers.cache_utils:LinearAttentionCacheLayerMixin": (
            "__init__(number_of_states) conv_states recurrent_states has_previous_state"
        ),
        "transformers.cache_utils:LinearAttentionLayer": (
            "update_conv_state(conv_states state_idx) update_recurrent_state(recurrent_states state_idx)"
        ),
        "transformers.cache_utils:LinearAttentionAndFullAttentionLayer": "__init__(number_of_states)",
    },
    SPARSE: {"transformers.cache_utils:DynamicIndexedLayer": "update_indexer(indexer_key_states)"},
    IMAGES: {
        "transformers.generation.utils:GenerationMixin": (
            "_supports_mm_encoder_outputs() _prepare_multimodal_encoder_kwargs_for_generation(model_kwargs) "
            "_expand_multimodal_outputs(input_ids mm_encoder_output expand_size)"
        ),
        "transformers.modeling_utils:PreTrainedModel": "input_modalities",
    },
    STOPS: {"transformers.generation.stopping_criteria": "StopStringCriteria(tokenizer stop_strings)"},
    PACKED: {
        "transformers.modeling_utils": (
            "ALL_ATTENTION_FUNCTIONS AttentionInterface.get_interface(attn_implementation default)"
        ),
        "transformers.modeling_utils:PreTrainedModel": "_supports_attention_backend",
        "transformers.cache_utils:Cache": "update(key_states value_states layer_idx)",
    },
}
"""For each feature the names that the adapter uses. Without `CACHING` no model is served."""
OLDEST_CHUNKS = (5, 21)
"""The first release whose chunked prefill begins behind the cached tokens. Earlier ones computed them again."""

# Continuous batching is checked when it is enabled, because its modules take long to import.
BATCHING = "continuous batching"
OLDEST_BATCHING = (5, 19)
PACKAGE = "transformers.generation.continuous_batching."

_CONFIGS = "generation_config continuous_batching_config workload_hints"
_MODULES = {
    "cache": "PagedAttentionCache",
    "continuous_api:ContinuousMixin": f"init_continuous_batching({_CONFIGS})",
    "continuous_api:ContinuousBatchingManager": (
        f"__init__(model {_CONFIGS}) switch_to_cb_friendly_attn(model auto_switch_to_flash) start() "
        "_create_batch_processor()"
    ),
    "continuous_api:ContinuousBatchProcessor": (
        "__init__(cache config generation_config continuous_batching_config logit_processor input_queue cancel_queue "
        "output_router background_thread_status model_device model_dtype scheduler distributed_helper) "
        "prepare_next_batch() _generation_step(model) _handle_request_error(error state)"
    ),
    "continuous_api:OutputRouter": "fail_and_deliver(state error)",
    "initialization": "update_cb_config_after_cache_creation(cb_config num_blocks max_batch_tokens)",
    "input_outputs:ContinuousBatchingIOs": "get_model_kwargs(use_padding) retrieve_device_outputs()",
    "model_runner:ModelRunner": "compute_batch(model batch_data)",
    "offloading_manager:OffloadingManager": "offload_requests()",
    "requests:RequestState": "current_len() create_equivalent_initial_request()",
    "scheduler:Scheduler": (
        "__init__(cache safety_margin max_requests_per_batch) add_waiting_request(state) finish_request(request_id)"
    ),
}
BATCHING_NAMES = {PACKAGE + holder: members for holder, members in _MODULES.items()}
"""The names that continuous batching uses."""

REPLACED = (
    *("init_continuous_batching", "switch_to_cb_friendly_attn", "start", "_create_batch_processor"),
    *("prepare_next_batch", "_generation_step", "offload_requests", "create_equivalent_initial_request"),
)
"""Methods among them that this package replaces. Transformers may call these with every parameter that they take."""

UNUSED = frozenset({"update", "fill_block_table", "get_cache_for_block_table", "get_block_table_key"})
"""Methods through which attention reads transformers' own paged cache. Here attention reads blocks instead."""

CLASSES = seam.paths([*NAMES.values(), BATCHING_NAMES]) | {
    "ContinuousBatchingConfig": "transformers.generation.configuration_utils:ContinuousBatchingConfig",
    "DummyLayer": "transformers.cache_utils:DummyLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer": (
        "transformers.cache_utils:LinearAttentionAndSlidingWindowAttentionLayer"
    ),
}
"""Names that other files may import from here, and their paths in transformers: those of the tables, and some more."""


def __getattr__(name):  # type: ignore[no-untyped-def]  # untyped, so that mypy accepts imported names as classes
    """Return the class of `CLASSES` with this name, or an empty class if the installed transformers lacks it."""
    if name not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = seam.find_or_stand_in(CLASSES[name])
    return found


# Which features the installed transformers can serve


@dataclass(frozen=True)
class Framework:
    """The installed transformers, as it was when a handle was made.

    Attributes:
        version: Its version.
        disabled: The reason for each feature that the installed transformers cannot serve.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from pc.integrations.huggingface import enable_prefix_caching
        >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
        >>> handle = enable_prefix_caching(model, num_blocks=64)
        >>> "prefix caching" in handle.framework.disabled
        False
    """

    version: str
    disabled: dict[str, str] = field(default_factory=dict)


_last = Framework("")


def look() -> Framework:
    """Check every name in `NAMES` against the installed transformers and return the result."""
    global _last
    version = str(importlib.import_module("transformers").__version__)  # a lazy module, which may be replaced
    reasons = {feature: seam.missing(table) for feature, table in NAMES.items()}
    disabled = {
        feature: f"{'; '.join(found)}, in transformers {version}" for feature, found in reasons.items() if found
    }
    if release(version)[:2] < OLDEST_CHUNKS:
        disabled.setdefault(CHUNKS, f"needs {text_of(OLDEST_CHUNKS)} or newer, got transformers {version}")
    _last = Framework(version, disabled)
    return _last


def need(feature: str) -> None:
    """Raise an UnsupportedError if the installed transformers cannot serve a feature."""
    if feature in _last.disabled:
        raise UnsupportedError(f"{feature} needs another transformers", _last.disabled[feature])


# Names of the cache. Version 5.24 renamed `past_key_values` and `cache_params` to `cache`.

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Names of a cache as an argument or in a result, the newest first."""
_RESULT = seam.find_or_stand_in("transformers.generation.utils:GenerateDecoderOnlyOutput")
CACHE = "cache" if "cache" in getattr(_RESULT, "__dataclass_fields__", {}) else "past_key_values"
"""The name of the cache in a result of generate."""
RENAMES = CACHE == "cache"
"""Whether transformers itself accepts the older names and renames them."""


def cache_argument(model: Any) -> str:
    """Return the argument name of the cache in a model's generate and forward pass."""
    return next((n for n in CACHE_NAMES[1:] if not RENAMES and takes(model.forward, n)), CACHE)


def takes_cache(forward: Any) -> bool:
    """Return whether a forward pass takes a cache, under any of its names."""
    return any(takes(forward, name) for name in CACHE_NAMES)


def takes(function: Any, name: str) -> bool:
    """Return whether a function has a parameter of this name."""
    return name in inspect.signature(function).parameters


def result_cache(result: Any) -> Any:
    """Return the cache in a result of generate, or None if it has none."""
    return getattr(result, CACHE, None)


def drop_cache(result: Any) -> None:
    """Remove the cache from a result of generate, if it has one."""
    if result_cache(result) is not None:
        setattr(result, CACHE, None)
        OrderedDict.__delitem__(result, CACHE)  # None leaves the entry, and a result refuses del


def rename_cache(model: Any, arguments: dict[str, Any]) -> None:
    """Rename an older name of the cache in generate's arguments, with the same FutureWarning that generate gives."""
    # The warning of generate itself would blame a line of this library.
    for name in CACHE_NAMES[1:] if RENAMES else ():
        if name in arguments and CACHE not in arguments:
            arguments[CACHE] = arguments.pop(name)
            where = f"{type(model).__name__}.generate"
            text = f"`{name}` is deprecated and will be removed in version 6.0.0 for `{where}`. Use `{CACHE}` instead."
            warnings.warn(text, FutureWarning, stacklevel=callers_level())


def length_behind_crop(length: int, argument: int) -> int:
    """Return how many of its `length` tokens a cache layer keeps after `crop(argument)`, as transformers defines it."""
    # A positive argument is the number of tokens to keep in older versions of transformers.
    if argument > 0 and takes(seam.find("transformers.cache_utils:DynamicLayer.crop"), "tokens_to_remove"):
        raise ValueError(f"tokens_to_remove: got {argument}, needs a negative number of tokens, or 0")
    return length + argument if argument <= 0 else min(length, argument)


# A call of generate and its decoding loop


def has_own_generate(model: Any) -> bool:
    """Return whether a model's class overrides generate or the sampling loop."""
    mixin = seam.find(CLASSES["GenerationMixin"])
    return type(model).generate is not mixin.generate or type(model)._sample is not mixin._sample


def keeps_dynamic_cache(model: Any) -> bool:
    """Return whether generate makes a `DynamicCache` for a model."""
    return bool(model._supports_default_dynamic_cache())


def keeps_logits(model: Any) -> bool:
    """Return whether a model's forward pass can compute the logits of the last token only."""
    return bool(model._supports_logits_to_keep())


def prepared_config(model: Any, given: Any, **options: Any) -> Any:
    """Return the generation config of a call, updated with the options that were passed as arguments."""
    config, _ = model._prepare_generation_config(given, **options)
    return config


def is_of_hub(mode: Any) -> bool:
    """Return whether the loop of a generation mode is code from the hub."""
    return "/" in _loops()[mode]


def loop_of(model: Any, mode: Any) -> Callable[..., Any]:
    """Return the decoding loop of a generation mode. Its first argument is the model."""
    return getattr(type(model), _loops()[mode])  # type: ignore[no-any-return]


def _loops() -> dict[Any, str]:
    loops: dict[Any, str] = seam.find("transformers.generation.utils:GENERATION_MODES_MAPPING")
    return loops


def check_mode(model: Any, mode: Any, config: Any, options: dict[str, Any]) -> None:
    """Raise the error of generate if a generation mode does not allow a config and options."""
    model._validate_generation_mode(mode, config, options)


def eos_tokens(config: Any) -> list[int]:
    """Return the end-of-sequence tokens in a config that generate has prepared."""
    tokens = getattr(config, "_eos_token_tensor", None)
    return [] if tokens is None else tokens.flatten().tolist()


def positions(model: Any, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the positions that generate assigns to tokens under a mask."""
    found: torch.Tensor = model._prepare_position_ids_for_generation(input_ids, {"attention_mask": mask})
    return found


class ModelInLoop:
    """A model as a decoding loop sees it. Methods that a subclass does not override are the model's own.

    Subclasses override `compute` and `prefill`, and may override `drafts_from_outputs`. This class sets
    `answered` of the `Loop` once the first token's logits are computed. Before that, the call can start again.
    """

    def __init__(self, loop: Any) -> None:
        self._loop, self._model, self._prefilling = loop, loop.model, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `compute` for the decoding loop, and record that the first token is computed."""
        outputs = self.compute(*args, **kwargs)
        self._loop.answered |= not self._prefilling
        return outputs

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Run one forward pass of the model and return its output. Subclasses replace this."""
        return self._model(*args, **kwargs)

    def _prefill(self, *args: Any, **kwargs: Any) -> Any:
        refuse_if("_prefill" in vars(self._model), "_prefill is overridden")
        # The loop has the whole sequence. A forward pass without a mask learns that from here when it cuts the prompt.
        self._loop.generation_config._mask_length = self._loop.input_ids.shape[1]
        self._prefilling = True
        outputs = self.prefill(*args, **kwargs)
        self._prefilling, self._loop.answered = False, True
        return outputs

    def prefill(self, *args: Any, **kwargs: Any) -> Any:
        """Run the prompt's forward pass by the model's own method, which calls this object; return the output."""
        return type(self._model)._prefill(self, *args, **kwargs)

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        generator = self._model._get_candidate_generator(*args, **kwargs)
        if getattr(generator, "requires_model_outputs", False):  # in older versions no generator does
            self.drafts_from_outputs()
        return generator

    def drafts_from_outputs(self) -> None:
        """Do nothing. The loop calls this before prefill if drafts need outputs of the whole prompt."""


# Images


def takes_encoded_images(model: Any) -> bool:
    """Return whether a model's forward pass accepts images that its vision tower has already encoded."""
    need(IMAGES)
    return bool(model._supports_mm_encoder_outputs()) and "image" in model.input_modalities


def encode(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run a model's encoders over arguments of generate and return their outputs by kind."""
    prepared = model._prepare_multimodal_encoder_kwargs_for_generation({**arguments, "mm_encoder_outputs": {}})
    return prepared["mm_encoder_outputs"]  # type: ignore[no-any-return]


def repeat_encoded(model: Any, input_ids: torch.Tensor, outputs: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Return the encoders' outputs for a batch whose rows are repeated."""
    return model._expand_multimodal_outputs(input_ids, outputs, expand_size=repeats)  # type: ignore[no-any-return]


def repeats_images_by_row(model: Any, token: int) -> bool:
    """Return whether a repeated row with two images has both in each copy. GLM-4V gives a copy one image twice."""
    outputs = SimpleNamespace(pooler_output=[torch.zeros(1, 1), torch.ones(1, 1)])
    repeated = repeat_encoded(model, torch.full((1, 2), token), {"image": outputs}, 2)["image"].pooler_output
    return [int(rows) for rows in repeated] == [0, 1, 0, 1]


# Private names of torch

_STORAGE_USERS: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def holders_of(tensor: torch.Tensor) -> float:
    """Return how many tensors and storage objects hold a tensor's memory; infinity if torch does not count them.

    Without the count, the adapter copies more.
    """
    return math.inf if _STORAGE_USERS is None else _STORAGE_USERS(tensor.untyped_storage()._cdata)


def global_hooks() -> tuple[Any, Any]:
    """Return torch's ordered dictionaries of the hooks that run before and after the forward passes of all modules."""
    return torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks


def intercepts_operations() -> bool:
    """Return whether a mode of torch intercepts operations of this thread. A context that only sets a device does not.

    Such modes are a `TorchFunctionMode`, a `TorchDispatchMode` and `torch.jit.trace`.
    """
    others = [mode for mode in _get_current_function_mode_stack() if type(mode) is not DeviceContext]
    return bool(others or _get_current_dispatch_mode_stack() or torch._C._get_tracing_state())


def keeps_parametrized(model: Any) -> bool:
    """Return whether `torch.nn.utils.parametrize.cached()` may keep weights of a model, in any thread."""
    return bool(parametrize._cache_enabled) and any(map(parametrize.is_parametrized, model.modules()))


# Attention

SILENT_ENTRIES = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation")
"""Entries of a config that do not affect keys and values."""
REGISTRY = "ALL_ATTENTION_FUNCTIONS"
"""The name under which modeling files import the table of attention functions."""


def uses_attention_interface(model: Any) -> bool:
    """Return whether a model declares that its attention goes through `AttentionInterface`."""
    return bool(getattr(model, "_supports_attention_backend", False))


def attention_implementation(config: Any) -> str:
    """Return the name of the attention function that a config selects."""
    return str(config._attn_implementation)


def registered(value: Any) -> list[dict[str, Any]]:
    """Return the tables of functions in a registry of transformers; [] if a value is not a registry."""
    kind, names = type(value), ("_local_mapping", "_global_mapping")
    return [getattr(value, name) for name in names] if hasattr(kind, "_global_mapping") else []


# Hooks

RECORDING = "_output_capturing_hooks_installed"
"""The attribute that transformers sets on a model once it has added its recording hooks."""


def is_own_hook(hook: Any) -> bool:
    """Return whether transformers added a hook to a module. Such hooks record outputs and compute nothing."""
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


# Continuous batching


KEPT_MANAGER = "_cached_continuous_batching_manager"
"""The attribute in which transformers keeps a model's manager between calls."""

COMPILED = ("_cache", "_compiled_call", "_last_compile_config", "_previous_max_cache_length")
"""Attributes that transformers sets on a model when it generates with a static cache."""


def check_batching(cache: type) -> None:
    """Raise UnsupportedError unless transformers is recent enough and has every interface of continuous batching.

    Args:
        cache: The class that replaces transformers' `PagedAttentionCache`. It must have every method of that class.
    """
    supported = TESTED["transformers"]._replace(oldest=OLDEST_BATCHING)
    if reason := seam.why_not(BATCHING, "transformers", supported, [BATCHING_NAMES], {}, {}, {}):
        raise UnsupportedError(reason)
    for path, listed, _ in seam.names(BATCHING_NAMES):
        if path.rpartition(".")[2] in REPLACED:
            takes = [each for each in inspect.signature(seam.find(path)).parameters if each != "self"]
            refuse_if(takes != [*(listed or ())], f"{path}({', '.join(takes)}) is not known, {BATCHING} replaces it")
    for name, method in inspect.getmembers(seam.find(CLASSES["PagedAttentionCache"]), inspect.isfunction):
        if not name.startswith("_") and name not in UNUSED:
            ours, takes = getattr(cache, name, None), list(inspect.signature(method).parameters)
            known = ours is not None and list(inspect.signature(ours).parameters) == takes
            refuse_if(not known, f"PagedAttentionCache.{name}({', '.join(takes)}) is not known, {BATCHING} needs it")


def check_layers(config: Any) -> None:
    """Raise the ValueError of transformers if its continuous batching cannot run the layers of a config."""
    seam.find(f"{PACKAGE}cache:group_layers_by_attn_type")(config)


def guard_managers(check: Callable[[Any], None]) -> None:
    """Make managers of continuous batching call `check(model)` before they are made, started or given a request.

    An error of `check` reaches the caller, and the manager is unchanged.
    """
    manager = seam.find_or_stand_in(CLASSES["ContinuousBatchingManager"])

    def checked(method: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
        model = getattr(self, "model", None)  # in __init__ the manager has no model yet
        check(model if model is not None else args[0] if args else kwargs.get("model"))
        return method(self, *args, **kwargs)

    for name in ("__init__", "start", "add_request"):
        if hasattr(manager, name):
            seam.wrap_once(manager, name, checked)


def kept_manager(model: Any) -> Any:
    """Return the manager that transformers keeps on a model between calls, or None."""
    return getattr(model, KEPT_MANAGER, None)


def unshared(model: Any, generation_config: Any, continuous_batching_config: Any) -> Any:
    """Return a copy of a continuous batching config with block sharing off.

    If `continuous_batching_config` is None, copy the generation config's, or make a default one. Transformers'
    own manager knows no salts, so its requests must share nothing.
    """
    settings = continuous_batching_config
    if settings is None:
        settings = getattr(generation_config or model.generation_config, "continuous_batching_config", None)
    settings = seam.find(CLASSES["ContinuousBatchingConfig"])() if settings is None else copy.deepcopy(settings)
    settings.allow_block_sharing = False
    return settings


def become_plain(manager: Any, model: Any, generation_config: Any, settings: Any, workload_hints: Any) -> None:
    """Turn a session that has not started into a manager of transformers' own class, with its queued requests."""
    waiting, router, counted = manager.input_queue, manager.output_router, getattr(manager, "_request_counter", 0)
    manager.__class__ = seam.find(CLASSES["ContinuousBatchingManager"])
    manager.__init__(model, generation_config, unshared(model, generation_config, settings), workload_hints)
    manager.output_router, manager._request_counter = router, counted
    while not waiting.empty():
        manager.input_queue.put(waiting.get_nowait())


def plain_processor(manager: Any) -> Any:
    """Return a new processor of a manager of transformers' own class."""
    return manager._create_batch_processor()


def plain_start(manager: Any) -> None:
    """Start a manager as transformers' own class does."""
    seam.find(CLASSES["ContinuousBatchingManager"]).start(manager)


def make_scheduler(settings: Any, cache: Any) -> Any:
    """Return a new scheduler of the type that a continuous batching config names, for a cache."""
    found = seam.find(f"{PACKAGE}scheduler:SCHEDULER_MAPPING")
    kind = found.get(settings.scheduler_type) or seam.find(f"{PACKAGE}scheduler:FIFOScheduler")
    return kind(
        cache=cache, safety_margin=settings.safety_margin, max_requests_per_batch=settings.max_requests_per_batch
    )


def without_masks(config: Any) -> Any:
    """Return a copy of a config that makes transformers allocate no dense masks."""
    config = copy.copy(config)
    config._attn_implementation_internal = "blocks"
    return config


def finish(state: Any) -> None:
    """Mark a request as finished."""
    state._status = seam.find(f"{PACKAGE}requests:RequestStatus").FINISHED


def fail(processor: Any, error: Exception, state: Any) -> None:
    """End a processor's request with an error."""
    processor._handle_request_error(error, state)


def share_prefixes(manager: Any, share: bool) -> None:
    """Enable or disable prefix sharing between a manager's requests."""
    manager._use_prefix_sharing = share


def serve_batches(processor: Any, manager: Any) -> None:
    """Let a class of processors compute batches with `step`, and a class of managers create them.

    `processor` and `manager` are the classes. Managers create processors with `make_processor`.
    """
    processor._generation_step = torch.no_grad()(lambda self, model: self.step(model))
    manager._create_batch_processor = lambda self: self.make_processor()


def model_in_step(model: Any, forward: Callable[..., Any]) -> Any:
    """Return another forward pass of a model, as transformers' continuous batching calls models."""
    forward._supports_logits_to_keep = lambda: keeps_logits(model)  # type: ignore[attr-defined]
    return forward
