"""The handle of one model: its cache, its calls, what it was like when they were made."""

from __future__ import annotations

import functools
import inspect
import os
import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers.generation.utils import GENERATION_MODES_MAPPING

from ...cache import CacheManager, OutOfBlocks
from .calls import Calls, ServedStats
from .contiguous.serve import Contiguous
from .hints import Hints
from .identity import Identity, set_by_forward
from .images import Images, encoded_by_model, take_images
from .loop import Loop
from .paged.graphs import CAPTURERS, DecodeSteps, GraphReport
from .paged.serve import Paged
from .reports import RequestReport
from .salts import Salts
from .support import (
    UnsupportedError,
    call_keys,
    check_arguments,
    check_loop,
    check_mode,
    check_model,
    rope_keys,
    take_stop_strings,
)


class PrefixCaching:
    """What `enable_prefix_caching` returns.

    Attributes:
        unsupported: Why the model cannot be served; None when it can.
        last_requests: A report per row of the last call, in the order of the batch; empty when it was not served here.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from pc.integrations.huggingface import enable_prefix_caching
        >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
        >>> with enable_prefix_caching(model, num_blocks=64) as handle:
        ...     prompt = torch.arange(3, 43)[None]  # [1, 40]
        ...     tokens = [model.generate(prompt, max_new_tokens=4) for turn in range(2)]
        >>> torch.equal(*tokens), handle.stats().calls_served
        (True, 2)
    """

    def __init__(
        self,
        model: Any,
        num_blocks: int | None,
        block_size: int,
        policy: Any,
        cuda_graphs: bool | None,
        reuse: str = "prefix",
        host_blocks: int = 0,
        disk: str | os.PathLike[str] | None = None,
        disk_bytes: int | None = None,
        window_blocks: int | None = None,
    ) -> None:
        self._model: weakref.ref[Any] = weakref.ref(model)
        self._lock = threading.RLock()
        self._calls = Calls()
        self._arguments = (num_blocks, block_size, policy)
        self._tiers: dict[str, Any] = {
            "reuse": reuse,
            "host_blocks": host_blocks,
            "disk": disk,
            "disk_bytes": disk_bytes,
            "window_blocks": window_blocks,
        }
        self._salts = Salts()
        self._hints = Hints()
        self._steps = DecodeSteps(cuda_graphs is not False, self._warn_of_graphs)
        self._serving: Contiguous | Paged | None = None
        self._disabled = False
        self._looked_at: set[str] = set()
        self.unsupported: str | None = None
        self.block_size = block_size
        self.last_requests: list[RequestReport] = []
        CacheManager(1, block_size, policy=policy)  # a wrong policy is told of before the model is looked at
        with self._lock:
            self._set_up(model)
        weakref.finalize(model, _forget, weakref.ref(self)).atexit = False

    def _set_up(self, model: Any) -> None:
        """Looks at the model as it is now, and makes an empty cache for it if it can be served."""
        self._serving, self.unsupported = None, None
        self._placed = (model.dtype, model.device)
        with set_by_forward(model) as passing:
            try:
                check_model(model)
                self._serving = self._way(model)
            except UnsupportedError as error:
                self.unsupported = self._steps.reason = f"{type(model).__name__}: {error}"
                self._calls.tell(self.unsupported, f"{self.unsupported}. The model's own generate serves this.")
        self._passing = frozenset(passing)
        self._identity = Identity(model, passing=self._passing)
        self._steps.prepare(model, None)

    def _way(self, model: Any) -> Contiguous | Paged:
        """Packed passes over blocks where there are kernels and the model can follow, contiguous copies else."""
        tiers = any(self._tiers[name] for name in ("host_blocks", "disk", "window_blocks"))
        if model.device.type in CAPTURERS and self._tiers["reuse"] == "prefix" and not tiers:
            try:
                return Paged(model, *self._arguments, self._steps)
            except UnsupportedError as error:
                self._steps.refuse(str(error))
        return Contiguous(model, *self._arguments, **self._tiers)

    def __enter__(self) -> PrefixCaching:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.disable()

    @property
    def manager(self) -> CacheManager | None:
        """Hands out the blocks; None when the model cannot be served."""
        return None if self._serving is None else self._serving.store.manager

    @property
    def graphs(self) -> GraphReport:
        """How decode steps ran: captured in CUDA graphs, or eagerly and why."""
        return self._steps.report()

    def stats(self) -> ServedStats:
        """Counts of the cache since it was last empty, and of all calls: served, and handed back by reason.

        Examples:
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> from pc.integrations.huggingface import enable_prefix_caching
            >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
            >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
            >>> handle = enable_prefix_caching(model, num_blocks=64)
            >>> prompt = torch.arange(3, 43)[None]  # [1, 40]
            >>> tokens = model.generate(prompt, max_new_tokens=4)
            >>> handle.stats().calls_served, handle.stats().queried_tokens
            (1, 40)
        """
        with self._lock:
            if self._serving is not None:
                self._serving.store.sweep()
            return self._calls.stats(self.manager)

    def reset(self) -> None:
        """Forgets every cached block; calls under way go on with those they have.

        Examples:
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> from pc.integrations.huggingface import enable_prefix_caching
            >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
            >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
            >>> handle = enable_prefix_caching(model, num_blocks=64)
            >>> prompt = torch.arange(3, 43)[None]  # [1, 40]
            >>> tokens = model.generate(prompt, max_new_tokens=4)
            >>> handle.reset()
            >>> handle.stats().cached_blocks
            0
        """
        with self._lock:
            model = self._model()
            if self._serving is not None and model is not None:
                self._serving.empty(model)

    def save(self, path: str | os.PathLike[str]) -> int:
        """Writes every cached block to a file that nobody else may read: it holds what prompts can be guessed from.

        Args:
            path: The file; one that is there is replaced.

        Returns:
            How many blocks it has.

        Raises:
            ValueError: The model is not served, or by packed passes, whose blocks stay on the device.
            OSError: The file cannot be written.

        Examples:
            >>> import tempfile
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> from pc.integrations.huggingface import enable_prefix_caching
            >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
            >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
            >>> handle = enable_prefix_caching(model, num_blocks=64)
            >>> prompt = torch.arange(3, 43)[None]  # [1, 40]
            >>> tokens = model.generate(prompt, max_new_tokens=4)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     count = handle.save(f"{folder}/blocks")
            >>> count
            2
        """
        serving, model, adapters = self._saving()
        return serving.save(model, adapters, path)

    def load(self, path: str | os.PathLike[str]) -> int:
        """Takes the blocks of a file into host memory, from where prompts read them.

        Args:
            path: A file of `save`.

        Returns:
            How many blocks it has.

        Raises:
            ValueError: The file holds KV of another model, weights, dtype, adapter or block size, or is none of
                `save`; or the model is not served, or by packed passes.
            OSError: The file cannot be read.

        Examples:
            >>> import tempfile
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> from pc.integrations.huggingface import enable_prefix_caching
            >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
            >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
            >>> handle = enable_prefix_caching(model, num_blocks=64)
            >>> prompt = torch.arange(3, 43)[None]  # [1, 40]
            >>> tokens = model.generate(prompt, max_new_tokens=4)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     count = handle.save(f"{folder}/blocks")
            ...     handle.disable()
            ...     handle = enable_prefix_caching(model, num_blocks=64)  # another process, later
            ...     count = handle.load(f"{folder}/blocks")
            >>> tokens = model.generate(prompt, max_new_tokens=4)
            >>> handle.last_requests
            [RequestReport(prompt_tokens=40, cached_tokens=32, cached_spans=((0, 32),))]
        """
        serving, model, adapters = self._saving()
        return serving.load(model, adapters, path)

    def _saving(self) -> tuple[Contiguous, Any, tuple[str, ...]]:
        model = self._model()
        placed = None if model is None else self._placed_serving(model)
        serving, adapters = (None, ()) if placed is None else self._current(model)
        if not isinstance(serving, Contiguous):
            raise ValueError("model: needs one that is served over contiguous copies, to save or load its blocks")
        return serving, model, adapters

    def salt(self, salt: Any) -> AbstractContextManager[None]:
        """Within it, this thread's calls share blocks only with calls of the same salt.

        Args:
            salt: str, bytes or int.

        Raises:
            TypeError: `salt` is None or of another type.

        Examples:
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> from pc.integrations.huggingface import enable_prefix_caching
            >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
            >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
            >>> handle = enable_prefix_caching(model, num_blocks=64)
            >>> prompt = torch.arange(3, 43)[None]  # [1, 40]
            >>> for tenant in ("one", "other", "one"):
            ...     with handle.salt(tenant):
            ...         tokens = model.generate(prompt, max_new_tokens=4)
            ...     print(tenant, handle.last_requests[0].cached_tokens)
            one 0
            other 0
            one 32
        """
        return self._salts.within(salt)

    def hint(self, returns: float | None) -> AbstractContextManager[None]:
        """Within it, what this thread knows of its conversations is told to the eviction policy when its calls end.

        Args:
            returns: Probability that the conversation of a call goes on soon, 0 to 1; None: unknown. With 0 the
                policies that heed it (`hazard`, `priority`) give up first what nobody else used.

        Raises:
            TypeError: `returns` is neither a number nor None.
            ValueError: `returns` is not between 0 and 1.

        Examples:
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> from pc.integrations.huggingface import enable_prefix_caching
            >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
            >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
            >>> handle = enable_prefix_caching(model, num_blocks=64, policy="priority")
            >>> with handle.hint(returns=0):  # the last question of this user
            ...     tokens = model.generate(torch.arange(3, 43)[None], max_new_tokens=4)
            >>> tokens.shape
            torch.Size([1, 44])
        """
        return self._hints.within(returns)

    def disable(self) -> None:
        """Gives the model its own `generate` back and frees the blocks; a second call does nothing.

        Examples:
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> from pc.integrations.huggingface import enable_prefix_caching
            >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
            >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
            >>> handle = enable_prefix_caching(model, num_blocks=64)
            >>> handle.disable()
            >>> "generate" in vars(model)  # its class's own again
            False
        """
        with self._lock:
            model, self._disabled = self._model(), True
            if isinstance(self._serving, Contiguous):
                self._serving.close()
            self._serving = None
            self._steps.drop()
            if model is not None and getattr(vars(model).get("generate"), "handle", None) is self:
                del vars(model)["generate"]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's generate, over the cache where it can be served.

        Examples:
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> from pc.integrations.huggingface import enable_prefix_caching
            >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
            >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
            >>> handle = enable_prefix_caching(model, num_blocks=64)
            >>> prompt = torch.arange(3, 43)[None]  # [1, 40]
            >>> handle.generate(prompt, max_new_tokens=4).shape  # what model.generate is now
            torch.Size([1, 44])
        """
        model: Any = self._model()
        if model is None:
            raise RuntimeError("generate: the model of this handle is gone")
        original = type(model).generate
        self.last_requests = []
        try:
            arguments = _signature(original).bind(model, *args, **kwargs).arguments
            del arguments["self"]
            arguments.update(arguments.pop("kwargs", {}))
            check_arguments(arguments)
            check_mode(model, arguments)
            take_stop_strings(model, arguments)
            serving = self._placed_serving(model)
            images = None if serving is None else take_images(model, arguments)
        except UnsupportedError as error:
            self._calls.hand_back(error.reason, error.detail)
            return original(model, *args, **kwargs)
        if serving is None:
            if self.unsupported is not None:
                self._calls.hand_back(self.unsupported)
            return original(model, *args, **kwargs)
        return original(model, **arguments | {"custom_generate": self._loop(serving, arguments, images)})

    def _placed_serving(self, model: Any) -> Contiguous | Paged | None:
        """What serves the model in its dtype and on its device."""
        with self._lock:
            if self._disabled:
                return None
            if not model.training and (model.dtype, model.device) != self._placed:
                self._set_up(model)
            return self._serving

    def _current(self, model: Any) -> tuple[Contiguous | Paged | None, tuple[str, ...]]:
        """What serves the model as it is now: KV of other weights must not be read, nor kept in blocks of others."""
        with self._lock:
            if self._disabled or model.training:
                return (None if self._disabled else self._serving), ()
            if self._identity.changed(model):
                self._identity = Identity(model, passing=self._passing)
                if self._serving is not None:
                    self._serving.empty(model, changed=True)
            return self._serving, self._identity.adapter_keys()

    def _loop(self, serving: Contiguous | Paged, arguments: dict[str, Any], images: Images | None) -> Any:
        """The decoding loop that generate calls once it has prepared everything."""
        given = {n: arguments.get(n) for n in ("tokenizer", "assistant_tokenizer", "assistant_model", "streamer")}

        def decode(
            model: Any,
            input_ids: torch.Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            inputs_tensor: Any = None,
            **model_kwargs: Any,
        ) -> Any:
            mode = generation_config.get_generation_mode(given["assistant_model"])
            function = getattr(type(model), GENERATION_MODES_MAPPING[mode])
            known = _signature(function).parameters
            extra = {n: v for n, v in (given | {"inputs_tensor": inputs_tensor}).items() if v is not None}
            model._validate_generation_mode(mode, generation_config, extra)
            options = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
            options |= {name: value for name, value in extra.items() if name in known}
            own = arguments.get("logits_processor") is not None
            prepared = (generation_config, options, model_kwargs, own, images)
            loop = Loop(function, str(mode.value), model, input_ids, *prepared)
            return self._run(serving, loop)

        decode.__signature__ = _DECODING  # type: ignore[attr-defined]  # generate asks three times, and never twice of one
        return decode

    def _run(self, serving: Contiguous | Paged, loop: Loop) -> Any:
        try:
            check_loop(loop)
            if isinstance(serving, Contiguous) and serving.leaves_alone(loop):
                result = loop.run()
                reports = [RequestReport.of(loop.input_ids.shape[1], ()) for _ in loop.input_ids]
            else:
                result, reports = self._serve(loop)
        except UnsupportedError as error:
            self._calls.hand_back(error.reason, error.detail)
            if loop.images is not None:
                encoded = encoded_by_model(loop.images, loop.model, loop.input_ids, loop.repeats)
                return loop.run(mm_encoder_outputs=encoded)
            return loop.run()
        first = {"images"} if loop.images is not None else set()
        first |= {"outputs"} if loop.shown else set()
        if not first <= self._looked_at:
            self._looked_at |= first
            self._look_again(loop.model)
        self.last_requests = reports
        self._calls.serve()
        return result

    def _serve(self, loop: Loop) -> tuple[Any, list[RequestReport]]:
        """Runs a loop over the cache.

        Raises:
            UnsupportedError: Before a token was computed.
        """
        serving, adapters = self._current(loop.model)
        if serving is None:
            raise UnsupportedError(self.unsupported or "caching was disabled while the call began")
        loop.adapters, loop.returns = self._row_adapters(loop), self._hints.returns
        lengths = [loop.input_ids.shape[1]]
        mask = loop.model_kwargs.get("attention_mask")
        if mask is not None:
            lengths = mask.sum(-1).tolist()
        keys = (*rope_keys(loop.model.config, lengths, loop.generation_config.max_length), *call_keys(loop))
        return serving.run(loop, (*keys, *adapters), self._salts.current, self._warn_out_of_blocks)

    def _row_adapters(self, loop: Loop) -> list[str] | None:
        """PEFT's adapter of each row, where the caller named them.

        Raises:
            UnsupportedError: They are not one for each row, or something else is set by row.
        """
        try:
            settings = dict(self._identity.row_settings())
        except ValueError as error:
            raise UnsupportedError(f"layers differ in {error}") from error
        names = settings.pop("adapter_names", None)
        if settings or (names is not None and len(names) != len(loop.input_ids)):
            raise UnsupportedError("adapters are set by row in another way than one name for each")
        return names if names is None else [str(name) for name in names]

    def _look_again(self, model: Any) -> None:
        """After the first images or hidden states: transformers then puts hooks on modules, and that is no change."""
        with self._lock:
            if not self._identity.tensors_changed():
                self._identity = Identity(model, passing=self._passing)

    def _warn_out_of_blocks(self, error: OutOfBlocks) -> None:
        self._calls.tell(
            "out of blocks", f"an answer is generated without the cache: {error}; give a larger num_blocks"
        )

    def _warn_of_graphs(self, reason: str) -> None:
        self._calls.tell("graphs", f"{reason}. It runs without CUDA graphs.")


@functools.lru_cache(64)
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


_DECODING = inspect.Signature(
    [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for name in ("model", "input_ids", "logits_processor", "stopping_criteria", "generation_config")
    ]
    + [inspect.Parameter("inputs_tensor", inspect.Parameter.KEYWORD_ONLY, default=None)]
    + [inspect.Parameter("model_kwargs", inspect.Parameter.VAR_KEYWORD)]
)
"""Of a decoding loop as generate calls it."""


def _forget(handle: weakref.ref[PrefixCaching]) -> None:
    """Frees what a handle holds of a model that is gone."""
    gone = handle()
    if gone is not None:
        gone.__dict__.pop("_identity", None)
        gone._serving, gone._disabled = None, True
        gone._steps.drop()
