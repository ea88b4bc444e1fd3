"""`enable_continuous_batching`: puts a handle before a model's own `init_continuous_batching`."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ....cache import CacheManager
from ....cache.allocation import CacheStats
from ..calls import callers_level
from ..enable import generating_model
from ..identity import Identity, set_by_forward
from ..memory import default_num_blocks
from ..paged.layers import layer_windows
from ..paged.probe import probe
from ..salts import Salts
from ..support import UnsupportedError, check_model, rope_keys
from .blocks import ScheduledBlocks
from .replaced import REPLACED, Initialize
from .shared import SharedBlocks
from .step import GroupedStorage, allocate_layers
from .versions import check_version

KEPT = "_cached_continuous_batching_manager"
"""Where transformers keeps a manager from one call to the next."""
UNBOUNDED = 1 << 30


def enable_continuous_batching(
    model: Any, num_blocks: int | None = None, block_size: int = 16, policy: Any = "default"
) -> ContinuousBatching:
    """Runs transformers' continuous batching of a model over blocks, until `disable` is called.

    `model.generate_batch`, `model.init_continuous_batching` and `transformers serve` are used as before and give the
    tokens they gave before. Prompts share the blocks of what they begin with, models with sliding windows too, from one
    call to the next; under pressure one block at a time is evicted. Changed weights, settings and adapters are noticed:
    requests that start then share nothing with earlier ones.

    Args:
        model: A transformers model that generates text, or PEFT's around one, loaded on its device.
        num_blocks: Blocks of the cache. None: what fits in a fifth of the device's free memory (on a CPU a fifth of all
            memory, 4 GiB at most), and no more than 32 of the model's longest sequences need.
        block_size: Tokens of a block; 4 or more.
        policy: Which block is evicted first: a name or class of `EvictionPolicy`, see `CacheManager`.

    Returns:
        The handle: `stats()`, `salt()`, `reset()`, `disable()`; also a context manager that disables at its end.

    Raises:
        UnsupportedError: Transformers is of another version, or its continuous batching, or the blocks, do not run this
            model; says which.
        TypeError: `model` has no `generate` of transformers, or `num_blocks` or `block_size` is not an integer.
        ValueError: Continuous batching is already enabled for this model, or one of transformers' own is kept on it; a
            number is out of range, or the policy unknown.

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
    for name, value, least in (("num_blocks", num_blocks, 1), ("block_size", block_size, 4)):
        if value is None and name == "num_blocks":
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: got {type(value).__name__}, needs an int")
        if value < least:
            raise ValueError(f"{name}: got {value}, needs at least {least}")
    check_version(ScheduledBlocks)
    model = generating_model(model)
    replaced = vars(model).get(REPLACED)
    if isinstance(replaced, Initialize) and replaced.handle is not None:
        raise ValueError("model: continuous batching is already enabled; call disable() on its handle first")
    if replaced is not None and not isinstance(replaced, Initialize):
        raise ValueError(f"model: its {REPLACED} was already replaced on this instance; undo that first")
    if getattr(model, KEPT, None) is not None:
        raise ValueError("model: keeps a manager of its own; call destroy_cached_continuous_batching_manager() first")
    handle = ContinuousBatching(model, num_blocks, block_size, policy)
    vars(model)[REPLACED] = Initialize(model, handle)
    return handle


class ContinuousBatching:
    """What `enable_continuous_batching` returns.

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

    def __init__(self, model: Any, num_blocks: int | None, block_size: int, policy: Any) -> None:
        self.block_size = block_size
        self._model: weakref.ref[Any] = weakref.ref(model)
        self._num_blocks, self._policy = num_blocks, policy
        self._lock = threading.RLock()
        self._salts = Salts()
        self._told: set[str] = set()
        self._epoch = 0
        self._disabled = False
        CacheManager(1, block_size, policy=policy)  # a wrong policy is told of before the model is looked at
        self._set_up(model)

    def _set_up(self, model: Any) -> None:
        """Looks at the model as it is now and makes empty blocks for it."""
        try:
            _check(model)
            with set_by_forward(model) as passing:
                bytes_per_block = probe(model, self.block_size)
            windows = layer_windows(model.config)
        except UnsupportedError as error:
            raise UnsupportedError(f"{type(model).__name__}: {error.reason}", error.detail) from error
        self._passing = frozenset(passing)
        num_blocks = self._num_blocks or default_num_blocks(model, bytes_per_block, self.block_size)
        num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
        storage = GroupedStorage(num_blocks, self.block_size, windows, num_layers)
        allocate_layers(model, storage)
        manager = CacheManager(num_blocks, self.block_size, policy=self._policy, groups=storage.groups.specs())
        self._shared = SharedBlocks(manager, storage)
        self._placed = (model.dtype, model.device)
        self._identity = Identity(model, passing=self._passing)

    def __enter__(self) -> ContinuousBatching:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.disable()

    @property
    def manager(self) -> Any:
        """Hands out the blocks."""
        return self._shared.manager

    def stats(self) -> CacheStats:
        """Counts of the cache; a request that waited for room, or for another that computed its prefix, counts once."""
        return self._shared.stats()

    def salt(self, salt: Any) -> AbstractContextManager[None]:
        """Within it, requests that this thread submits share blocks only with requests of the same salt.

        Args:
            salt: str, bytes or int.

        Raises:
            TypeError: `salt` is None or of another type.
        """
        return self._salts.within(salt)

    def reset(self) -> None:
        """Requests that start from now on share nothing with earlier ones, whose blocks go as room is needed."""
        with self._lock:
            self._epoch += 1

    def disable(self) -> None:
        """Gives the model its own `init_continuous_batching` back; a second call does nothing.

        Managers that run go on over their blocks until they are stopped; one that transformers keeps on the model for
        its next call is destroyed.
        """
        with self._lock:
            model, self._disabled = self._model(), True
        if model is None or getattr(vars(model).get(REPLACED), "handle", None) is not self:
            return
        kept = getattr(model, KEPT, None)
        if getattr(kept, "_handle", None) is self:
            model.destroy_cached_continuous_batching_manager()
        del vars(model)[REPLACED]

    def session(
        self, generation_config: Any = None, continuous_batching_config: Any = None, workload_hints: Any = None
    ) -> Any:
        """The model's `init_continuous_batching`: a manager over blocks, or the one that was kept."""
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        from .session import Session

        model = self._model()
        if model is None:
            raise RuntimeError("init_continuous_batching: the model of this handle is gone")
        kept = getattr(model, KEPT, None)
        if isinstance(kept, Session):
            return kept
        generation_config = model.generation_config if generation_config is None else generation_config
        if generation_config.eos_token_id is None:
            generation_config.eos_token_id = -1  # as transformers does: none
        settings = continuous_batching_config or getattr(generation_config, "continuous_batching_config", None)
        return Session(self, model, generation_config, settings or ContinuousBatchingConfig(), workload_hints)

    # What sessions ask.

    def current_salt(self) -> Any:
        """The salt of the thread that calls."""
        return self._salts.current

    def shared(self, model: Any) -> SharedBlocks:
        """The blocks for the model as it is now: those of another dtype or device cannot hold its keys and values."""
        with self._lock:
            if not self._disabled and (model.dtype, model.device) != self._placed:
                self._set_up(model)
            return self._shared

    def blocks(self, model: Any, sharing: bool, max_batch_tokens: int) -> ScheduledBlocks:
        """What stands in for transformers' cache in a session."""
        return ScheduledBlocks(self.shared(model), self._keys, sharing, max_batch_tokens)

    def _keys(self) -> tuple[str, ...]:
        """What the KV of a request that starts now depends on besides its tokens."""
        with self._lock:
            model = self._model()
            if model is not None and self._identity.changed(model):
                self._identity = Identity(model, passing=self._passing)
                self._epoch += 1
            return (f"model {self._epoch}", *self._identity.adapter_keys())

    def refusal(self, model: Any, tokens: Sequence[int], max_new_tokens: int | None, capacity: int) -> str | None:
        """Why a request cannot be served; None when it can."""
        vocabulary = model.get_input_embeddings().num_embeddings
        if not tokens:
            return "input_ids: got no token, needs one"
        if not all(isinstance(token, int) for token in tokens) or min(tokens) < 0 or max(tokens) >= vocabulary:
            return f"input_ids: got tokens out of range, needs integers from 0 to {vocabulary - 1}"
        if len(tokens) > capacity:
            return f"input_ids: got {len(tokens)} tokens, needs at most {capacity}, which the blocks hold"
        try:
            rope_keys(model.config, [0], len(tokens) + (UNBOUNDED if max_new_tokens is None else max_new_tokens))
        except UnsupportedError as error:
            return str(error)
        return None

    def tell_of_options(self, settings: Any, not_ours: dict[str, Any]) -> None:
        """Warns once of each option of a continuous batching config that has no meaning here."""
        default = type(settings)()
        for name in (*not_ours, "num_blocks"):
            value = getattr(settings, name)
            if value in (getattr(default, name), not_ours.get(name)) or name in self._told:
                continue
            self._told.add(name)
            warnings.warn(
                f"continuous batching over blocks: {name}={value!r} has no meaning here and is left out",
                UserWarning,
                stacklevel=callers_level(),
            )


def _check(model: Any) -> None:
    """Raises UnsupportedError for a model that transformers' continuous batching, or the blocks, do not run."""
    from transformers.generation.continuous_batching.cache import group_layers_by_attn_type

    try:
        group_layers_by_attn_type(model.config.get_text_config())
    except ValueError as error:
        raise UnsupportedError(
            f"transformers' own continuous batching does not run its layers: {error}; for layers with a state see its "
            "issue 48305"
        ) from error
    check_model(model)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise UnsupportedError("several processes generate together")
