"""The handle of one model, which runs its calls over a cache that belongs to the model in its current state."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from ...cache import CacheManager, Explanation
from ...triton_ops._core.checks import check_share
from ..tested import say_untested
from .api import Framework, look, loop_of, rename_cache
from .api import check_mode as check_options
from .calls import Calls, RequestReport, ServedStats, UnsupportedError, refuse_if, refusing
from .compression.document import CompressedDocument, Documents
from .engine import Engine
from .hooks import REASON, watched_hooks
from .identity import Identity, set_by_forward
from .images import encoded_by_model, take_images
from .kernels import wrong_kernel
from .loop import Loop, ask_for_cache, check_arguments, check_loop, check_mode, take_stop_strings, watch_torch
from .probe import own_passes
from .replaced import restore_method
from .runners.document import check_arguments_over_document
from .runners.graphs import DecodeSteps, GraphReport
from .settings import CacheOptions, check_salt, value_of, within
from .store.kept import PromptStore
from .store.tiers import load, save
from .support import check_model, kept_deltas, precision_keys, rope_keys
from .visits import apart

logger = logging.getLogger("pc.integrations.huggingface")

_NEEDS_TOKENS = "needs token ids [1, length] or [length], or arguments of generate with input_ids"


class PrefixCaching:
    """The handle that `enable_prefix_caching` returns.

    Attributes:
        last_requests: A report for each row of the last call, in the order of the batch; empty if the call fell back.
        unsupported: The reason why the model cannot be served; None if it can.
        disabled: Whether caching was disabled.
        framework: The version of transformers when the handle was made, and the features that it cannot serve.
        untested: The installed versions that are not among the tested ones, as text; None if all are tested.

    Examples:
        The examples of its methods continue this one.

        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from pc.integrations.huggingface import enable_prefix_caching
        >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
        >>> handle = enable_prefix_caching(model, num_blocks=64, policy="priority")
        >>> prompt = torch.arange(3, 43)[None]  # [1, 40]
        >>> tokens = [model.generate(prompt, max_new_tokens=4) for turn in range(2)]
        >>> torch.equal(*tokens), handle.last_requests[0].cached_tokens
        (True, 32)
    """

    def __init__(self, model: Any, options: CacheOptions, cuda_graphs: bool | None) -> None:
        self._model: weakref.ref[Any] = weakref.ref(model)
        self._lock = threading.RLock()
        self._calls = Calls(options.fallback)
        self.options = options
        self.salt_setting, self.hint_setting = object(), object()
        self._steps = DecodeSteps(cuda_graphs is not False, self._warn_of_graphs)
        self._engine: Engine | None = None
        self.disabled = False
        self.documents = Documents(self)
        self.framework: Framework = look()
        self._running = object()  # the setting that is True while this thread is inside a call of the model
        self._changed: str | None = None  # what had changed when the cache was last emptied
        self._served_before = self._short_lives = 0
        self.unsupported: str | None = None
        self.last_requests: list[RequestReport] = []
        # A wrong policy is reported before the model is probed.
        CacheManager(1, options.block_size, policy=options.policy)
        with self._lock:
            self._set_up(model)
        self.untested = say_untested("transformers", "torch")
        weakref.finalize(model, _forget, weakref.ref(self)).atexit = False

    def __enter__(self) -> PrefixCaching:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.disable()

    @property
    def manager(self) -> Any:
        """The manager of the cache's blocks; None if the model cannot be served."""
        return None if self.store is None else self.store.manager

    @property
    def graphs(self) -> GraphReport:
        """A report of how decode steps ran: in CUDA graphs, or eagerly and why."""
        return self._steps.report()

    def stats(self) -> ServedStats:
        """Return counts of the cache since it was last emptied, and of all calls: served, and fallbacks by reason.

        Examples:
            >>> handle.stats().calls_served, handle.stats().queried_tokens
            (2, 80)
        """
        with self._lock:
            return self._calls.stats(self.store)

    def reset(self) -> None:
        """Forget every cached block. Running calls keep the blocks they have.

        Examples:
            >>> handle.reset()
            >>> handle.stats().cached_blocks
            0
        """
        with self._lock:
            self.documents.clear()
            self._changed = None
            model = self.model
            if self._engine is not None and model is not None:
                self._engine.empty(model)

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write every cached block to a file that only its owner may read (0600), since blocks reveal prompts.

        Args:
            path: The file. An existing file is replaced.

        Returns:
            The number of blocks in the file.

        Raises:
            ValueError: The model is not served.
            OSError: The file cannot be written.

        Examples:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     count = handle.save(f"{folder}/blocks")
            >>> count
            2
        """
        return self._move_blocks(save, path)

    def load(self, path: str | os.PathLike[str]) -> int:
        """Read the blocks of a file into host memory, from where prompts reuse them.

        Args:
            path: A file that `save` wrote.

        Returns:
            The number of blocks in the file.

        Raises:
            ValueError: The file was not written by `save`, or holds KV of another model, weights, dtype, adapter or
                block size. Or the model is not served.
            OSError: The file cannot be read.

        Examples:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     count = handle.save(f"{folder}/blocks")
            ...     handle.disable()
            ...     handle = enable_prefix_caching(model, num_blocks=64)  # another process, later
            ...     count = handle.load(f"{folder}/blocks")
            >>> tokens = model.generate(prompt, max_new_tokens=4)
            >>> handle.last_requests
            [RequestReport(prompt_tokens=40, cached_tokens=32, cached_spans=((0, 32),))]
        """
        return self._move_blocks(load, path)

    def compress(self, context_ids: Any, press: Any = "snapkv", budget: float = 0.5) -> CompressedDocument:
        """Compute a text's keys and values once and keep those of the tokens that each head needs most.

        This is **approximate**. Only calls within `with document:` read the compressed keys and values. All other calls
        stay exact.

        Args:
            context_ids: Token ids of the text, `[1, length]` or `[length]`.
            press: The rule that chooses tokens. "snapkv": tokens that the last tokens attend to. "expected_attention":
                tokens that queries like the last ones will attend to. "knorm": keys of small norm. "streaming": the
                first and last tokens. Heads share the budget as in Ada-KV. An object of kvpress works too.
            budget: Share of the tokens to keep. A press of kvpress has its own budget instead.

        Returns:
            The document. While it is in memory, calls with the same text, press and budget share its keys and values.

        Raises:
            TypeError: `press` is neither a name nor an object of kvpress, or `budget` is not a number.
            ValueError: The press is unknown, the budget is out of range, or there are no tokens. Or a layer of the
                model does not compute full attention through transformers' attention interface.

        Examples:
            >>> document = handle.compress(prompt[:, :32], budget=0.25)
            >>> with document:
            ...     tokens = model.generate(prompt, max_new_tokens=4)
            >>> tokens.shape
            torch.Size([1, 44])
        """
        return self.documents.compress(context_ids, press, budget)

    def explain(self, inputs: Any, tokenizer: Any = None) -> Explanation:
        """Explain how far a prompt is cached, why no further, and what other kinds of reuse would save.

        Nothing is computed. Within `with handle.salt(...)` the prompt has that salt. On a CPU, a call that is no longer
        than one block, its answer included, reads nothing even if tokens are cached.

        Args:
            inputs: Token ids, `[1, length]` or `[length]`, or a mapping of arguments of `generate`, such as images and
                a mask. With a tokenizer also a text.
            tokenizer: Decodes both texts at the first different token (`Explanation.texts`).

        Returns:
            The explanation, see `CacheManager.explain`.

        Raises:
            TypeError: `inputs` is a text and there is no tokenizer.
            ValueError: The model or the call is not served, or `inputs` is not one prompt.

        Examples:
            >>> tokens = model.generate(prompt, max_new_tokens=4)
            >>> other = prompt.clone()
            >>> other[0, 20] = 9
            >>> found = handle.explain(other)
            >>> found.matched, found.reason, found.position
            (20, 'token', 20)
        """
        if isinstance(inputs, str):
            if tokenizer is None:
                raise TypeError("inputs: got a text, needs a tokenizer with it, or tokens")
            inputs = tokenizer(inputs)["input_ids"]
        if not isinstance(inputs, Mapping):
            inputs = {"input_ids": inputs}
        try:
            tokens = torch.as_tensor(inputs["input_ids"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            given = inputs.get("input_ids", inputs)
            raise ValueError(f"inputs: got {type(given).__name__}, {_NEEDS_TOKENS}") from error
        if tokens.is_floating_point() or tokens.dim() not in (1, 2):
            raise ValueError(f"inputs: got {tokens.dtype} {list(tokens.shape)}, {_NEEDS_TOKENS}")
        length = {} if "max_length" in inputs or "generation_config" in inputs else {"max_new_tokens": 1}
        tokens = tokens[None] if tokens.dim() == 1 else tokens
        found = self._explain({**length, **inputs, "input_ids": tokens})
        if tokenizer is None or found.reason != "token":
            return found
        return replace(found, texts=(tokenizer.decode(found.here), tokenizer.decode(found.there)))

    def salt(self, salt: Any) -> AbstractContextManager[None]:
        """Return a context in which this thread's calls share blocks only with calls of the same salt.

        Args:
            salt: str, bytes or int.

        Raises:
            TypeError: `salt` is None or of another type.

        Examples:
            >>> for tenant in ("one", "other", "one"):
            ...     with handle.salt(tenant):
            ...         tokens = model.generate(prompt, max_new_tokens=4)
            ...     print(tenant, handle.last_requests[0].cached_tokens)
            one 0
            other 0
            one 32
        """
        check_salt(salt)
        return within(self.salt_setting, salt)

    def hint(self, returns: float | None) -> AbstractContextManager[None]:
        """Return a context that tells the eviction policy how likely this thread's conversations are to resume.

        Args:
            returns: Probability that the conversation of a call resumes soon, 0 to 1. None: unknown. With 0, the
                policies that use hints (`default`, `priority`) evict first the blocks that no other request used.

        Raises:
            TypeError: `returns` is neither a number nor None.
            ValueError: `returns` is not between 0 and 1.

        Examples:
            >>> with handle.hint(returns=0):  # the last question of this user
            ...     tokens = model.generate(prompt, max_new_tokens=4)
            >>> tokens.shape
            torch.Size([1, 44])
        """
        if returns is not None:
            check_share("returns", returns)
        return within(self.hint_setting, returns)

    def disable(self) -> None:
        """Restore the model's own `generate` and free the blocks. A second call does nothing.

        Examples:
            >>> handle.disable()
            >>> "generate" in vars(model)  # the class's method runs again
            False
        """
        with self._lock:
            self.disabled = True
            self.documents.close()
            if self._engine is not None:
                self._engine.close()
            self._engine = None
            self._steps.drop()
            if not self.documents.entered:  # while a document is entered, its calls must be refused
                self._let_go()

    def _move_blocks(self, move: Callable[..., int], path: str | os.PathLike[str]) -> int:
        """Run `save` or `load` of `store.tiers` for the blocks of the model in its current state.

        Raises:
            ValueError: The model is not served.
        """
        model = self.model
        engine, adapters = (None, ()) if model is None else self._current(model)
        if engine is None:
            raise ValueError(f"model: cannot be served, {self.unsupported or 'caching is disabled'}")
        return move(self._identity.fingerprint(model), engine.store, adapters, path)

    def _set_up(self, model: Any) -> None:
        """Probe the model in its current state and make an empty cache for it, if it can be served."""
        if self._engine is not None:
            self._engine.leave_disk()
        self._engine, self.unsupported = None, None
        self.documents.forget()
        self._steps.drop()
        with own_passes(model) as functions, set_by_forward(model, functions) as transient:
            try:
                with refusing("the probe of the model fails"):
                    check_model(model)
                self._engine = self._make_engine(model)
            except UnsupportedError as error:
                self.unsupported = self._steps.reason = f"{type(model).__name__}: {error}"
                self._calls.warn_of_fallback(UnsupportedError(self.unsupported))
        identity = Identity(model, transient)
        if self._engine is not None and self.options.disk is not None:
            self._engine.open_disk(self.options.disk, identity.fingerprint(model))
        self._identity = identity
        self._served_before = self._calls.served
        self._steps.prepare(model, None)

    def _make_engine(self, model: Any) -> Engine:
        """Return the engine of a model, with reuse="gap" in place of "anywhere" if a kernel is wrong."""
        options = self.options
        if options.reuse == "anywhere":
            wrong = wrong_kernel(model, options.block_size, "moved")
            if wrong is not None:
                self._calls.warn("kernels", f'{wrong}. The model is served with reuse="gap" instead of "anywhere"')
                options = options._replace(reuse="gap")
        return Engine(model, options, self._steps, self._calls)

    def _serve(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's generate, over the cache if the call can be served."""
        gradients = torch.is_grad_enabled()
        try:
            return self._generate(args, kwargs)
        finally:  # an interrupt in the exit of generate's torch.no_grad would leave gradients off
            torch._C._set_grad_enabled(gradients)

    def _explain(self, arguments: dict[str, Any]) -> Explanation:
        """Return how far the only prompt of a call is cached, and why no further; see `PrefixCaching.explain`."""
        found: list[Explanation] = []

        def note(_: Engine, loop: Loop) -> torch.Tensor:
            check_loop(loop)
            found.extend(self._identified(loop).explain(loop))
            return loop.input_ids

        model, original = self._model_and_generate()
        if self.documents.current_document() is not None:
            raise ValueError("inputs: got a call over a compressed document, needs one outside of it")
        rename_cache(model, arguments)
        arguments = _arguments(original, model, (), arguments)
        try:
            prepared = self._prepared(model, arguments, note)
            if prepared is None:
                raise ValueError(f"model: cannot be served, {self.unsupported or 'caching is disabled'}")
            with kept_deltas(model), torch.no_grad():
                original(model, **prepared)
        except UnsupportedError as error:
            raise ValueError(f"inputs: got a call that is not served, {error}") from error
        if len(found) != 1:
            raise ValueError(f"inputs: got {len(found)} prompts, needs one")
        if found[0].reason == "never" and self._changed is not None:
            return replace(found[0], reason="changed", there=self._changed)
        return found[0]

    def _generate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call over the cache, or the model's own generate where that is not possible."""
        model, original = self._model_and_generate()
        self.last_requests = []
        rename_cache(model, kwargs)
        document = self.documents.current_document()
        if document is not None:
            return self._ask(document, model, _arguments(original, model, args, kwargs))
        self.documents.look_elsewhere(kwargs.get("inputs", kwargs.get("input_ids", args[0] if args else None)))
        restore = random_state(model.device)
        begun = False

        def run(engine: Engine, loop: Loop) -> Any:
            nonlocal begun
            begun = True  # from now on `_run` handles failures
            return self._run(engine, loop)

        try:
            prepared = self._prepared(model, _arguments(original, model, args, kwargs), run)
            if prepared is not None:
                return original(model, **prepared)
            if self.unsupported is not None:
                raise UnsupportedError(self.unsupported)
            failure = None
        except Exception as error:
            if begun:
                raise
            failure = _without_frames(error)
        if failure is None:  # caching was disabled
            with within(self._running, True):
                return original(model, *args, **kwargs)
        restore()
        return self._fall_back(failure, functools.partial(original, model, *args, **kwargs))

    def _ask(self, document: CompressedDocument, model: Any, arguments: dict[str, Any]) -> Any:
        """Run a call over a compressed document, after the checks that all calls must pass.

        Such a call never falls back, because full attention would give another result than the document. A call that
        cannot be served raises UnsupportedError or ValueError.
        """
        check_arguments_over_document(arguments)

        def answer(_: Engine, loop: Loop) -> Any:
            loop.stream_prompt()
            check_loop(loop)
            engine = self._identified(loop)
            content = self.documents.check(document, loop)
            with self._run_watched(loop), apart():
                result, self.last_requests = engine.run(loop, content)
            self._calls.serve(over_document=True)
            return result

        prepared = self._prepared(model, arguments, answer)
        if prepared is None:
            raise UnsupportedError(f"document: cannot be served, {self.unsupported or 'caching is disabled'}")
        return type(model).generate(model, **prepared)

    def _fall_back(self, failure: Exception, generate: Callable[[], Any]) -> Any:
        """Run the model's own generate because of a failure.

        An UnsupportedError is always counted. Another error is counted only if generate succeeds.
        """
        is_reason = isinstance(failure, UnsupportedError)
        if is_reason:
            self._calls.fall_back(failure)
        with within(self._running, True):
            result = generate()
        if not is_reason:
            self._calls.fall_back(failure)
        return result

    def _model_and_generate(self) -> tuple[Any, Any]:
        model: Any = self.model
        if model is None:
            raise RuntimeError("generate: the model of this handle was deleted")
        return model, type(model).generate

    def _prepared(
        self, model: Any, arguments: dict[str, Any], run: Callable[[Engine, Loop], Any]
    ) -> dict[str, Any] | None:
        """Return arguments of generate with a decoding loop that calls `run`; None if the model has no engine.

        `arguments` are changed. `run` must stream the prompt, unless nothing is generated.

        Raises:
            UnsupportedError: The call cannot be served.
        """
        check_arguments(arguments)
        check_mode(model, arguments)
        take_stop_strings(model, arguments)
        ask_for_cache(model, arguments)
        engine = self._engine if self._engine is not None else self._current(model)[0]
        if engine is None:
            return None
        images = take_images(model, arguments)
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
            function = loop_of(model, mode)
            known = {*_signature(function).parameters, "streamer"}  # even a loop of beams that sample gets it
            extra = {n: v for n, v in (given | {"inputs_tensor": inputs_tensor}).items() if v is not None}
            check_options(model, mode, generation_config, extra)
            options = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
            options |= {name: value for name, value in extra.items() if name in known}
            own = arguments.get("logits_processor") is not None
            prepared = (generation_config, options, model_kwargs, own, images)
            return run(engine, Loop(function, str(mode.value), model, input_ids, *prepared))

        decode.__signature__ = _DECODING  # type: ignore[attr-defined]  # generate inspects it three times in each call
        # generate must not stream the prompt itself: a call that falls back before the loop would stream it twice.
        return arguments | {"custom_generate": decode, "streamer": None}

    def _current(self, model: Any) -> tuple[Engine | None, tuple[str, ...]]:
        """Return the engine for the model in its current state, and the keys of the active adapters.

        A model that has changed is probed again and gets an empty cache.

        Raises:
            UnsupportedError: A call of the same thread is running and has temporarily changed the model.
        """
        with self._lock:
            if self.disabled or model.training:
                return (None if self.disabled else self._engine), ()
            before = self._identity
            if before.changed(model):
                refuse_if(
                    value_of(self._running),
                    "it runs inside a call of the same model, which has temporarily changed the model",
                )
                lived = self._calls.served - self._served_before
                self._set_up(model)
                self._changed = before.difference(self._identity)
                if lived:  # emptying a cache that no call used costs nothing
                    self._short_lives = self._short_lives + 1 if lived == 1 else 0
                if self._short_lives > 1:
                    self._calls.warn_of_never_hits(self._changed)
            return self._engine, self._identity.adapter_keys()

    def _reader(self) -> tuple[Any, tuple[str, ...]]:
        """Return the model in its current state for documents, and the keys of its adapters.

        Raises:
            ValueError: The model was deleted or is in training mode, caching is disabled, or a kernel is wrong.
        """
        model = self.model
        if model is None or self.disabled:
            raise ValueError("handle: needs a model that was not deleted, with caching enabled")
        if model.training:
            raise ValueError("model: is in training mode; call model.eval()")
        wrong = wrong_kernel(model, self.options.block_size, "documents")
        if wrong is not None:
            raise ValueError(f"model: got one that cannot read documents, because {wrong}")
        return model, self._current(model)[1]

    def _run(self, engine: Engine, loop: Loop) -> Any:
        """Run a loop over the cache. If it fails before the first token, run it again as generate would have run it."""
        loop.stream_prompt()
        restore, state = random_state(loop.model.device), loop.continued_state()
        bypasses = False
        try:
            check_loop(loop)
            bypasses = engine.bypasses(loop)
            if not bypasses:
                engine = self._identified(loop)
                with self._run_watched(loop):
                    result, reports = engine.run(loop)
        except Exception as error:
            if loop.answered:
                raise
            failure = _without_frames(error)
        else:
            if bypasses:
                with within(self._running, True):
                    result = loop.run()
                reports = [RequestReport.of(loop.input_ids.shape[1], ()) for _ in loop.input_ids]
            self.last_requests = reports
            self._calls.serve()
            return result
        restore()
        loop.restore_continued(state)
        return self._fall_back(failure, functools.partial(_run_plainly, loop))

    def _identified(self, loop: Loop) -> Engine:
        """Set the fields of a loop that say what its KV depends on, and return its engine."""
        with self._lock:
            engine, _ = self._current(loop.model)
            if engine is None:
                raise UnsupportedError(self.unsupported or "caching was disabled while the call started")
            # In this order, since another thread may switch adapters between the two lines.
            unchanged = self._identity.watch(loop.model)
            adapters = self._identity.adapter_keys()
        as_before = watch_torch(loop.model)
        loop.unchanged = lambda: as_before() and unchanged()
        loop.adapters = self._row_adapters(loop)
        if loop.images is not None:
            refuse_if(loop.adapters, "images with adapter_names")
            loop.images = loop.images.under(adapters)
        loop.salt, loop.returns = value_of(self.salt_setting), value_of(self.hint_setting)
        lengths = [loop.input_ids.shape[1]] if loop.mask is None else loop.mask.sum(-1).tolist()
        keys = rope_keys(loop.model.config, lengths, loop.generation_config.max_length, engine.in_pieces(loop))
        if loop.model_kwargs.get("token_type_ids") is not None:  # equal tokens may have other KV
            keys = (*keys, "token_type_ids")
        loop.extra_keys = (*keys, *precision_keys(loop.model), *adapters)
        return engine

    @contextmanager
    def _run_watched(self, loop: Loop) -> Iterator[None]:
        """Return a context to run a loop in, which refuses a hook on all modules that changes the first passes."""

        def refuse() -> None:
            refuse_if(not loop.answered, REASON)

        unchanged = loop.unchanged
        with kept_deltas(loop.model), within(self._running, True), watched_hooks(refuse) as hooks_unchanged:
            loop.unchanged = lambda: hooks_unchanged() and unchanged()  # no cycle, which would keep the loop in memory
            yield

    def _row_adapters(self, loop: Loop) -> list[str] | None:
        """Return the PEFT adapter of each row, or None if the call names none.

        Raises:
            UnsupportedError: There is not one name for each row, or rows have other settings too.
        """
        settings = self._identity.row_settings()
        names = settings.pop("adapter_names", None)
        others = settings or (names is not None and len(names) != len(loop.input_ids))
        refuse_if(others, "rows have adapter settings other than one name for each row")
        return names if names is None else [str(name) for name in names]

    @property
    def model(self) -> Any:
        """The model; None if it was deleted."""
        return self._model()

    @property
    def store(self) -> PromptStore | None:
        """The store of the cache; None if the model cannot be served."""
        return None if self._engine is None else self._engine.store

    def _let_go(self) -> None:
        """Restore the model's own generate if caching is disabled. Callers check that no document is entered."""
        model = self.model
        handle = None if model is None else getattr(vars(model).get("generate"), "handle", None)
        if isinstance(handle, PrefixCaching) and handle.disabled:
            restore_method(model, "generate")

    def _warn_of_graphs(self, reason: str) -> None:
        self._calls.warn("graphs", f"{reason}. Decode steps run without CUDA graphs.")


def _run_plainly(loop: Loop) -> Any:
    """Run a loop without this cache, as the model's own generate does."""
    if loop.images is None:
        return loop.run()
    encoded = encoded_by_model(loop.images, loop.model, loop.input_ids, loop.repeats)
    return loop.run(mm_encoder_outputs=encoded)


def random_state(device: torch.device) -> Callable[[], None]:
    """Return a function that restores the present states of the random generators from which generate draws."""
    host = torch.get_rng_state()
    module = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    on_device = None if module is None else module.get_rng_state(device)

    def restore() -> None:
        torch.set_rng_state(host)
        if module is not None:
            module.set_rng_state(on_device, device)

    return restore


def _without_frames(error: Exception) -> Exception:
    """Return an error without tracebacks. Their frames would hold memory that the second run of the call needs."""
    logger.debug("a call falls back to the model's own generate", exc_info=error)
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__, seen = None, seen.__cause__ or seen.__context__
    return error


def _arguments(generate: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of generate by name."""
    arguments = _signature(generate).bind(model, *args, **kwargs).arguments
    del arguments["self"]
    arguments.update(arguments.pop("kwargs", {}))
    return arguments


@functools.lru_cache(64)
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


_DECODING = inspect.signature(
    lambda model, input_ids, logits_processor, stopping_criteria, generation_config, inputs_tensor=None, **kwargs: None
)
"""Signature of a decoding loop as generate calls it."""


def _forget(handle: weakref.ref[PrefixCaching]) -> None:
    """Free the engine, identity and graphs of a handle whose model was deleted."""
    gone = handle()
    if gone is not None:
        gone.__dict__.pop("_identity", None)
        gone._engine, gone.disabled = None, True
        gone._steps.drop()
