"""What the KV of a prompt depends on besides its tokens: weights, buffers, modules, settings, adapters.

An `Identity` keeps what it saw of a model: every attribute of every module and config, by identity, the versions and
addresses of tensors, and a sample of their elements. Comparing takes less than a millisecond for 48 layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any

import torch

SAMPLED = 16
"""Elements of each weight that are compared before a call."""
ADAPTER_STATE = frozenset({"active_adapters", "_active_adapter", "disable_adapters", "_disable_adapters", "scaling"})
"""Attributes by which PEFT's layers say what is active: they are keys of a block's identity, not changes."""
CHANGING_ROPE = ("dynamic", "longrope")
"""Rotary embeddings that change their own buffers with the length; `rope_keys` heeds them."""


class Identity:
    """What a model looked like; `changed` tells whether it still does.

    Args:
        model: The model.
        own: The attribute of the model that is not looked at: the generate in its place.
        passing: Names of attributes that a forward pass sets by itself, see `set_by_forward`.
    """

    def __init__(self, model: Any, own: str = "generate", passing: frozenset[str] = frozenset()) -> None:
        self._own = frozenset({own})
        self._modules = [m for m in model.modules() if m is not model]
        self.adapters = [m for m in self._modules if _is_adapter(m)]
        adapters = {id(m) for m in self.adapters}
        watched = [m for m in self._modules if not _changes_itself(m)]
        self._plain: list[dict[str, Any]] = []
        self._partial: list[tuple[dict[str, Any], frozenset[str]]] = []
        for m in watched:
            left_out = passing & vars(m).keys() | (ADAPTER_STATE if id(m) in adapters else frozenset())
            if left_out:
                self._partial.append((vars(m), left_out))
            else:
                self._plain.append(vars(m))
        self._passing = passing
        nested: dict[int, Any] = {}
        for values in (*map(dict.values, self._plain), *(_without(*pair) for pair in self._partial), self._root(model)):
            _nested(values, nested)
        for config in _configs(model):
            nested[id(vars(config))] = vars(config)
            _nested(vars(config).values(), nested)
        self._dicts = [c for c in nested.values() if isinstance(c, dict)]
        self._lists = [c for c in nested.values() if isinstance(c, list)]
        self._tensors = list(_tensors((model, *watched)))
        self._versioned = [t for t in self._tensors if not t.is_inference()]
        self._samples = _samples(self._tensors)
        self._kept = self._attributes(model)
        self._types = list(map(type, self._modules))
        self._numbers = self._tensor_numbers()
        self._content = self._sampled()

    def _root(self, model: Any) -> list[Any]:
        """The model's own attributes; what it holds of us is left out, or it would keep itself alive."""
        return _without(vars(model), self._own | self._passing)

    def _attributes(self, model: Any) -> list[Any]:
        values = self._root(model)
        for attributes, left_out in self._partial:
            values += _without(attributes, left_out)
        values += chain.from_iterable(map(dict.values, self._plain))
        values += chain.from_iterable(map(dict.values, self._dicts))
        values += chain.from_iterable(self._lists)
        return values

    def _tensor_numbers(self) -> list[int]:
        return [t._version for t in self._versioned] + [t.data_ptr() for t in self._tensors]

    @torch.no_grad()
    def _sampled(self) -> list[bytes]:
        return [torch.cat(views).cpu().view(torch.uint8).numpy().tobytes() for views in self._samples]

    def changed(self, model: Any) -> bool:
        """Whether a weight, a buffer, a module, a hook or a setting is another one, or has been written to."""
        now = self._attributes(model)
        return not (
            len(now) == len(self._kept)
            and all(map(is_, now, self._kept))
            and list(map(type, self._modules)) == self._types
            and self._tensor_numbers() == self._numbers
            and self._sampled() == self._content
        )

    def adapter_keys(self) -> tuple[str, ...]:
        """Which PEFT adapters are active in which layer, and how strongly: KV of one prompt differs between them."""
        states = [
            f"{i} {m.active_adapters} {m.disable_adapters} {getattr(m, 'scaling', None)}"
            for i, m in enumerate(self.adapters)
        ]
        return ("adapters", hashlib.sha256("\n".join(states).encode()).hexdigest()) if states else ()


def _is_adapter(module: torch.nn.Module) -> bool:
    if not any(hasattr(module, name) for name in ("active_adapters", "disable_adapters")):
        return False
    return not callable(getattr(module, "active_adapters", None)) and hasattr(module, "disable_adapters")


def _without(attributes: dict[str, Any], left_out: frozenset[str]) -> list[Any]:
    return [value for name, value in attributes.items() if name not in left_out]


@contextmanager
def set_by_forward(model: Any) -> Iterator[set[str]]:
    """Around forward passes: fills the set with the names of attributes that they set on a module."""
    before = [(m, dict(vars(m))) for m in model.modules()]
    names: set[str] = set()
    yield names
    for module, attributes in before:
        names |= {name for name, value in vars(module).items() if attributes.get(name, names) is not value}


def _changes_itself(module: torch.nn.Module) -> bool:
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


def _samples(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """A view of some elements of each tensor, by device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors:
            if tensor.numel() and type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
                groups.setdefault((tensor.device, tensor.dtype), []).append(_sample(tensor.detach()))
    return list(groups.values())


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """A view of SAMPLED elements of its memory, an odd distance apart, so that they are of different columns."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = min(span, SAMPLED)
    return tensor.as_strided((count,), ((span // count - 1) | 1,), tensor.storage_offset())
