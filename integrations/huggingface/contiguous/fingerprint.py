"""What a model is, as a hash: blocks of another are never read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch

from ..identity import changes_itself

_NAMES = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation")
"""Entries of a config that say nothing about KV."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def fingerprint(model: Any) -> str:
    """A hash of a model's classes, config, settings, hooks by name, dtypes, weights and buffers, in hexadecimal."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NAMES}
    digest = hashlib.sha256(type(model).__name__.encode())
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for line in _settings(model):
        digest.update(line.encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _settings(model: Any) -> Iterator[str]:
    """Classes, numbers and hooks of modules, without the hooks that transformers puts on a module that runs."""
    for name, module in model.named_modules():
        yield f"{name} {type(module).__module__} {type(module).__qualname__}"
        for hooks in _HOOKS:
            named = [
                f"{getattr(h, '__module__', '')} {getattr(h, '__qualname__', '')}" for h in vars(module)[hooks].values()
            ]
            yield f"{hooks} {[hook for hook in named if not hook.startswith('transformers.')]}"
        if "forward" in vars(module):
            yield f"forward {getattr(vars(module)['forward'], '__qualname__', '')}"
        if not changes_itself(module):
            plain = {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str)}
            kept = {k: v for k, v in plain.items() if not k.startswith("_") and k != "training"}
            yield repr(sorted(kept.items()))
