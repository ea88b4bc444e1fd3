"""`enable_prefix_caching`: puts a handle before a model's own `generate`."""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from typing import Any

import torch
from transformers import GenerationMixin

from .handle import PrefixCaching
from .options import Options

REUSES = ("prefix", "gap")


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
) -> PrefixCaching:
    """Lets `model.generate` reuse the KV of prompts it has seen, until `disable` is called.

    The tokens that come out are those that came out before. What cannot be served (encoder-decoder models, caches of
    your own, see `docs/huggingface.md`) goes to the model's own generate, with one warning that says why. Changed
    weights, buffers and settings are noticed, and the cache starts anew.

    Args:
        model: A transformers model that generates text, or PEFT's around one, loaded on its devices.
        num_blocks: Blocks of the cache. None: what fits in a fifth of the device's free memory (on a CPU a fifth of
            all memory, 4 GiB at most), and no more than 32 of the model's longest sequences need.
        block_size: Tokens of a block.
        policy: Which block is evicted first: a name or an `EvictionPolicy`, see `CacheManager`.
        reuse: "prefix": the leading run of cached blocks. "gap": cached blocks behind an evicted one too; the tokens
            between are computed again.
        host_blocks: Evicted blocks that are kept in host memory, to be read again.
        cuda_graphs: Whether decode steps are captured in CUDA graphs and replayed. None: where that is possible, see
            `docs/huggingface.md`; what cannot be captured runs eagerly.
        disk: A directory for evicted blocks, and for all when caching is disabled; later processes with the same
            model, weights and block size read them. None: no block is written.
        disk_bytes: Bytes of those at most, those used longest ago go first. None: no limit.
        window_blocks: Blocks of layers with a sliding window, which need those of the window and of what is written at
            a time, however long a prompt is; with more of them, more of what was computed is found again. None: as
            many as of other layers.

    Returns:
        The handle: `stats()`, `last_requests`, `salt()`, `hint()`, `graphs`, `reset()`, `disable()`; also a context
        manager that disables at its end.

    Raises:
        TypeError: `model` has no `generate` of transformers, or `num_blocks` or `block_size` is not an integer, or
            `cuda_graphs` not a bool.
        ValueError: Caching is already enabled for this model, a number is out of range, `policy` is one instance for
            a model with several groups of layers, or `cuda_graphs` is True and its decode steps cannot be captured.
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
    if isinstance(block_size, bool) or not isinstance(block_size, int):
        raise TypeError(f"block_size: got {type(block_size).__name__}, needs an int")
    if block_size < 1:
        raise ValueError(f"block_size: got {block_size}, needs at least 1")
    if num_blocks is not None and (isinstance(num_blocks, bool) or not isinstance(num_blocks, int)):
        raise TypeError(f"num_blocks: got {type(num_blocks).__name__}, needs an int or None")
    if num_blocks is not None and num_blocks < 1:
        raise ValueError(f"num_blocks: got {num_blocks}, needs at least 1")
    if reuse not in REUSES:
        raise ValueError(f"reuse: got {reuse!r}, needs one of {', '.join(REUSES)}")
    if isinstance(host_blocks, bool) or not isinstance(host_blocks, int):
        raise TypeError(f"host_blocks: got {type(host_blocks).__name__}, needs an int")
    if host_blocks < 0:
        raise ValueError(f"host_blocks: got {host_blocks}, needs at least 0")
    if cuda_graphs is not None and not isinstance(cuda_graphs, bool):
        raise TypeError(f"cuda_graphs: got {type(cuda_graphs).__name__}, needs a bool or None")
    if window_blocks is not None and (isinstance(window_blocks, bool) or not isinstance(window_blocks, int)):
        raise TypeError(f"window_blocks: got {type(window_blocks).__name__}, needs an int or None")
    if window_blocks is not None and window_blocks < 1:
        raise ValueError(f"window_blocks: got {window_blocks}, needs at least 1")
    if disk is not None and not isinstance(disk, str | os.PathLike):
        raise TypeError(f"disk: got {type(disk).__name__}, needs a path or None")
    if disk_bytes is not None and (isinstance(disk_bytes, bool) or not isinstance(disk_bytes, int)):
        raise TypeError(f"disk_bytes: got {type(disk_bytes).__name__}, needs an int or None")
    if disk_bytes is not None and disk_bytes < 1:
        raise ValueError(f"disk_bytes: got {disk_bytes}, needs at least 1")
    model = generating_model(model)
    replaced = vars(model).get("generate")
    if isinstance(replaced, Generate) and replaced.handle is not None:
        raise ValueError("model: prefix caching is already enabled; call disable() on its handle first")
    if replaced is not None and not isinstance(replaced, Generate):
        raise ValueError("model: its generate was already replaced on this instance; undo that first")
    options = Options(num_blocks, block_size, policy, reuse, host_blocks, disk, disk_bytes, window_blocks)
    handle = PrefixCaching(model, options, cuda_graphs)
    if cuda_graphs and handle.graphs.reason is not None:
        raise ValueError(f"cuda_graphs: got True, needs steps that can be captured, and {handle.graphs.reason}")
    vars(model)["generate"] = Generate(model, handle)
    return handle


def generating_model(model: Any) -> Any:
    """The model whose `generate` runs the decoding loop: PEFT and torch.compile wrap it.

    Raises:
        TypeError: There is none.
    """
    inner = model
    while isinstance(inner, torch.nn.Module):
        if isinstance(inner, GenerationMixin):
            return inner
        wrapped = vars(inner).get("_modules", {})
        inner = wrapped.get("_orig_mod") or wrapped.get("base_model") or wrapped.get("model")
    raise TypeError(f"model: got {type(model).__name__}, needs a transformers model with generate")


class Generate:
    """What stands in the place of one model's `generate`; a copy of the model has one that goes to its class's.

    It does not keep the model alive, and dies with it.
    """

    def __init__(self, model: Any, handle: PrefixCaching | None = None) -> None:
        self._model = weakref.ref(model)
        self.handle = handle
        functools.update_wrapper(self, type(model).generate, updated=())
        self.__signature__ = inspect.signature(type(model).generate.__get__(model))

    @property
    def __self__(self) -> Any:
        return self._model()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `GenerationMixin.generate`."""
        model: Any = self._model()
        if self.handle is None:
            return type(model).generate(model, *args, **kwargs)
        return self.handle.generate(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Generate:
        return Generate(memo.get(id(self._model()), self._model()))

    def __reduce__(self) -> Any:
        return Generate, (self._model(),)
