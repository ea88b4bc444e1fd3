"""`enable_prefix_caching`: one manager and one set of blocks for a model, behind its own `generate`."""

from __future__ import annotations

import functools
import inspect
import threading
import types
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from ...cache import CacheManager, OutOfBlocks
from .identity import adapter_keys, fingerprint
from .paged.dispatch import install
from .paged.generation import PackedModel, PagedDecoder, RecordedCriteria, Requests
from .paged.graphs import DecodeSteps, GraphReport
from .paged.layers import BlockStorage
from .paged.probe import default_num_blocks, probe
from .support import UnsupportedError, check_call, check_model, layer_windows, rope_keys

_handles: weakref.WeakKeyDictionary[Any, PrefixCaching] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class RequestReport:
    """What the cache did for one row of the last call.

    Attributes:
        prompt_tokens: Tokens of the prompt, padding left out.
        cached_tokens: How many of them were read from the cache.
    """

    prompt_tokens: int
    cached_tokens: int


def enable_prefix_caching(
    model: Any,
    num_blocks: int | None = None,
    block_size: int = 16,
    policy: Any = "default",
    cuda_graphs: bool | None = None,
) -> PrefixCaching:
    """Lets `model.generate` reuse the KV of prompts it has seen, until `disable` is called.

    The tokens that come out are those that came out before. What cannot be served (beam search, encoder-decoder
    models, recurrent states, see `docs/huggingface.md`) goes to the model's own generate, with one warning that
    says why. Changed weights are noticed, and the cache starts anew.

    Args:
        model: A decoder-only transformers model, loaded on its devices, in eval mode.
        num_blocks: Blocks of the cache. None: what fits in a fifth of the device's free memory (on a CPU a fifth of
            all memory, 4 GiB at most), and no more than 32 of the model's longest sequences need.
        block_size: Tokens of a block.
        policy: Which block is evicted first: a name or an `EvictionPolicy`, see `CacheManager`.
        cuda_graphs: Whether decode steps are captured in CUDA graphs and replayed. None: where that is possible, see
            `docs/huggingface.md`; what cannot be captured runs eagerly.

    Returns:
        The handle: `stats()`, `last_requests`, `graphs`, `reset()`, `disable()`; also a context manager that disables
        at its end.

    Raises:
        TypeError: `model` has no `generate` of transformers, or `num_blocks` or `block_size` is not an integer, or
            `cuda_graphs` not a bool.
        ValueError: Caching is already enabled for this model, a number is out of range, or `cuda_graphs` is True and
            its decode steps cannot be captured.
    """
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "prepare_inputs_for_generation"):
        raise TypeError(f"model: got {type(model).__name__}, needs a transformers model with generate")
    if model in _handles:
        raise ValueError("model: prefix caching is already enabled; call disable() on its handle first")
    if "generate" in vars(model):
        raise ValueError("model: its generate was already replaced on this instance; undo that first")
    if isinstance(block_size, bool) or not isinstance(block_size, int):
        raise TypeError(f"block_size: got {type(block_size).__name__}, needs an int")
    if block_size < 1:
        raise ValueError(f"block_size: got {block_size}, needs at least 1")
    if num_blocks is not None and (isinstance(num_blocks, bool) or not isinstance(num_blocks, int)):
        raise TypeError(f"num_blocks: got {type(num_blocks).__name__}, needs an int or None")
    if num_blocks is not None and num_blocks < 1:
        raise ValueError(f"num_blocks: got {num_blocks}, needs at least 1")
    if cuda_graphs is not None and not isinstance(cuda_graphs, bool):
        raise TypeError(f"cuda_graphs: got {type(cuda_graphs).__name__}, needs a bool or None")
    handle = PrefixCaching(model, num_blocks, block_size, policy, cuda_graphs)
    if cuda_graphs and handle.graphs.reason is not None:
        raise ValueError(f"cuda_graphs: got True, needs steps that can be captured, and {handle.graphs.reason}")
    _handles[model] = handle
    vars(model)["generate"] = types.MethodType(_wrapped_generate(type(model)), model)
    return handle


def _wrapped_generate(model_class: type) -> Any:
    """The function that replaces `generate` on one instance; a copy of the model falls back to its class's."""

    @functools.wraps(model_class.generate)  # type: ignore[attr-defined]
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        handle = _handles.get(self)
        if handle is None:
            return type(self).generate(self, *args, **kwargs)
        return handle.generate(*args, **kwargs)

    return generate


class PrefixCaching:
    """What `enable_prefix_caching` returns.

    Attributes:
        manager: The `CacheManager`; None when the model cannot be served.
        unsupported: Why the model cannot be served; None when it can.
        last_requests: A report per row of the last call, in the order of the batch; empty when it was not served here.
    """

    def __init__(
        self, model: Any, num_blocks: int | None, block_size: int, policy: Any, cuda_graphs: bool | None
    ) -> None:
        self._model: weakref.ref[Any] = weakref.ref(model)
        self._lock = threading.RLock()
        self._warned: set[str] = set()
        self._policy = policy
        self._num_blocks = num_blocks
        self._cuda_graphs = cuda_graphs
        self.block_size = block_size
        self.last_requests: list[RequestReport] = []
        with self._lock:
            self._set_up(model)

    def _set_up(self, model: Any) -> None:
        """Looks at the model as it is now, and makes an empty cache for it if it can be served."""
        self.manager: CacheManager | None = None
        self.unsupported: str | None = None
        self._storage = BlockStorage(0, self.block_size, {})
        self._weights = fingerprint(model)
        self._placed = (model.dtype, model.device)
        self._steps = DecodeSteps(self._cuda_graphs is not False, self._warn_of_graphs)
        try:
            check_model(model)
            bytes_per_block = probe(model, self.block_size)
        except UnsupportedError as error:
            self.unsupported = self._steps.reason = f"{type(model).__name__}: {error}"
            self._warn(self.unsupported)
            return
        num_blocks = self._num_blocks or default_num_blocks(model, bytes_per_block, self.block_size)
        self.manager = CacheManager(num_blocks, self.block_size, policy=self._policy)
        self._storage = BlockStorage(num_blocks, self.block_size, layer_windows(model.config))
        self._steps.prepare(model, (self._weights, adapter_keys(model)))

    def __enter__(self) -> PrefixCaching:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.disable()

    @property
    def graphs(self) -> GraphReport:
        """How decode steps ran: captured in CUDA graphs, or eagerly and why."""
        return self._steps.report()

    def stats(self) -> Any:
        """Counts since caching was enabled or reset: see `CacheManager.stats`; empty for a model that is not served."""
        return {} if self.manager is None else self.manager.stats()

    def reset(self) -> None:
        """Forgets every cached block."""
        with self._lock:
            if self.manager is not None:
                self._empty(self.manager)

    def _empty(self, manager: CacheManager) -> None:
        """An empty cache from now on; calls under way go on with the blocks they have."""
        model = self._model()
        if model is not None:
            install(model)
        self._steps.drop()
        if manager.stats().num_requests == 0:
            manager.reset()
        else:
            self.manager = CacheManager(self._storage.num_blocks, self.block_size, policy=self._policy)
            self._storage = self._storage.fresh()

    def disable(self) -> None:
        """Gives the model its own `generate` back and frees the blocks; a second call does nothing."""
        with self._lock:
            model = self._model()
            if model is None or _handles.get(model) is not self:
                return
            del _handles[model]
            del vars(model)["generate"]
            self._storage = BlockStorage(0, self.block_size, {})
            self._steps.drop()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's generate, over the cache where it can be served."""
        model: Any = self._model()
        original = type(model).generate
        self.last_requests = []
        try:
            with self._lock:
                self._notice_changes(model)
                manager, storage = self.manager, self._storage
            if manager is not None:
                return self._serve(model, original, manager, storage, *args, **kwargs)
        except UnsupportedError as error:
            self._warn(str(error))
        return original(model, *args, **kwargs)

    def _notice_changes(self, model: Any) -> None:
        """KV of other weights must not be read, and another dtype or device needs other blocks."""
        weights = fingerprint(model)
        if weights == self._weights:
            return
        if (model.dtype, model.device) != self._placed:
            self._set_up(model)
        elif self.manager is not None:
            self._empty(self.manager)
        self._weights = weights

    def _serve(
        self, model: Any, original: Any, manager: CacheManager, storage: BlockStorage, *args: Any, **kwargs: Any
    ) -> Any:
        """Lets the original generate prepare everything and then decodes over the cache.

        Raises:
            UnsupportedError: Before a token was generated or shown to a streamer.
        """
        arguments = inspect.signature(original).bind(model, *args, **kwargs).arguments
        del arguments["self"]
        arguments.update(arguments.pop("kwargs", {}))
        for name in ("custom_generate", "assistant_model", "synced_gpus", "past_key_values"):
            if arguments.get(name) is not None and arguments[name] is not False:
                raise UnsupportedError(f"{name} is served by the model's own generate")
        streamer = arguments.pop("streamer", None)
        own_processors = arguments.get("logits_processor") is not None
        _take_stop_strings(model, arguments)

        def decode(
            model: Any,
            input_ids: torch.Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **model_kwargs: Any,
        ) -> Any:
            check_call(model, input_ids, generation_config, model_kwargs)
            prompts = _prompts(input_ids, model_kwargs.get("attention_mask"))
            extra_keys = rope_keys(model.config, [len(p) for p in prompts], generation_config.max_length)
            criteria = RecordedCriteria(stopping_criteria)
            # Rows that met an eos are padded from then on, so that nobody sees their logits but who asked for them.
            seen = own_processors or generation_config.output_scores or generation_config.output_logits
            drop_finished = not seen and any(hasattr(c, "eos_token_id") for c in criteria)
            adapters = adapter_keys(model)
            with self._lock:
                self._steps.prepare(model, (self._weights, adapters))
            requests = Requests(
                manager,
                PackedModel(model, storage),
                self._steps,
                prompts,
                (*(extra_keys or ()), *adapters) or None,
                generation_config.prefill_chunk_size,
                self._lock,
            )
            decoder = PagedDecoder(model, requests, criteria, drop_finished, self._warn_out_of_blocks)
            try:
                if streamer is not None:
                    streamer.put(input_ids.cpu())
                result = type(model)._sample(
                    decoder, input_ids, logits_processor, criteria, generation_config, streamer=streamer, **model_kwargs
                )
            finally:
                requests.close()
                self.last_requests = [RequestReport(len(r.tokens), r.num_cached_tokens) for r in requests.rows]
            if hasattr(result, "past_key_values"):
                result.past_key_values = None  # the empty one that transformers made; the cache itself stays here
            return result

        return original(model, custom_generate=decode, **arguments)

    def _warn_out_of_blocks(self, error: OutOfBlocks) -> None:
        self._warn(f"generation went on without the cache: {error}; give a larger num_blocks")

    def _warn_of_graphs(self, reason: str) -> None:
        if "graphs" not in self._warned:
            self._warned.add("graphs")
            warnings.warn(f"prefix caching: {reason}. It runs without CUDA graphs.", UserWarning, stacklevel=2)

    def _warn(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"prefix caching: {reason}. The model's own generate serves this.", UserWarning, stacklevel=4)


def _prompts(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[np.ndarray]:
    """The tokens of each row that the attention mask leaves, int64."""
    ids = input_ids.cpu().numpy()
    if mask is None:
        return [np.ascontiguousarray(row) for row in ids]
    kept = mask.cpu().numpy().astype(bool)
    return [row[keep] for row, keep in zip(ids, kept, strict=True)]


def _take_stop_strings(model: Any, arguments: dict[str, Any]) -> None:
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
        criterion = StopStringCriteria(arguments.pop("tokenizer"), arguments.pop("stop_strings"))
        arguments["stopping_criteria"] = StoppingCriteriaList([*(arguments.get("stopping_criteria") or ()), criterion])
