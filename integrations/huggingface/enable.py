"""`enable_prefix_caching`, which replaces a model's `generate` by a handle's."""

from __future__ import annotations

import os
from typing import Any

import torch

from ...cache.manager import REUSES
from ...triton_ops._core.checks import check_share
from ..seam import check_fallback
from .api import GenerationMixin
from .replaced import check_not_replaced, replace_method
from .serving import PrefixCaching
from .settings import CacheOptions, check_number

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
        TypeError: `model` has no `generate` of transformers. Or a number of blocks, tokens or bytes is not an integer,
            `recompute` is not a number, or `cuda_graphs` or `deterministic` is not a bool. Or `policy` or `disk` is of
            another type.
        ValueError: Caching is already enabled for this model, or a number is out of range. Or `policy`, `reuse` or
            `fallback` is unknown. `policy` is one instance, but the model has several groups of layers. `cuda_graphs`
            is True, but decode steps cannot be captured. `disk` is empty, or `disk_bytes` is given without it.
            `recompute` is given without "anywhere". `deterministic` is given with "anywhere", or with a `chunk` that is
            not a multiple of `block_size`.
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
    handle = PrefixCaching(model, options, cuda_graphs)
    if cuda_graphs and handle.graphs.reason is not None:
        raise ValueError(f"cuda_graphs: got True, needs steps that can be captured, and {handle.graphs.reason}")
    replace_method(model, "generate", handle._serve)
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
