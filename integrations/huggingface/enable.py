"""`enable_prefix_caching`: puts a handle before a model's own `generate`, through which users see its cache."""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from ...cache import Explanation
from ...cache.manager import REUSES
from ...triton_ops._checks import check_share
from ..tested import say_untested
from .api import Framework, GenerationMixin
from .calls import RequestReport, ServedStats
from .compression.document import CompressedDocument
from .paged.graphs import GraphReport
from .serving import Serving
from .settings import CacheOptions, check_number

RECOMPUTE = 0.1
"""Share of moved tokens computed again: see docs/reuse_anywhere.md for what others lose."""


def enable_prefix_caching(
    model: Any,
    num_blocks: int | None = None,
    block_size: int = 16,
    policy: Any = "default",
    reuse: str = "prefix",
    host_blocks: int = 0,
    cuda_graphs: bool | None = None,
    disk: str | os.PathLike[str] | None = None,
    disk_bytes: int | None = None,
    window_blocks: int | None = None,
    recompute: float | None = None,
    deterministic: bool = False,
    chunk: int = 128,
    fallback: str = "warn",
) -> PrefixCaching:
    """Let `model.generate` reuse the KV of prompts it has seen, until `disable` is called.

    The tokens are those of the model's own generate. A call that cannot be served (encoder-decoder models, caches of
    your own, see `docs/huggingface.md`) goes to the model's own generate, with one warning that says why. A call that
    fails in this library before its first token goes there too. Changed weights, buffers and settings are noticed, and
    the cache starts anew.

    Args:
        model: A transformers model that generates text, or PEFT's around one, loaded on its devices.
        num_blocks: Blocks of the cache. None: what fits in a fifth of the device's free memory (on a CPU a fifth of
            all memory, 4 GiB at most), and no more than 32 of the model's longest sequences need.
        block_size: Tokens of a block.
        policy: Which block is evicted first: a name or an `EvictionPolicy`, see `CacheManager`.
        reuse: "prefix": the leading run of cached blocks. "gap": cached blocks behind an evicted one too; the tokens
            between are computed again. "anywhere": behind the prefix also text that is cached at another position or
            behind other text: documents in another order, a conversation with its middle left out. **Approximate**: its
            keys are turned to their places, but they were computed behind other text, so tokens may differ from those
            without it; a share is computed again (`recompute`). What was computed so is kept apart.
        host_blocks: Evicted blocks that are kept in host memory, to be read again.
        cuda_graphs: Whether decode steps are captured in CUDA graphs and replayed. None: where that is possible, see
            `docs/huggingface.md`; what cannot be captured runs eagerly.
        disk: A directory for evicted blocks, and for all when caching is disabled; later processes with the same
            model, weights and block size read them. None: no block is written.
        disk_bytes: Bytes of those at most, those used longest ago go first. None: no limit.
        window_blocks: Blocks of layers with a sliding window, which need those of the window and of what is written at
            a time, however long a prompt is; with more of them, more of what was computed is found again. None: as
            many as of other layers.
        recompute: With "anywhere" the share of tokens found elsewhere that are computed again, the first of each piece,
            0 to 1; with 1 all are, and results are those without it but for rounding. None: 0.1.
        deterministic: Whether logits are the same to the last bit whatever is cached and whatever else is in the
            batch: each row is computed by itself, and its prompt in chunks, see `docs/determinism.md`.
        chunk: Tokens of such a chunk, at whose multiples hits end.
        fallback: "warn": a call that cannot be served goes to the model's own generate. "raise": it raises an
            UnsupportedError that names the reason, for tests that must notice.

    Returns:
        The handle: `stats()`, `last_requests`, `salt()`, `hint()`, `graphs`, `reset()`, `disable()`; also a context
        manager that disables at its end.

    Raises:
        TypeError: `model` has no `generate` of transformers, or `num_blocks`, `block_size` or `chunk` is not an
            integer, or `cuda_graphs` or `deterministic` not a bool.
        ValueError: Caching is already enabled for this model, a number is out of range, `policy` is one instance for
            a model with several groups of layers, `cuda_graphs` is True and its decode steps cannot be captured,
            `disk` is empty, `disk_bytes` is given without it, or `recompute` without "anywhere", or `deterministic`
            with it, or with a `chunk` that is no multiple of `block_size`, or `fallback` is unknown.
        OSError: The directory cannot be made.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from pc.integrations.huggingface import enable_prefix_caching
        >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
        >>> handle = enable_prefix_caching(model, num_blocks=64)
        >>> prompt = torch.arange(3, 43)[None]  # [1, 40]
        >>> tokens = model.generate(prompt, max_new_tokens=4)
        >>> tokens = model.generate(prompt, max_new_tokens=4)  # the second time
        >>> handle.last_requests
        [RequestReport(prompt_tokens=40, cached_tokens=32, cached_spans=((0, 32),))]
        >>> handle.disable()
    """
    for name, value, least in (("block_size", block_size, 1), ("host_blocks", host_blocks, 0)):
        check_number(name, value, least)
    for name, most in (("num_blocks", num_blocks), ("window_blocks", window_blocks), ("disk_bytes", disk_bytes)):
        check_number(name, most, 1, optional=True)
    if reuse not in REUSES:
        raise ValueError(f"reuse: got {reuse!r}, needs one of {', '.join(REUSES)}")
    if fallback not in ("warn", "raise"):
        raise ValueError(f"fallback: got {fallback!r}, needs 'warn' or 'raise'")
    if cuda_graphs is not None and not isinstance(cuda_graphs, bool):
        raise TypeError(f"cuda_graphs: got {type(cuda_graphs).__name__}, needs a bool or None")
    if disk is not None and not isinstance(disk, str | os.PathLike):
        raise TypeError(f"disk: got {type(disk).__name__}, needs a path or None")
    if disk is not None and not os.fspath(disk):
        raise ValueError("disk: got '', needs a directory or None")
    if disk_bytes is not None and disk is None:
        raise ValueError(f"disk_bytes: got {disk_bytes} without disk, needs a directory that it bounds")
    share = _share(recompute, reuse)
    check_number("chunk", chunk, 1)
    _check_deterministic(deterministic, chunk, block_size, reuse, cuda_graphs)
    model = generating_model(model)
    check_not_replaced(model, "generate", "prefix caching")
    options = CacheOptions(num_blocks, block_size, policy, reuse, host_blocks, disk, disk_bytes, window_blocks, share)
    options = options._replace(fallback=fallback, chunk=chunk if deterministic else None)
    serving = Serving(model, options, cuda_graphs)
    handle = PrefixCaching(serving)
    if cuda_graphs and handle.graphs.reason is not None:
        raise ValueError(f"cuda_graphs: got True, needs steps that can be captured, and {handle.graphs.reason}")
    vars(model)["generate"] = ReplacedMethod(model, "generate", serving.generate)
    return handle


def _share(recompute: Any, reuse: str) -> float:
    """`recompute` as a number; TypeError or ValueError: it is none of 0 to 1, or not asked for."""
    if recompute is None:
        return RECOMPUTE
    if reuse != "anywhere":
        raise ValueError(f'recompute: got {recompute!r} with reuse={reuse!r}, needs reuse="anywhere"')
    return check_share("recompute", recompute)


def _check_deterministic(deterministic: Any, chunk: int, block_size: int, reuse: str, cuda_graphs: bool | None) -> None:
    """Raises TypeError or ValueError for arguments under which bits cannot be held, or chunks not be kept."""
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic: got {type(deterministic).__name__}, needs a bool")
    if deterministic and chunk % block_size:
        raise ValueError(f"chunk: got {chunk}, needs a multiple of block_size={block_size}")
    if deterministic and reuse == "anywhere":
        raise ValueError('deterministic: got True with reuse="anywhere", which is approximate')
    if deterministic and cuda_graphs:
        raise ValueError("deterministic: got True with cuda_graphs=True, needs steps of one row, which run eagerly")


class PrefixCaching:
    """What `enable_prefix_caching` returns.

    Examples:
        Those of its methods go on from this one.

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

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self.untested = say_untested("transformers", "torch")
        """The installed versions that no test of ours passed on, in words; None if there is none."""

    def __enter__(self) -> PrefixCaching:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.disable()

    @property
    def unsupported(self) -> str | None:
        """Why the model cannot be served; None when it can."""
        return self._serving.unsupported

    @property
    def framework(self) -> Framework:
        """The version of transformers that the handle found, and which features it cannot serve with it."""
        return self._serving.framework

    @property
    def last_requests(self) -> list[RequestReport]:
        """A report per row of the last call, in the order of the batch; empty when it was not served here."""
        return self._serving.last_requests

    @property
    def manager(self) -> Any:
        """Hands out the blocks; None when the model cannot be served."""
        return self._serving.manager

    @property
    def graphs(self) -> GraphReport:
        """How decode steps ran: captured in CUDA graphs, or eagerly and why."""
        return self._serving.steps.report()

    def stats(self) -> ServedStats:
        """Counts of the cache since it was last empty, and of all calls: served, and by reason those that fell back.

        Examples:
            >>> handle.stats().calls_served, handle.stats().queried_tokens
            (2, 80)
        """
        return self._serving.stats()

    def reset(self) -> None:
        """Forgets every cached block; calls under way go on with those they have.

        Examples:
            >>> handle.reset()
            >>> handle.stats().cached_blocks
            0
        """
        self._serving.reset()

    def save(self, path: str | os.PathLike[str]) -> int:
        """Writes every cached block to a file for its owner alone (0600): it holds what prompts can be guessed from.

        Args:
            path: The file; one that is there is replaced.

        Returns:
            How many blocks it has.

        Raises:
            ValueError: The model is not served, or by packed passes, whose blocks stay on the device.
            OSError: The file cannot be written.

        Examples:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     count = handle.save(f"{folder}/blocks")
            >>> count
            2
        """
        engine, model, adapters = self._serving.saved_engine()
        return engine.save(model, adapters, path)

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
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     count = handle.save(f"{folder}/blocks")
            ...     handle.disable()
            ...     handle = enable_prefix_caching(model, num_blocks=64)  # another process, later
            ...     count = handle.load(f"{folder}/blocks")
            >>> tokens = model.generate(prompt, max_new_tokens=4)
            >>> handle.last_requests
            [RequestReport(prompt_tokens=40, cached_tokens=32, cached_spans=((0, 32),))]
        """
        engine, model, adapters = self._serving.saved_engine()
        return engine.load(model, adapters, path)

    def compress(self, context_ids: Any, press: Any = "snapkv", budget: float = 0.5) -> CompressedDocument:
        """Reads a text once and keeps a part of its keys and values, the tokens that each head needs most.

        **Approximate**, unlike all else here, and so never done unasked: calls within `with document:` read what was
        kept, every other call is exact as before.

        Args:
            context_ids: The text's tokens, `[1, length]` or `[length]`.
            press: Which tokens are kept: "snapkv" (those the last tokens attend to), "expected_attention" (those that
                queries like the last ones will attend to), "knorm" (keys of small norm), "streaming" (the first and
                the last), budgets over heads as Ada-KV gives them; or an object of kvpress.
            budget: Share of the tokens that a press by name keeps; one of kvpress has its own.

        Returns:
            The document. The same text, press and budget again give what was kept, as long as it fits in memory.

        Raises:
            TypeError: `press` is neither a name nor an object of kvpress, or `budget` is no number.
            ValueError: No such press, a budget out of range, no tokens, or a model whose keys and values are not kept
                by layers of full attention called through transformers' interface.

        Examples:
            >>> document = handle.compress(prompt[:, :32], budget=0.25)
            >>> with document:
            ...     tokens = model.generate(prompt, max_new_tokens=4)
            >>> tokens.shape
            torch.Size([1, 44])
        """
        return self._serving.documents.compress(context_ids, press, budget)

    def explain(self, inputs: Any, tokenizer: Any = None) -> Explanation:
        """Says how far a prompt is cached, why no further, and what other kinds of reuse would save; computes nothing.

        Within `with handle.salt(...)` the prompt has that salt.

        Args:
            inputs: Tokens, `[1, length]` or `[length]`; a mapping of arguments of `generate` (images, a mask); with a
                tokenizer also a text.
            tokenizer: Shows both texts where tokens differ (`Explanation.texts`).

        Returns:
            See `CacheManager.explain`.

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
        tokens = torch.as_tensor(inputs["input_ids"])
        length = {} if "max_length" in inputs or "generation_config" in inputs else {"max_new_tokens": 1}
        tokens = tokens[None] if tokens.dim() == 1 else tokens
        found = self._serving.explain({**length, **inputs, "input_ids": tokens})
        if tokenizer is None or found.reason != "token":
            return found
        return replace(found, texts=(tokenizer.decode(found.here), tokenizer.decode(found.there)))

    def salt(self, salt: Any) -> AbstractContextManager[None]:
        """Within it, this thread's calls share blocks only with calls of the same salt.

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
        return self._serving.salt.within(salt)

    def hint(self, returns: float | None) -> AbstractContextManager[None]:
        """Within it, what this thread knows of its conversations is told to the eviction policy when its calls end.

        Args:
            returns: Probability that the conversation of a call goes on soon, 0 to 1; None: unknown. With 0 the
                policies that honour it (`hazard`, `priority`) evict first what no other request used.

        Raises:
            TypeError: `returns` is neither a number nor None.
            ValueError: `returns` is not between 0 and 1.

        Examples:
            >>> with handle.hint(returns=0):  # the last question of this user
            ...     tokens = model.generate(prompt, max_new_tokens=4)
            >>> tokens.shape
            torch.Size([1, 44])
        """
        return self._serving.hint.within(returns)

    def disable(self) -> None:
        """Gives the model its own `generate` back and frees the blocks; a second call does nothing.

        Examples:
            >>> handle.disable()
            >>> "generate" in vars(model)  # its class's own again
            False
        """
        self._serving.disable()


def generating_model(model: Any) -> Any:
    """The model whose `generate` runs the loop: PEFT and torch.compile wrap it. TypeError: there is none."""
    inner = model
    while isinstance(inner, torch.nn.Module):
        if isinstance(inner, GenerationMixin):
            return inner
        wrapped = vars(inner).get("_modules", {})
        inner = wrapped.get("_orig_mod") or wrapped.get("base_model") or wrapped.get("model")
    raise TypeError(f"model: got {type(model).__name__}, needs a transformers model with generate")


class ReplacedMethod:
    """What stands in the place of one model's method; it does not keep the model alive, and dies with it."""

    # A handle's method `serve` takes its calls. A copy of the model has one without, which goes to its class's method.

    def __init__(self, model: Any, name: str, serve: Callable[..., Any] | None = None) -> None:
        self._model = weakref.ref(model)
        self._name, self._serve = name, serve
        original = getattr(type(model), name)
        functools.update_wrapper(self, original, updated=())
        self.__signature__ = inspect.signature(original.__get__(model))

    @property
    def __self__(self) -> Any:
        return self._model()

    @property
    def handle(self) -> Any:
        """Whose method takes its calls; None where the model's class does."""
        return getattr(self._serve, "__self__", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See the method of `GenerationMixin`."""
        if self._serve is None:
            model: Any = self._model()
            return getattr(type(model), self._name)(model, *args, **kwargs)
        return self._serve(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplacedMethod:
        return ReplacedMethod(memo.get(id(self._model()), self._model()), self._name)

    def __reduce__(self) -> Any:
        return ReplacedMethod, (self._model(), self._name)


def check_not_replaced(model: Any, name: str, feature: str) -> None:
    """Raises ValueError where something stands in the place of a model's method already."""
    there = vars(model).get(name)
    if isinstance(there, ReplacedMethod) and there.handle is not None and not getattr(there.handle, "disabled", False):
        raise ValueError(f"model: {feature} is already enabled; call disable() on its handle first")
    if there is not None and not isinstance(there, ReplacedMethod):
        raise ValueError(f"model: its {name} was already replaced on this instance; undo that first")
