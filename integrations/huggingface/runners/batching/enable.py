"""`enable_continuous_batching`, which replaces a model's `init_continuous_batching`, and its handle."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from .....cache import CacheManager
from ....seam import check_fallback
from ....tested import say_untested
from ...api import ContinuousBatchingConfig, check_batching, check_layers, kept_manager, look, unshared
from ...calls import Calls, ServedStats, UnsupportedError, refuse_if, unsupported_by
from ...enable import generating_model
from ...identity import Identity, set_by_forward
from ...loop import watch_torch
from ...probe import own_passes, probe
from ...replaced import check_not_replaced, replace_method, restore_method
from ...settings import CacheOptions, check_number, check_salt, within
from ...store.kept import PromptStore
from ...support import check_model, precision_keys
from ...visits import check_manager
from ..packed import layer_windows, probe_packed
from .blocks import ScheduledBlocks

REPLACED = "init_continuous_batching"


def enable_continuous_batching(
    model: Any,
    num_blocks: int | None = None,
    block_size: int = 16,
    policy: Any = "default",
    deterministic: bool = False,
    fallback: str = "warn",
) -> ContinuousBatching:
    """Run transformers' continuous batching of a model over blocks, until `disable` is called.

    Use `model.generate_batch`, `model.init_continuous_batching` and `transformers serve` as before. The tokens stay the
    same. Prompts share the blocks of their common prefix across calls, also in models with sliding windows. If the
    cache is full, single blocks are evicted. If weights, settings or adapters change, the handle notices it. Later
    requests then share nothing with earlier ones. If this library fails before a manager starts, transformers' own
    manager serves its requests.

    Args:
        model: A transformers model that generates text, or a PEFT model around it, already on its device.
        num_blocks: Number of blocks in the cache. None: as many as fit into a fifth of the device's free memory, but no
            more than 32 sequences of maximum length need. On a CPU: a fifth of all memory, at most 4 GiB.
        block_size: Number of tokens in a block, at least 4.
        policy: Eviction policy: a name or a class of `EvictionPolicy`, see `CacheManager`.
        deterministic: Must be False. Only `enable_prefix_caching` supports it, see `docs/determinism.md`.
        fallback: "warn": if a manager cannot run over blocks, transformers' own manager runs instead. `stats()` and one
            warning name the reason. "raise": starting the manager raises an UnsupportedError with the reason.

    Returns:
        The handle: `stats()`, `salt()`, `reset()`, `disable()`. As a context manager it disables at the end of the
        block.

    Raises:
        UnsupportedError: The installed transformers is too old, or its functions have changed. Or its continuous
            batching or the blocks cannot run this model. Or `deterministic` is True.
        TypeError: `model` has no `generate` of transformers, or `num_blocks` or `block_size` is not an integer. Or
            `policy` is neither a name nor a class of `EvictionPolicy`.
        ValueError: Continuous batching is already enabled for this model, or transformers keeps a manager of its own on
            the model. Or a number is out of range, or the policy or `fallback` is unknown.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from pc.integrations.huggingface import enable_continuous_batching
        >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
        >>> handle = enable_continuous_batching(model, num_blocks=64)
        >>> prompts = [list(range(3, 43)), list(range(3, 40)) + [50]]  # they share 37 tokens
        >>> answers = model.generate_batch(prompts, max_new_tokens=4, progress_bar=False)
        >>> [len(answer.generated_tokens) for answer in answers.values()]
        [4, 4]
        >>> handle.disable()
    """
    check_number("num_blocks", num_blocks, 1, optional=True)
    check_number("block_size", block_size, 4)
    refuse_if(
        deterministic, "deterministic=True: a step computes all running requests together; use enable_prefix_caching"
    )
    check_fallback(fallback)
    model = generating_model(model)
    check_not_replaced(model, REPLACED, "continuous batching")
    if kept_manager(model) is not None:
        raise ValueError("model: keeps a manager of its own; call destroy_cached_continuous_batching_manager() first")
    handle = ContinuousBatching(model, num_blocks, block_size, policy, fallback)
    replace_method(model, REPLACED, handle.session)
    return handle


class ContinuousBatching:
    """The handle that `enable_continuous_batching` returns.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from pc.integrations.huggingface import enable_continuous_batching
        >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
        >>> with enable_continuous_batching(model, num_blocks=64) as handle:
        ...     for turn in range(2):
        ...         answers = model.generate_batch([list(range(3, 43))], max_new_tokens=4, progress_bar=False)
        >>> handle.stats().hit_tokens  # the second time
        32
    """

    def __init__(
        self, model: Any, num_blocks: int | None, block_size: int, policy: Any, fallback: str = "warn"
    ) -> None:
        self.block_size = block_size
        self.untested = say_untested("transformers", "torch")
        """The installed versions that are not among the tested ones, as text; None if all are tested."""
        self._failure: UnsupportedError | None = None
        self._model: weakref.ref[Any] = weakref.ref(model)
        self._num_blocks, self._policy = num_blocks, policy
        self._lock = threading.RLock()
        self.salt_setting = object()
        self._epoch = 0
        self._disabled = False
        self._shared: Any = None
        self.calls = Calls(fallback, "continuous batching over blocks", "transformers' own continuous batching")
        CacheManager(1, block_size, policy=policy)  # reports a wrong policy before the model is probed
        try:
            look()
            check_batching(ScheduledBlocks)
            self._set_up(model)
        except UnsupportedError:
            raise
        except Exception as error:
            self.calls.raise_if_asked(error)
            failure = unsupported_by(error)
            self._shared, self._failure = None, failure
            self.calls.warn_of_fallback(failure)

    def _set_up(self, model: Any) -> None:
        """Probe the model in its current state, and make empty blocks for it unless the existing ones fit.

        Raises:
            UnsupportedError: The model is not served.
        """
        num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
        try:
            _check(model)
            with own_passes(model) as functions, set_by_forward(model, functions) as transient:
                windows, probed = layer_windows(model.config), probe(model)
                specs = probed.specs
                refuse_if(len(specs) != num_layers, f"{len(specs)} of its {num_layers} layers cache keys and values")
                wrong = probe_packed(model, self.block_size, specs)
                if wrong is not None:
                    raise wrong
        except UnsupportedError as error:
            raise UnsupportedError(f"{type(model).__name__}: {error.reason}", error.detail) from error
        if self._shared is None or (self._shared.storage.specs, self._shared.storage.windows) != (specs, windows):
            options = CacheOptions(self._num_blocks, self.block_size, self._policy)
            self._shared = PromptStore(model, options, probed, scheduled=True)
        self._identity = Identity(model, transient)
        self._epoch += 1

    def __enter__(self) -> ContinuousBatching:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.disable()

    @property
    def unsupported(self) -> str | None:
        """The reason why transformers' own continuous batching serves the model; None if blocks serve it."""
        return None if self._failure is None else str(self._failure)

    @property
    def manager(self) -> Any:
        """The manager of the blocks; None if the model cannot be served."""
        return None if self._shared is None else self._shared.manager

    def stats(self) -> ServedStats:
        """Return the counts of the cache, the number of managers that ran over blocks, and the fallbacks by reason.

        A request counts once, also if it waited for room or for another request that computed its prefix.
        """
        return self.calls.stats(self._shared)

    def salt(self, salt: Any) -> AbstractContextManager[None]:
        """Return a context in which requests of this thread share blocks only with requests of the same salt.

        Args:
            salt: str, bytes or int.

        Raises:
            TypeError: `salt` is None or of another type.
        """
        check_salt(salt)
        return within(self.salt_setting, salt)

    def reset(self) -> None:
        """Let later requests share nothing with earlier ones, whose blocks are evicted when room is needed."""
        with self._lock:
            self._epoch += 1

    def disable(self) -> None:
        """Restore the model's own `init_continuous_batching`; a second call does nothing.

        Running managers continue over their blocks until they are stopped. A manager that transformers keeps on the
        model for its next call is destroyed.
        """
        with self._lock:
            model, self._disabled = self._model(), True
        if model is None or getattr(vars(model).get(REPLACED), "handle", None) is not self:
            return
        kept = kept_manager(model)
        if getattr(kept, "_handle", None) is self:
            model.destroy_cached_continuous_batching_manager()
        restore_method(model, REPLACED)

    def session(
        self, generation_config: Any = None, continuous_batching_config: Any = None, workload_hints: Any = None
    ) -> Any:
        """Replace `init_continuous_batching`: return a new manager over blocks, or the one kept on the model.

        If this library fails, return a manager of transformers' own.
        """
        model = self._model()
        if model is None:
            raise RuntimeError("init_continuous_batching: the model of this handle was deleted")
        check_manager(model)
        given = generation_config, continuous_batching_config, workload_hints
        try:
            return self._session(model, *given)
        except Exception as error:
            self.calls.raise_if_asked(error)
            alone = unshared(model, generation_config, continuous_batching_config)
            made = type(model).init_continuous_batching(model, generation_config, alone, workload_hints)
            self.calls.fall_back(error)
            return made

    def _session(self, model: Any, generation_config: Any, continuous_batching_config: Any, hints: Any) -> Any:
        """Return a session. Raise UnsupportedError if the model cannot be served."""
        from .session import Session

        kept = kept_manager(model)
        if isinstance(kept, Session):
            return kept
        if self._failure is not None:
            raise UnsupportedError(self._failure.reason, self._failure.detail)
        refuse_if(kept is not None, "a manager of transformers' own is kept on the model")
        generation_config = model.generation_config if generation_config is None else generation_config
        if generation_config.eos_token_id is None:
            generation_config.eos_token_id = -1  # as in transformers: no token
        settings = continuous_batching_config or getattr(generation_config, "continuous_batching_config", None)
        return Session(self, model, generation_config, settings or ContinuousBatchingConfig(), hints)

    # The interface for sessions.

    def shared(self, model: Any) -> PromptStore:
        """Return the blocks for the model in its current state. A changed model is probed again.

        Raises:
            UnsupportedError: The changed model is not served.
        """
        with self._lock:
            if not self._disabled and self._identity.changed(model):
                self._set_up(model)
            shared: PromptStore = self._shared
            return shared

    def blocks(self, model: Any, sharing: bool, max_batch_tokens: int) -> ScheduledBlocks:
        """Return the cache of a new session."""
        return ScheduledBlocks(self.shared(model), self._keys, self._watch, sharing, max_batch_tokens)

    def _watch(self) -> Callable[[], bool]:
        """Return a function that returns whether the model, and what torch computes, are unchanged since this call."""
        model = self._model()
        if model is None:
            return lambda: False
        epoch, as_before, unchanged = self._epoch, watch_torch(model), self._identity.watch(model)
        return lambda: self._epoch == epoch and as_before() and unchanged()

    def _keys(self, shared: PromptStore) -> tuple[str, ...]:
        """Return the extra keys of a request that starts now: everything that its KV depends on besides its tokens.

        Raises:
            UnsupportedError: The model has changed, and is not served or no longer fits these blocks.
        """
        model = self._model()
        with self._lock:
            if model is not None and not self._disabled and self.shared(model) is not shared:
                raise UnsupportedError(
                    "its keys and values do not fit the blocks of this manager: stop it and start a new one"
                )
            precision = () if model is None else precision_keys(model)
            return (f"model {self._epoch}", *precision, *self._identity.adapter_keys())


def _check(model: Any) -> None:
    """Raise UnsupportedError for a model that transformers' continuous batching or the blocks cannot run."""
    try:
        check_layers(model.config.get_text_config())
    except ValueError as error:
        raise UnsupportedError(
            f"transformers' own continuous batching does not run its layers: {error}; for layers with a state see its "
            "issue 48305"
        ) from error
    check_model(model)
