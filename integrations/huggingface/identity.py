"""What the KV of a prompt depends on besides its tokens: weights, buffers, modules, settings, adapters.

An `Identity` keeps what it saw of a model: every attribute of every module and config, by identity, the versions and
addresses of tensors, and a sample of their elements. Comparing takes less than a millisecond for 48 layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import numpy as np
import torch

from .support import CHANGING_ROPE

SAMPLED = 16  # elements of each weight that are compared before a call
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ADAPTER_STATE = frozenset({"active_adapters", "_active_adapter", "disable_adapters", "_disable_adapters", "scaling"})
"""Attributes by which PEFT's layers say what is active: they are keys of a block's identity, not changes."""
_INTERNAL = frozenset(vars(torch.nn.Module()))
"""What torch keeps in every module; of these only the tables below decide what a forward pass computes."""
_PRE_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_TABLES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_hooks_with_kwargs", *_PRE_HOOKS)
ATTACHED = frozenset({"generate", "init_continuous_batching", "_cached_continuous_batching_manager"})
"""Attributes of a model that adapters put there: a handle says nothing of KV, and must not keep its model alive."""
ROW_HOOKS = ("adapter_names", "alora_offsets")
"""What PEFT gives its layers for each row of a call, through hooks that it puts on for the call."""


class Identity:
    """What a model looked like; `changed` tells whether it still does. `transient`: see `set_by_forward`."""

    def __init__(self, model: Any, transient: frozenset[str] = frozenset()) -> None:
        self._modules = [m for m in model.modules() if m is not model]
        self.adapters = [m for m in self._modules if _is_adapter(m)]
        adapters = {id(m) for m in self.adapters}
        watched = [m for m in self._modules if not changes_itself(m)]
        self._left_out = _INTERNAL | ATTACHED | transient
        # What we are held by is left out of what we hold, or the model would keep itself alive.
        self._root_names = [n for n in vars(model) if n not in self._left_out]
        self._settings: list[tuple[Any, dict[str, Any]]] = []
        nested: dict[int, Any] = {}
        for m in watched:
            left_out = _INTERNAL | transient | (ADAPTER_STATE if id(m) in adapters else frozenset())
            names = [n for n in vars(m) if n not in left_out]
            self._settings.append((itemgetter("training", "training", *names), vars(m)))
            _nested([vars(m)[n] for n in names], nested)
        _nested([vars(model)[n] for n in self._root_names], nested)
        for config in _configs(model):
            nested[id(vars(config))] = vars(config)
            _nested(vars(config).values(), nested)
        tables = [
            vars(m)[n] for m in (model, *watched) for n in _TABLES if n not in _PRE_HOOKS or id(m) not in adapters
        ]
        containers = [*nested.values(), *tables]
        self._dicts = [c for c in containers if isinstance(c, dict) and c]
        self._lists = [c for c in containers if isinstance(c, list) and c]
        self._empty = [c for c in containers if not c]
        self._kept_lengths = self._lengths()
        self._kept_hooks = self._adapter_hooks()
        self._tensors = list(_tensors((model, *watched)))
        self._versioned = [t for t in self._tensors if not t.is_inference()]
        self._samples, self._device_samples = _samples(self._tensors)
        self._kept = list(self._attributes(model))
        self._types = list(map(type, self._modules))
        self._numbers = self._tensor_numbers()
        self._content = self._sampled()

    def _attributes(self, model: Any) -> Iterator[Any]:
        root = vars(model)
        return chain(
            [root.get(name) for name in self._root_names],
            chain.from_iterable([get(attributes) for get, attributes in self._settings]),
            chain.from_iterable(map(dict.values, self._dicts)),
            chain.from_iterable(self._lists),
        )

    def _lengths(self) -> list[int]:
        """What has been added or taken away shows in a length."""
        return [sum(map(len, c)) for c in ([attributes for _, attributes in self._settings], self._dicts, self._lists)]

    def _adapter_hooks(self) -> list[Any]:
        """Hooks of adapters, but for those that PEFT puts on for one call."""
        return [hook for m in self.adapters for hook in m._forward_pre_hooks.values() if not _row_settings(hook)]

    def row_settings(self) -> dict[str, Any]:
        """What PEFT's hooks give its layers for each row, by name, if any; ValueError: not all are given the same."""
        found: dict[str, Any] = {}
        for module in self.adapters:
            for hook in module._forward_pre_hooks.values():
                for name, value in _row_settings(hook).items():
                    if found.setdefault(name, value) is not value:
                        raise ValueError(name)
        return found

    def _tensor_numbers(self) -> list[int]:
        return [t._version for t in self._versioned] + [t.data_ptr() for t in self._tensors]

    @torch.no_grad()
    def _sampled(self) -> list[bytes]:
        found = [np.concatenate(views).tobytes() for views in self._samples]
        return found + [torch.cat(v).cpu().view(torch.uint8).numpy().tobytes() for v in self._device_samples]

    def changed(self, model: Any) -> bool:
        """Whether a weight, a buffer, a module, a hook or a setting is another one, or has been written to."""
        try:
            return not (
                not any(self._empty)
                and len(vars(model).keys() - self._left_out) == len(self._root_names)
                and self._lengths() == self._kept_lengths
                and self._adapter_hooks() == self._kept_hooks
                and all(map(is_, self._attributes(model), self._kept))
                and list(map(type, self._modules)) == self._types
                and self._tensor_numbers() == self._numbers
                and self._sampled() == self._content
            )
        except KeyError:  # an attribute that is gone
            return True

    def tensors_changed(self) -> bool:
        """Whether a weight or a buffer has been written to, whatever became of the rest."""
        return self._tensor_numbers() != self._numbers or self._sampled() != self._content

    def adapter_keys(self) -> tuple[str, ...]:
        """Which PEFT adapters are active in which layer, and how strongly: KV of one prompt differs between them."""
        states = [
            f"{i} {m.active_adapters} {m.disable_adapters} {getattr(m, 'scaling', None)}"
            for i, m in enumerate(self.adapters)
        ]
        return ("adapters", hashlib.sha256("\n".join(states).encode()).hexdigest()) if states else ()


def _row_settings(hook: Any) -> dict[str, Any]:
    keywords = hook.keywords if isinstance(hook, partial) else {}
    return keywords if keywords and set(keywords) <= set(ROW_HOOKS) else {}


def _is_adapter(module: torch.nn.Module) -> bool:
    if not any(hasattr(module, name) for name in ("active_adapters", "disable_adapters")):
        return False
    return not callable(getattr(module, "active_adapters", None)) and hasattr(module, "disable_adapters")


@contextmanager
def set_by_forward(model: Any) -> Iterator[set[str]]:
    """Around forward passes: fills the set with the names of attributes that they set on a module."""
    before = [(m, dict(vars(m))) for m in model.modules()]
    names: set[str] = set()
    yield names
    for module, attributes in before:
        names |= {name for name, value in vars(module).items() if attributes.get(name, names) is not value}


def changes_itself(module: torch.nn.Module) -> bool:
    """Whether it is a rotary embedding that changes with the length of what it sees."""
    kind = getattr(module, "rope_type", None)
    kinds = kind.values() if isinstance(kind, dict) else (kind,)
    return any(k in CHANGING_ROPE for k in kinds if isinstance(k, str))


def _nested(values: Iterable[Any], found: dict[int, Any], depth: int = 3) -> None:
    """Adds the dicts and lists among values, and those within them."""
    for value in values:
        if isinstance(value, dict | list) and id(value) not in found and depth:
            found[id(value)] = value
            _nested(value.values() if isinstance(value, dict) else value, found, depth - 1)


def _configs(model: Any) -> list[Any]:
    """The configs of all modules and those within them, each once."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if hasattr(config, "to_dict"):
            found[id(config)] = config
            found |= {id(v): v for v in vars(config).values() if hasattr(v, "to_dict") and hasattr(v, "__dict__")}
    return list(found.values())


def _tensors(modules: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Every parameter and buffer once; of a wrapper the tensors within."""
    seen: set[int] = set()
    for module in modules:
        for tensor in chain(module._parameters.values(), module._buffers.values()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield from _inner(tensor)


def _inner(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    data = tensor.data if isinstance(tensor, torch.nn.Parameter) else tensor
    if hasattr(type(data), "__tensor_flatten__"):
        for name in getattr(data, "__tensor_flatten__")()[0]:  # noqa: B009  torch.Tensor itself has none
            yield from _inner(getattr(data, name))
    elif tensor.layout == torch.strided and tensor.device.type != "meta":
        yield tensor


def _samples(tensors: list[torch.Tensor]) -> tuple[list[list[np.ndarray]], list[list[torch.Tensor]]]:
    """Views of some elements of each tensor: of those in host memory as integers, of others by device and dtype."""
    host: dict[int, list[np.ndarray]] = {}
    other: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if not tensor.numel() or type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            continue
        view, size = _sample(tensor.detach()), tensor.dtype.itemsize
        if tensor.device.type == "cpu" and size in _INTEGERS:
            host.setdefault(size, []).append(view.view(_INTEGERS[size]).numpy())
        else:
            other.setdefault((tensor.device, tensor.dtype), []).append(view)
    return list(host.values()), list(other.values())


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """A view of SAMPLED elements of its memory, an odd distance apart, so that they are of different columns."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = min(span, SAMPLED)
    return tensor.as_strided((count,), ((span // count - 1) | 1,), tensor.storage_offset())
