"""`enable_prefix_caching`, which replaces a model's `generate`, and the handle through which users see its cache."""

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
from ...triton_ops._core.checks import check_share
from ..tested import say_untested
from .api import Framework, GenerationMixin
from .calls import RequestReport, ServedStats
from .compression.document import CompressedDocument
from .runners.graphs import GraphReport
from .serving import Serving
from .settings import CacheOptions, check_fallback, check_number
from .store.tiers import load, save

RECOMPUTE = 0.1
"""Default share of moved tokens that are computed again; docs/reuse_anywhere.md compares shares."""


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
    """Let `model.generate` reuse the KV of prompts that it has seen, until `disable` is called.

    Tokens are the same as those of the model's own generate. A call that cannot be served falls back to the model's own
    generate, with one warning that says why. Examples are calls of encoder-decoder models and calls with a cache of
    your own, see `docs/huggingface.md`. A call that fails in this library before its first token falls back too. If
    weights, buffers or settings change, the handle notices it and empties the cache.

    Args:
        model: A transformers model that generates text, or a PEFT model around it, already on its devices.
        num_blocks: Number of blocks in the cache. None: as many as fit into a fifth of the device's free memory, but no
            more than 32 sequences of maximum length need. On a CPU, a fifth of all memory counts, at most 4 GiB.
        block_size: Number of tokens in a block.
        policy: Eviction policy: a name or an `EvictionPolicy`, see `CacheManager`.
        reuse: "prefix": reuse the leading run of cached blocks. "gap": also reuse cached blocks that come after an
            evicted one; the tokens between are computed again. "anywhere": after the prefix, also reuse text that is
            cached at another position or after other text. Examples are documents in another order and a conversation
            without its middle part. **Approximate**: moved keys are rotated to their new positions, but they were
            computed after other text, so tokens may differ. A share of the moved tokens is computed again
            (`recompute`). Blocks computed from moved text have other
            hashes, so exact prompts never reuse them.
        host_blocks: Number of evicted blocks to keep in host memory, from where later calls read them.
        cuda_graphs: Whether to capture decode steps in CUDA graphs and replay them. None: if possible, see
            `docs/huggingface_options.md`. Steps that cannot be captured run eagerly.
        disk: A directory to which evicted blocks are written, and all other blocks when `disable` is called. Later
            processes with the same model, weights and block size read them. None: write no blocks.
        disk_bytes: Maximum number of bytes in `disk`; the least recently used blocks are deleted first. None: no limit.
        window_blocks: Number of blocks for layers with a sliding window. These layers need blocks for the window and
            for the tokens of a step, however long a prompt is. More blocks give more hits. None: as many as other
            layers.
        recompute: Share of moved tokens that "anywhere" computes again, the first tokens of each moved piece, from 0 to
            1. With 1 all are computed again, and only rounding differs from no reuse. None: 0.1.
        deterministic: Whether logits must be bitwise equal whatever is cached and whatever else is in the batch. Each
            row is then computed separately, and its prompt in chunks, see `docs/determinism.md`.
        chunk: Number of tokens in a deterministic chunk. Hits end at multiples of it.
        fallback: "warn": a call that cannot be served goes to the model's own generate. "raise": it raises an
            UnsupportedError that names the reason, for tests that must notice.

    Returns:
        The handle: `stats()`, `last_requests`, `salt()`, `hint()`, `graphs`, `reset()`, `disable()`. As a context
        manager it disables caching at the end of the block.

    Raises:
        TypeError: `model` has no `generate` of transformers. Or `num_blocks`, `block_size` or `chunk` is not an
            integer. Or `cuda_graphs` or `deterministic` is not a bool.
        ValueError: Caching is already enabled for this model, or a number is out of range, or `fallback` is unknown.
            `policy` is one instance, but the model has several groups of layers. `cuda_graphs` is True, but decode
            steps cannot be captured. `disk` is empty, or `disk_bytes` is given without it. `recompute` is given without
            "anywhere". `deterministic` is given with "anywhere", or with a `chunk` that is not a multiple of
            `block_size`.
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
    check_fallback(fallback)
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
    """Return `recompute` as a number.

    Raises:
        TypeError: It is not a number.
        ValueError: It is not between 0 and 1, or `reuse` is not "anywhere".
    """
    if recompute is None:
        return RECOMPUTE
    if reuse != "anywhere":
        raise ValueError(f'recompute: got {recompute!r} with reuse={reuse!r}, needs reuse="anywhere"')
    return check_share("recompute", recompute)


def _check_deterministic(deterministic: Any, chunk: int, block_size: int, reuse: str, cuda_graphs: bool | None) -> None:
    """Raise TypeError or ValueError for options that `deterministic` excludes."""
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic: got {type(deterministic).__name__}, needs a bool")
    if deterministic and chunk % block_size:
        raise ValueError(f"chunk: got {chunk}, needs a multiple of block_size={block_size}")
    if deterministic and reuse == "anywhere":
        raise ValueError('deterministic: got True with reuse="anywhere", which is approximate')
    if deterministic and cuda_graphs:
        raise ValueError("deterministic: got True with cuda_graphs=True, needs steps of one row, which run eagerly")


class PrefixCaching:
    """The handle that `enable_prefix_caching` returns.

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

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self.untested = say_untested("transformers", "torch")
        """The installed versions that are not among the tested ones, as text; None if all are tested."""

    def __enter__(self) -> PrefixCaching:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.disable()

    @property
    def unsupported(self) -> str | None:
        """The reason why the model cannot be served; None if it can."""
        return self._serving.unsupported

    @property
    def framework(self) -> Framework:
        """The version of transformers when the handle was made, and the features that it cannot serve."""
        return self._serving.framework

    @property
    def last_requests(self) -> list[RequestReport]:
        """A report for each row of the last call, in the order of the batch; empty if the call fell back."""
        return self._serving.last_requests

    @property
    def manager(self) -> Any:
        """The manager of the cache's blocks; None if the model cannot be served."""
        return self._serving.manager

    @property
    def graphs(self) -> GraphReport:
        """A report of how decode steps ran: in CUDA graphs, or eagerly and why."""
        return self._serving.steps.report()

    def stats(self) -> ServedStats:
        """Return counts of the cache since it was last emptied, and of all calls: served, and fallbacks by reason.

        Examples:
            >>> handle.stats().calls_served, handle.stats().queried_tokens
            (2, 80)
        """
        return self._serving.stats()

    def reset(self) -> None:
        """Forget every cached block. Running calls keep the blocks they have.

        Examples:
            >>> handle.reset()
            >>> handle.stats().cached_blocks
            0
        """
        self._serving.reset()

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
        return self._serving.move_blocks(save, path)

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
        return self._serving.move_blocks(load, path)

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
        return self._serving.documents.compress(context_ids, press, budget)

    def explain(self, inputs: Any, tokenizer: Any = None) -> Explanation:
        """Explain how far a prompt is cached, why no further, and what other kinds of reuse would save.

        Nothing is computed. Within `with handle.salt(...)` the prompt has that salt.

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
        tokens = torch.as_tensor(inputs["input_ids"])
        length = {} if "max_length" in inputs or "generation_config" in inputs else {"max_new_tokens": 1}
        tokens = tokens[None] if tokens.dim() == 1 else tokens
        found = self._serving.explain({**length, **inputs, "input_ids": tokens})
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
        return self._serving.salt.within(salt)

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
        return self._serving.hint.within(returns)

    def disable(self) -> None:
        """Restore the model's own `generate` and free the blocks. A second call does nothing.

        Examples:
            >>> handle.disable()
            >>> "generate" in vars(model)  # the class's method runs again
            False
        """
        self._serving.disable()


def generating_model(model: Any) -> Any:
    """Return the model whose `generate` runs the loop, inside the wrappers of PEFT and torch.compile.

    Raises:
        TypeError: No transformers model is inside.
    """
    inner = model
    while isinstance(inner, torch.nn.Module):
        if isinstance(inner, GenerationMixin):
            return inner
        wrapped = vars(inner).get("_modules", {})
        inner = wrapped.get("_orig_mod") or wrapped.get("base_model") or wrapped.get("model")
    raise TypeError(f"model: got {type(model).__name__}, needs a transformers model with generate")


class ReplacedMethod:
    """A replacement for one method of one model. It holds no strong reference to the model."""

    # The method `serve` of a handle runs the calls. In a copy of the model it is None, and the class's own method runs.

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
        """The handle whose method runs the calls; None if the class's own method runs them."""
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
    """Raise ValueError if a model's method is already replaced."""
    there = vars(model).get(name)
    if isinstance(there, ReplacedMethod) and there.handle is not None and not getattr(there.handle, "disabled", False):
        raise ValueError(f"model: {feature} is already enabled; call disable() on its handle first")
    if there is not None and not isinstance(there, ReplacedMethod):
        raise ValueError(f"model: its {name} was already replaced on this instance; undo that first")
