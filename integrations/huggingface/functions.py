"""The Python functions that a model's forward pass runs.

A user can change a model without touching its object: `LlamaAttention.forward = mine`, or `modeling_llama.rotate_half =
mine`, or `torch.nn.functional.scaled_dot_product_attention = mine`. `Functions` starts from the classes of a model's
modules. It follows the global names that their code looks up, and keeps the values of these names. A digest of the code
lets other processes recognize the same functions.
"""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import dis
import functools
import hashlib
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from itertools import chain, islice
from operator import is_, itemgetter, methodcaller
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch

from .api import DynamicLayer, DynamicSlidingWindowLayer, registered
from .runners.dispatch import Dispatch
from .support import inner_tensors, tensor_bytes

_KNOWN = {*sys.stdlib_module_names, "torch", "numpy", "pc", "tqdm"}
"""Packages whose functions are compared, but whose code is not searched for further functions."""
_OTHER = tuple(
    f"transformers.{name}"
    for name in (
        "configuration_utils", "distributed", "dynamic_module_utils", "generation", "integrations.peft",
        "modeling_utils", "trainer", "utils",
    )
)  # fmt: skip
"""Parts of transformers that are not searched either: loading, saving and decoding loops compute no KV."""
_LIBRARIES = {"transformers", "accelerate", "peft", "bitsandbytes", "torchao", "deepspeed", "optimum"}
"""Libraries that attach objects to a model. Of such an object only the class is described.

The objects hold devices, addresses and state of a process. accelerate's hooks, for example, hold addresses of weights.
"""
_NUMBERS = (bool, int, float)
_SETTINGS = (*_NUMBERS, str, Enum, list, tuple, dict, torch.dtype)
"""Types of values that count in a dataclass of such a library. Its other values may be state of a process."""
_OPERATORS = (type(torch.ops.aten.add), type(torch.ops.aten.add.default))
PLAIN = (
    *(*_NUMBERS, complex, str, bytes, np.generic, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(*_OPERATORS, PurePath),
)
_REDUCED = {
    *("array", "builtins", "collections", "datetime", "decimal", "fractions", "functools", "numpy", "operator", "re"),
}
"""Modules whose objects are described by what pickle keeps of them: slices, deques, functions in C and others."""

LONG = 64
"""The most entries of a container that are compared before each call."""
MOST = 2000
"""The most objects in hooks and other objects that are compared before each call."""
_TWICE = ("__doc__", "__doc__")  # two names that always exist: itemgetter returns a tuple only for several names
_CACHED = "_can_set_attn_implementation_cached_value"  # transformers computes it once for each class
_LAZY = frozenset({"__slotnames__", "__annotations__", "__annotations_cache__", "__doc__", _CACHED})
_BY_COMPILE = frozenset(
    ("__init__", "__setstate__", "___needs_generation_tag_patch", "___has_generation_tag_patch"),
)
"""Attributes of `torch.nn.Module` that the first torch.compile of a process changes. No forward pass uses them.

torch 2.15 has the last in place of the third.
"""


Held = dict[str, list[Any]]
"""What functions and objects hold, such as a steering hook's coefficient. Several values may have one name."""


def reader_of(roots: Mapping[str, Any], left_out: Collection[str], known: Collection[int]) -> Callable[[], Held]:
    """Return a function that reads what some functions and objects hold now.

    Args:
        roots: The functions and objects, by name.
        left_out: Names of values that are not read, with all that they hold.
        known: Ids of objects that are not searched.
    """

    def read(roots: list[tuple[str, Any]]) -> Held:
        found: Held = {}  # values of the keys 1 and "1" have one name
        for name, lines in described(roots, known, left_out, light=True) if roots else ():
            found.setdefault(name, []).extend(lines)
        return found

    return functools.partial(read, [root for root in roots.items() if len(read([root])) > 1])


@contextlib.contextmanager
def restored(
    hooks: Mapping[str, Any], others: Mapping[str, Any], known: Collection[int], modules: list[torch.nn.Module]
) -> Iterator[None]:
    """Put back, after the `with` block, what hooks, and other functions and objects, hold; see `reader_of`.

    Hooks may also count in attributes of `modules`. If the code of a hook, or of a method that it names, writes an
    attribute, it is put back, or removed if it is new. If the code only names an attribute, the contents of its
    container or object are put back. All other attributes stay as the block leaves them, because a module may prepare
    itself in its first pass. Iterators, and tensors and arrays of more than `MOST` elements, stay too.
    """
    reached: dict[int, Any] = {}
    deque(described(hooks.items(), known, light=True, seen=reached), maxlen=0)
    named, written = _attributes_used(reached, known, {type(m) for m in modules})
    entries = chain.from_iterable(vars(m).items() for m in modules)
    inside = [(name, value) for name, value in entries if name in named and not isinstance(value, torch.Tensor)]
    deque(described([*inside, *others.items()], known, light=True, seen=reached), maxlen=0)
    restores: list[Callable[[], Any]] = [functools.partial(_reset, vars(m), vars(m).copy(), written) for m in modules]
    for value in reached.values():
        with contextlib.suppress(Exception):  # an object may fail at whatever is done to it
            restores += _restores(value)
    try:
        yield
    finally:
        for restore in restores:
            with contextlib.suppress(Exception):
                restore()


def _attributes_used(
    reached: dict[int, Any], known: Collection[int], kinds: Iterable[type]
) -> tuple[set[str], set[str]]:
    """Return the names in the code of some functions, and those of attributes that the code writes.

    Methods of the classes `kinds` that the code names count too.

    Args:
        reached: Objects, by id, of which the functions count. It gets what the methods reach.
        known: Ids of objects that are not searched.
        kinds: The classes of the modules to which the code may write.
    """
    named = {name for code in _codes_in(reached) for name in code.co_names}
    methods = [("", f) for kind in kinds for name in named for f in functions_of(getattr(kind, name, None))]
    deque(described(methods, known, light=True, seen=reached), maxlen=0)
    codes = _codes_in(reached)
    texts = {text for code in codes for text in code.co_consts if isinstance(text, str)}  # such as names for setattr
    named = texts.union(*(code.co_names for code in codes)) - vars(torch.nn.Module()).keys()
    return named, texts.union(*(_stored(code, "STORE_ATTR") for code in codes))


def names_used(values: Mapping[str, Any]) -> set[str]:
    """Return the names in the code of some functions and objects, and of all that they hold."""
    reached: dict[int, Any] = {}
    deque(described(values.items(), (), light=True, seen=reached), maxlen=0)
    return {name for code in _codes_in(reached) for name in code.co_names}


def _codes_in(objects: Mapping[int, Any]) -> list[CodeType]:
    """Return the code of the functions among some objects, except `__init__` and functions of known packages."""
    functions = [f for f in objects.values() if isinstance(f, FunctionType) and f.__name__ != "__init__"]
    return [code for f in functions if not of_package(f) for code in _codes_of(f.__code__)]


def _restores(value: Any) -> Iterator[Callable[[], Any]]:
    """Yield functions that put back what a value holds now, if it is no longer the same."""
    if isinstance(value, torch.Tensor):
        if type(value) is torch.Tensor and value.numel() <= MOST and not value.is_inference():
            version, copy = value._version, value.detach().clone()
            yield lambda: value._version == version or value.detach().copy_(copy)
    elif isinstance(value, np.ndarray):
        if value.size <= MOST and value.flags.writeable:
            yield functools.partial(np.copyto, value, value.copy())
    elif isinstance(value, FunctionType):
        space = value.__globals__
        if not of_package(value):
            written = _stored(value.__code__, "STORE_GLOBAL") & space.keys()
            yield functools.partial(space.update, {name: space[name] for name in written})
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # not assigned yet
                    yield functools.partial(setattr, cell, "cell_contents", cell.cell_contents)
    elif isinstance(value, random.Random):
        yield functools.partial(value.setstate, value.getstate())
    elif isinstance(value, torch.Generator):
        yield functools.partial(value.set_state, value.get_state())
    elif isinstance(value, list | deque | set | dict):
        yield functools.partial(_refill, value, value.copy())
    elif not isinstance(value, type) and not is_known(type(value).__module__) and hasattr(value, "__dict__"):
        yield functools.partial(_refill, vars(value), vars(value).copy())


def _reset(held: dict[str, Any], before: dict[str, Any], names: set[str]) -> None:
    """Put back some attributes, or remove them if they are new."""
    held.update({name: before[name] for name in names & before.keys()})
    for name in names & held.keys() - before.keys():
        del held[name]


def _stored(code: CodeType, instruction: str) -> set[str]:
    """Return the names that an instruction of a function, such as STORE_ATTR, writes to."""
    return {i.argval for i in dis.get_instructions(code) if i.opname == instruction}


def _refill(held: Any, before: Any) -> None:
    """Put the entries of a copy back into a container, unless they are the same."""
    if _entries(held) != _entries(before):
        held.clear()
        (held.update if isinstance(held, dict | set) else held.extend)(before)


def _entries(held: Any) -> list[int]:
    return list(map(id, chain.from_iterable(held.items()) if isinstance(held, dict) else held))


def differing(kept: Held, now: Held) -> list[str]:
    """Return the names of the values that are others now than those that were kept."""
    return [
        name
        for name in {**kept, **now}
        if len(now.get(name, ())) != len(kept.get(name, ())) or not all(map(_same, now[name], kept[name]))
    ]


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, bytes) and one == other)


class Functions:
    """The functions of a model's forward pass, as they were when this object was made."""

    def __init__(self, model: Any) -> None:
        self._spaces: dict[int, tuple[str, Any, dict[str, None]]] = {}  # by id of a namespace: label, namespace, names
        self._found: dict[int, FunctionType] = {}
        self._registered: list[tuple[dict[str, Any], str]] = []  # tables of functions, and a name in each
        configs = [c for c in (model.config, *vars(model.config).values()) if hasattr(c, "to_dict")]
        self._settings = {v for config in configs for v in vars(config).values() if isinstance(v, str)}
        for kind in {**{type(m): None for m in model.modules()}, DynamicLayer: None, DynamicSlidingWindowLayer: None}:
            self._add_class(kind)
        functional = torch.nn.functional  # torch's own modules look up all its names
        self._look_up(functional.__name__, vars(functional), {n for n, v in vars(functional).items() if callable(v)})
        spaces = sorted(self._spaces.values(), key=lambda space: not isinstance(space[1], dict))  # files, then classes
        self._watched = [
            (label, values, (*_TWICE, *(names if isinstance(values, dict) else _names_of(values))))
            for label, values, names in spaces
        ]
        self._reads = [(values, itemgetter(*names)) for _, values, names in self._watched]
        self._classes = [(values, _left_out(values)) for _, values, _ in spaces if not isinstance(values, dict)]
        self._kept_sizes = self._sizes()
        self._read = self._values()
        self._kept = list(map(_original, self._read))
        self.followed = list(self._found.values())
        self._code = [f.__code__ for f in self.followed]

    def _values(self) -> list[Any]:
        """Return the current value of every name, always in the same order."""
        found = list(chain.from_iterable([get(values) for values, get in self._reads]))
        return found + [mapping.get(name) for mapping, name in self._registered]

    def _sizes(self) -> list[int]:
        """Return the number of names in each class, without those that Python adds when it first needs them."""
        return [len(values) - len(values.keys() & left_out) for values, left_out in self._classes]

    def _replaced(self) -> bool:
        """Return whether a value was replaced, except by this package."""
        values = self._values()
        if all(map(is_, values, self._read)):
            return False
        if not all(map(is_, map(_original, values), self._kept)):
            return True
        self._read = values
        return False

    def _add_class(self, kind: type) -> None:
        """Add the attributes of a class and its bases. Functions of modules are followed, others only compared."""
        is_module = issubclass(kind, torch.nn.Module)
        for base in kind.__mro__:
            is_left_out = base is object if is_module else _is_unsearched(base.__module__)
            if is_left_out or id(base) in self._spaces:
                continue
            self._spaces[id(base)] = (f"{base.__module__}.{base.__qualname__}", vars(base), {})
            for value in list(vars(base).values()) if is_module else ():
                for function in functions_of(value):
                    self._add(function)

    def _add(self, function: FunctionType) -> None:
        """Add a function and the names that it looks up, unless it belongs to a known package."""
        names = function.__globals__
        file = str(names.get("__name__", ""))
        for inner in functions_of(getattr(function, "__wrapped__", None)):
            self._add(inner)
        if id(function) in self._found or _is_unsearched(file):
            return
        self._found[id(function)] = function
        for cell in function.__closure__ or ():
            for inner in functions_of(cell_content(cell)):
                self._add(inner)
        self._look_up(file, names, set(names_of(function.__code__)))

    def _look_up(self, label: str, values: dict[str, Any], names: set[str], within: tuple[int, ...] = ()) -> None:
        """Add some names of a namespace, and the functions that their values run.

        If a name holds a module, look up the same names in that module too. `within` has the ids of the namespaces that
        led to this one; it prevents endless recursion.
        """
        _, _, known = self._spaces.setdefault(id(values), (label, values, {}))
        for name in sorted(names & values.keys()):
            value = _original(values[name])
            if isinstance(value, ModuleType):  # visited again: another function reads other names of it
                if value.__name__.partition(".")[0] not in sys.stdlib_module_names and id(vars(value)) not in within:
                    self._look_up(value.__name__, vars(value), names, (*within, id(values)))
                known[name] = None
            elif name not in known:
                known[name] = None
                self._follow(value)

    def _follow(self, value: Any) -> None:
        """Add the functions that a looked-up value runs."""
        mappings = registered(value)
        if mappings:
            for own in sorted(self._settings & {name for mapping in mappings for name in mapping}):
                for mapping in mappings:
                    self._registered.append((mapping, own))
                    for function in functions_of(mapping.get(own)):
                        self._add(function)
        elif isinstance(value, type):
            if not issubclass(value, torch.nn.Module):  # the classes of the model's modules are added anyhow
                self._add_class(value)
        else:
            for function in functions_of(value):
                self._add(function)

    def changed(self) -> bool:
        """Return whether a function, a class, a constant or a function's code was replaced."""
        try:
            if self._replaced() or self._sizes() != self._kept_sizes:
                return True
            return not all(map(is_, [f.__code__ for f in self.followed], self._code))
        except KeyError:  # a name was deleted
            return True

    def seen(self) -> Iterator[tuple[str, Any]]:
        """Yield each watched name and the value that it had when this object was made, to find what has changed."""
        labels = [f"{label}.{name}" for label, _, names in self._watched for name in names]
        labels += [f"{name} in a registry" for _, name in self._registered]
        yield from zip(labels, self._kept, strict=True)
        yield from zip((f"{f.__module__}.{f.__qualname__}'s code" for f in self.followed), self._code, strict=True)

    def lines(self, known: Mapping[int, Any]) -> list[str]:
        """Return lines that are the same in every process that runs the same functions.

        `known` has values that other digests cover; see `content_digest`.
        """
        known = {**known, **{id(f): f for f in self.followed}}
        found = [f"{f.__module__}.{f.__qualname__} {content_digest(f, known)}" for f in self.followed]
        for label, values, names in self._spaces.values():
            for name in names or _names_of(values):
                value = values[name]
                if isinstance(value, _NUMBERS):
                    found.append(f"{label}.{name} {value!r}")
                elif callable(value):
                    own = _original(value)
                    found.append(f"{label}.{name} {getattr(own, '__module__', '')}.{getattr(own, '__qualname__', '')}")
        return sorted(set(found))


def _is_unsearched(module: str) -> bool:
    """Return whether the functions of a module, named by its path, are compared, but not searched for others."""
    return module.partition(".")[0] in _KNOWN or module.startswith(_OTHER)


def _left_out(values: Any) -> frozenset[str]:
    """Return the names in a class that Python or torch.compile may add or change without effect on a forward pass."""
    return _LAZY | _BY_COMPILE if values.get("__module__") == torch.nn.Module.__module__ else _LAZY


def _names_of(values: Any) -> list[str]:
    """Return the names in a class, without those that Python and torch.compile add or change on first use."""
    left_out = _left_out(values)
    return [name for name in values if name not in left_out]


def _original(value: Any) -> Any:
    """Return the value that a name had before this package replaced it."""
    if type(value) is Dispatch:
        return value.original
    return getattr(value, "_pc_original", value) if isinstance(value, FunctionType) else value


def cell_content(cell: Any) -> Any:
    """Return the value in a closure's cell, or None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def functions_of(value: Any) -> Iterator[FunctionType]:
    """Yield the Python functions that a value runs, also those of methods, properties, partial objects and wrappers."""
    value = _original(value)
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, property):
        yield from chain.from_iterable(map(functions_of, (value.fget, value.fset)))
    elif isinstance(value, functools.partial | functools.cached_property):
        yield from functions_of(value.func)
    elif hasattr(value, "__func__"):
        yield from functions_of(value.__func__)
    elif isinstance(getattr(value, "__wrapped__", None), FunctionType):
        yield value.__wrapped__


def names_of(code: CodeType) -> Iterator[str]:
    """Yield the names that a function and its nested functions look up."""
    return chain.from_iterable(own.co_names for own in _codes_of(code))


def _codes_of(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of its nested functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_of(constant)


def content_digest(value: Any, known: Mapping[int, Any] = MappingProxyType({})) -> str:
    """Return a hash of a value's content, equal in all processes of one Python version.

    The content of a function is its code, defaults and closure. If the function belongs to no known package, the global
    values that it reads count too. The content of an object is its class. If the class belongs to no known package, the
    object's attributes and the code of its class count too.

    Args:
        value: Any value.
        known: Values inside `value` that are left out, because other digests cover them, by id.
    """
    digest = hashlib.sha256()
    for name, lines in described([("", value)], known):
        digest.update(name.encode())
        for line in lines:
            digest.update(line)
    return digest.hexdigest()


def is_known(module: Any) -> bool:
    """Return whether a module, named by its path, belongs to a known package; see `content_digest`."""
    package = str(module).partition(".")[0]
    return package in _KNOWN or package in _LIBRARIES


def of_package(function: FunctionType) -> bool:
    """Return whether a function belongs to a known package by its file. `functools.wraps` copies `__module__`."""
    return is_known(function.__globals__.get("__name__"))


def described(
    roots: Iterable[tuple[str, Any]],
    known: Collection[int],
    left_out: Collection[str] = (),
    light: bool = False,
    seen: dict[int, Any] | None = None,
) -> Iterator[tuple[str, list[Any]]]:
    """Yield the name of each value within some values, and bytes that differ for different values.

    Args:
        roots: The values and their names.
        known: Ids of values within, which yield nothing.
        left_out: Names of values that yield nothing.
        light: Whether to describe tensors by object and version, code by object, and only the first entries of
            containers. Then nothing is yielded for functions of known packages and objects that fail when looked at.
        seen: Gets each object that was looked at, by its id.
    """
    seen = {} if seen is None else seen
    waiting: list[tuple[Any, Any]] = [*roots][::-1]  # not recursion, because functions that call each other may be many
    while waiting and not (light and len(seen) > MOST):
        name, value = waiting.pop()
        label = None if name in left_out else name  # what is inside is searched, so that it has no other name
        lines, inner = list[Any](), list[tuple[Any, Any]]()
        if value is None or isinstance(value, PLAIN):
            lines = [repr(value).encode()]
        elif not isinstance(value, ModuleType) and id(value) not in seen and (not seen or id(value) not in known):
            seen[id(value)] = value  # alive, so that no other value gets its id
            try:
                lines, inner = _parts_of(value, light)
            except Exception:
                if not light:
                    raise
        if lines and label is not None:
            yield label, lines
        waiting += [(label if label is None else f"{label}.{key}", own) for key, own in reversed(inner)]


def _parts_of(value: Any, light: bool) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """Return bytes for a value itself, and the values inside it with their names; see `described`."""
    if isinstance(value, torch.Tensor):
        if light:
            return [weakref.ref(value)], [("version", -1 if value.is_inference() else value._version)]
        lines: list[Any] = []
        for name, tensor in inner_tensors("", value):
            lines += [f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), tensor_bytes(tensor)]
        return lines, []
    if isinstance(value, np.ndarray | memoryview):
        value = np.asarray(value)
        step = value.size // LONG + 1 if light else 1
        content = value.tolist() if value.dtype.hasobject else value.flat[::step].tobytes()
        return [f"{value.dtype} {value.shape}".encode()], [("elements", content)]
    if isinstance(value, CodeType):
        if light:
            return [value], []
        names = repr((value.co_names, value.co_varnames, value.co_flags))
        return [value.co_code, names.encode()], list(enumerate(value.co_consts))
    if isinstance(value, FunctionType):
        code, is_of_package = value.__code__, of_package(value)
        if is_of_package and light:
            return [], []
        cells = zip(code.co_freevars, map(cell_content, value.__closure__ or ()), strict=True)
        inner = [("code", code), ("defaults", value.__defaults__), ("keywords", value.__kwdefaults__), *cells]
        # The global names of a library hold its own state, which may change at any time.
        if not is_of_package and not (light and "-packages" in code.co_filename):
            inner += _globals_of(value)
        return [b"function"], inner
    if isinstance(value, functools.partial):
        arguments = [*enumerate(value.args), *value.keywords.items()]
        inner = [("function", value.func), *((str(name), own) for name, own in arguments)]
        unchangeable = (*PLAIN, BuiltinFunctionType) if light else ()
        return [b"partial"], [(name, own) for name, own in inner if not isinstance(own, unchangeable)]
    if isinstance(value, weakref.ref):
        return [b"weak reference"], [("referent", value())]
    if isinstance(value, MethodType):
        return [b"method"], [("function", value.__func__), ("self", value.__self__)]
    if isinstance(value, list | tuple | set | frozenset | dict | MappingProxyType):
        most = LONG if light else None
        line = f"{type(value).__name__} {len(value)}".encode()
        if isinstance(value, dict | MappingProxyType):
            items = list(islice(value.items(), most))
            keys = [("key", key) for key, _ in items if not isinstance(key, str | int)]
            return [line], keys + [(k if isinstance(k, str | int) else n, v) for n, (k, v) in enumerate(items)]
        ordered = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [line], list(enumerate(islice(ordered, most)))
    if isinstance(value, type):
        members = [(n, m) for n, m in vars(value).items() if not n.startswith("__") or isinstance(m, FunctionType)]
        own = [] if is_known(value.__module__) else [("bases", value.__bases__), *members]
        return [f"{value.__module__}.{value.__qualname__}".encode()], own
    if isinstance(value, Enum):
        return [f"{type(value).__module__}.{type(value).__qualname__}.{value.name}".encode()], []
    if isinstance(value, torch.ScriptObject):  # holds packed weights, and its state is a copy of them
        read = getattr(value, "__getstate__")  # noqa: B009  torch.ScriptObject does not declare it
        return ([], []) if light else ([b"script object"], [("state", read())])
    kind, inner = type(value), [("function", function) for function in functions_of(value)]
    followed = not is_known(kind.__module__) and not hasattr(kind, "to_dict")  # configs are compared as a whole
    if followed or isinstance(value, torch.nn.Module | SimpleNamespace):
        slots = [n for base in kind.__mro__ for n, m in vars(base).items() if isinstance(m, MemberDescriptorType)]
        inner += [(kind.__name__, kind), *getattr(value, "__dict__", {}).items()]
        inner += [(name, getattr(value, name, None)) for name in slots]
    elif dataclasses.is_dataclass(value) and not hasattr(kind, "to_dict"):
        held = [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
        inner += [(name, own) for name, own in held if isinstance(own, _SETTINGS) or dataclasses.is_dataclass(own)]
    if any(base.__module__ in _REDUCED for base in kind.__mro__[:-1]):
        inner += _reduced(value, LONG if light else None)
    return [f"{kind.__module__}.{kind.__qualname__}".encode()], inner


def _reduced(value: Any, most: int | None) -> Iterator[tuple[str, Any]]:
    """Yield what pickle keeps of an object, up to `most` entries; nothing of an object without it, such as a lock."""
    with contextlib.suppress(Exception):
        reduce: Callable[[Any], Any] = copyreg.dispatch_table.get(type(value), methodcaller("__reduce_ex__", 2))
        reduced = reduce(value)
        for n, part in enumerate([reduced] if isinstance(reduced, str) else reduced[1:]):
            yield f"part {n}", list(islice(part, most)) if isinstance(part, Iterator) else part


def _globals_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the global names that a function looks up, also within modules of no known package, and their values."""
    space, names = function.__globals__, set(names_of(function.__code__))
    for name in sorted(names & space.keys()):
        yield name, space[name]
        if isinstance(space[name], ModuleType) and not is_known(space[name].__name__):
            within = vars(space[name])
            yield from ((f"{name}.{own}", within[own]) for own in sorted(names & within.keys()))
