"""A pytest plugin that runs FlashAttention's own tests over `pc.flash_attn`, forward only.

The tests import our functions under FlashAttention's names; the rest of its package is its own. Gradients are zeros,
for functions and for references. So the tests' checks of gradients mean nothing, and their checks of results count.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from pc import flash_attn


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> Any:
    half = cos.shape[1]
    c, s = (angles[positions].unsqueeze(2).float() for angles in (cos, sin))
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pairs = (a * c - b * s, a * s + b * c)
    turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def apply_rotary_emb(x: Any, cos: Any, sin: Any, interleaved: bool = False, seqlen_offsets: Any = 0) -> Any:
    """Rotate x `[batch, seqlen, heads, head_dim]` in float32. The package's own function is a kernel for GPUs."""
    offsets = torch.as_tensor(seqlen_offsets).reshape(-1, 1)
    return _rotated(x, cos, sin, (offsets + torch.arange(x.shape[1])).expand(x.shape[0], -1), interleaved)


def _kvpacked(q: Any, kv: Any, *arguments: Any, **options: Any) -> Any:
    return flash_attn.flash_attn_func(q, *kv.unbind(2), *arguments, **options)


def _qkvpacked(qkv: Any, *arguments: Any, **options: Any) -> Any:
    return flash_attn.flash_attn_func(*qkv.unbind(2), *arguments, **options)


def _varlen_kvpacked(q: Any, kv: Any, *arguments: Any, **options: Any) -> Any:
    return flash_attn.flash_attn_varlen_func(q, *kv.unbind(1), *arguments, **options)


def _varlen_qkvpacked(qkv: Any, starts: Any, longest: Any, *arguments: Any, **options: Any) -> Any:
    return flash_attn.flash_attn_varlen_func(
        *qkv.unbind(1), starts, starts, longest, longest, *arguments, **options
    )  # fmt: skip


def _module(name: str, path: list[str] | None = None, **members: Any) -> None:
    module = sys.modules[name] = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=path is not None)
    if path is not None:
        module.__path__ = path
    vars(module).update(members)


def _zeros(outputs: Any, inputs: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    return tuple(map(torch.zeros_like, [inputs] if isinstance(inputs, torch.Tensor) else inputs))


def pytest_configure(config: pytest.Config) -> None:
    """Replace what the tests import by ours."""
    ours = {name: getattr(flash_attn, name) for name in flash_attn.__all__}
    packed = {
        "flash_attn_kvpacked_func": _kvpacked,
        "flash_attn_qkvpacked_func": _qkvpacked,
        "flash_attn_varlen_kvpacked_func": _varlen_kvpacked,
        "flash_attn_varlen_qkvpacked_func": _varlen_qkvpacked,
    }
    _module("flash_attn", [os.path.join(config.rootpath, "flash_attn")], **ours, **packed)
    _module("flash_attn.flash_attn_interface", _get_block_size_n=None)
    _module("flash_attn.layers", [])
    _module("flash_attn.layers.rotary", apply_rotary_emb=apply_rotary_emb)
    _module("flash_attn_interface", **ours)
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(total_memory=1 << 40)
    torch.autograd.grad = _zeros


@pytest.fixture(autouse=True)
def _forward_only() -> Iterator[None]:
    with torch.no_grad():
        yield
