"""A check whether a model has changed: weights, buffers, modules, settings, hooks, functions and adapters.

Keys and values depend on all of these and on the prompt's tokens, so a changed model must not read old blocks. An
`Identity` keeps every attribute of every module and config, and the functions of the forward pass. Of tensors it keeps
version, address and a sample of elements. It compares attributes by identity. A comparison takes less than a
millisecond for 48 layers.
"""

from __future__ import annotations

import hashlib
import json
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, repeat
from operator import contains, is_, itemgetter
from types import FunctionType
from typing import Any

import numpy as np
import torch

from .api import COMPILED, KEPT_MANAGER, RECORDING, SILENT_ENTRIES, is_own_hook
from .calls import refuse_if, refusing
from .functions import (
    PLAIN,
    Functions,
    Held,
    content_digest,
    differing,
    functions_of,
    is_known,
    names_used,
    reader_of,
    restored,
)
from .support import (
    CHANGING_ROPE,
    PLAIN_TENSORS,
    attached_tensors,
    inner_tensors,
    is_quantized_weight,
    tensor_bytes,
    wrappers_of,
)

SAMPLED = 16  # number of elements of each weight that are compared before a call
MANY = 1 << 14  # the same for weights whose version is useless, because each forward pass raises it
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ADAPTER_STATE = frozenset({"active_adapters", "_active_adapter", "disable_adapters", "_disable_adapters", "scaling"})
"""Attributes in which PEFT's layers keep the active adapters.

They are not compared, because `adapter_keys` adds them to the keys of blocks.
"""
_INTERNAL = frozenset(vars(torch.nn.Module())) - {"training"}
"""Attributes of every torch module. Of these, an `Identity` compares parameters, buffers, submodules and `_HOOKS`."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OF_ACCELERATE = "_hf_hook"
"""The attribute in which accelerate keeps the hook that it runs in a module's forward pass."""
_OF_HOOKS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
"""Attributes in which torch notes how it calls some hooks."""
_CHANGE_HOOKS = frozenset({"remove", "register_forward_hook", "register_forward_pre_hook"})
"""Methods with which code changes hooks."""
_OF_ACCELERATE = "_hf_hook"
"""The attribute in which accelerate keeps the hook that it runs in a module's forward pass."""
_BY_LENGTH = ("inv_freq", "max_seq_len_cached")
"""Ends of the names of attributes that a rotary embedding may change with the input length."""
_AT_SWITCH = "long_inv_freq"
"""An attribute that longrope adds, before transformers 5.24 only when it first switches its frequencies."""
ATTACHED = frozenset(
    {"generate", "init_continuous_batching", "__getstate__", KEPT_MANAGER, RECORDING, "_is_torch_compile", *COMPILED}
)
"""Attributes of a model that this package, transformers or torch.compile adds. They do not change keys and values."""
_ELSEWHERE = frozenset({"config", "generation_config", "peft_config", "name_or_path", "hf_device_map", "training"})
"""Attributes that a fingerprint leaves out. It covers configs as a whole; the others do not affect keys and values."""
_COMPARED = (torch.Tensor, torch.nn.Module, dict, list, tuple, *PLAIN, type(None))
"""Types of attributes that an `Identity` compares itself."""
_SIMPLE = (bool, int, float, str, dict, list, tuple, set, frozenset, type(None))
_MOVED = "the dtype or device of a tensor"
"""Among the names of `set_by_forward` if another thread has changed it meanwhile, as `model.to` does."""
ROW_HOOKS = ("adapter_names", "alora_offsets")
"""Names of the settings that PEFT gives its layers for each row, through hooks that it adds for one call."""


class Identity:
    """A model as it was when this object was made.

    Args:
        model: The model.
        transient: Attributes that are not compared, and names of tensors whose versions are not compared. See
            `set_by_forward`.
    """

    def __init__(self, model: Any, transient: Collection[Any] = ()) -> None:
        self._moved = _MOVED in transient
        named = dict(model.named_modules())
        self._modules = {label: m for label, m in named.items() if m is not model}
        self.adapters = [m for m in self._modules.values() if _is_adapter(m)]
        self._left_out = _INTERNAL | ATTACHED | set(transient)
        # An identity must not keep its model alive, so it reads the model's own attributes through the model.
        root = _attributes_of(model, self._left_out)
        self._root_names = list(root)
        self._settings: list[tuple[Any, dict[str, Any]]] = []
        # The module's name and the attributes' names, for each result of `_attributes`, in the same order.
        labels: list[tuple[str, tuple[Any, ...]]] = [("", tuple(root))]
        nested: dict[int, tuple[str, Any]] = {}
        for label, m in self._modules.items():
            left_out = _INTERNAL | {RECORDING} | set(transient) | (ADAPTER_STATE if _is_adapter(m) else frozenset())
            own = _attributes_of(m, left_out)
            if own:  # the module that torch.compile wraps around another has none
                names = *own, next(iter(own))  # `itemgetter` returns a tuple only for two names or more
                self._settings.append((itemgetter(*names), vars(m)))
                labels.append((label, names))
            _nested(label, own, nested)
        _nested("", root, nested)
        for config in _configs(model):
            nested[id(vars(config))] = "config", vars(config)
            _nested("config", vars(config), nested)
        tables = [(label, table) for label, m in named.items() for table in (*_tensor_tables(m), m._modules)]
        containers = [*nested.values(), *tables]
        dicts = [(label, c) for label, c in containers if c and isinstance(c, dict)]
        lists = [(label, c) for label, c in containers if c and not isinstance(c, dict)]
        self._containers = [c for _, c in containers]
        self._dicts, self._lists = [c for _, c in dicts], [c for _, c in lists]
        labels += [(label, tuple(c)) for label, c in dicts] + [(label, tuple(range(len(c)))) for label, c in lists]
        self._labels = labels
        self._all_attributes = every = [vars(m) for m in self._modules.values()]
        # Names of attributes that modules may get later, and the attributes of these modules.
        self._uncounted = [(RECORDING, every), (_AT_SWITCH, every)]
        for kind, name in (own for own in transient if isinstance(own, tuple)):
            self._uncounted.append((name, [vars(m) for m in self._modules.values() if type(m) is kind]))
        self._kept_lengths = self._lengths()
        self._hook_tables = [vars(m)[n] for m in named.values() for n in _HOOKS]
        self._kept_hooks = self._hooks()
        found = list(_model_tensors(model, transient))
        self._found = [t for _, t, _ in found]
        self._tensors = {n: t for n, t, plain in found if not (plain and n in transient)}
        self._versioned = {n: t for n, t in self._tensors.items() if not t.is_inference() and n not in transient}
        self._in_memory = {n: t for n, t in self._tensors.items() if t.layout == torch.strided and not t.is_meta}
        self._samples = _Samples([(n, t, MANY if n in transient else SAMPLED) for n, t in self._in_memory.items()])
        self._kept = list(self._attributes(model))
        self._types = [type(model), *map(type, self._modules.values())]
        self._functions = Functions(model)
        self._read_held = held_reader(model, self._functions, transient)
        self._held = self._read_held()
        self._numbers = self._tensor_numbers()
        self._content = self._samples.elements()

    def _attributes(self, model: Any) -> Iterator[Any]:
        """Return the current values of all watched attributes, always in the same order."""
        root = vars(model)
        return chain(
            [root.get(name) for name in self._root_names],
            chain.from_iterable([get(attributes) for get, attributes in self._settings]),
            chain.from_iterable(map(dict.values, self._dicts)),
            chain.from_iterable(self._lists),
        )

    def _lengths(self) -> list[int]:
        """Return the number of all modules' attributes, and that of each container's values."""
        uncounted = sum(sum(map(contains, own, repeat(name))) for name, own in self._uncounted)
        return [sum(map(len, self._all_attributes)) - uncounted, *map(len, self._containers)]

    def _hooks(self) -> list[tuple[int, Any]]:
        """Return the hooks of all modules, except transformers' own and those that PEFT adds for one call."""
        tables = [(number, table) for number, table in enumerate(self._hook_tables) if table]
        return [(n, hook) for n, table in tables for hook in table.values() if not is_harmless(hook)]

    def row_settings(self) -> dict[str, Any]:
        """Return the settings that PEFT's hooks give its layers for each row, by name.

        Raises:
            UnsupportedError: The hooks of two layers give different values.
        """
        found: dict[str, Any] = {}
        for module in self.adapters:
            for hook in module._forward_pre_hooks.values():
                for name, value in _row_settings(hook).items():
                    refuse_if(found.setdefault(name, value) is not value, f"layers differ in {name}")
        return found

    def _tensor_numbers(self) -> list[int]:
        """Return the addresses and versions of tensors, which change if a tensor is replaced or written to."""
        return [t.data_ptr() for t in self._in_memory.values()] + [t._version for t in self._versioned.values()]

    def _adapter_names(self) -> list[Any]:
        """Return the object with which each layer names its active PEFT adapters. Each switch makes a new one."""
        return [vars(m).get("_active_adapter") for m in self.adapters]

    def changed(self, model: Any) -> bool:
        """Return whether a tensor, a module, a hook, a setting or a function was replaced or modified.

        Switching adapters is not a change; see `adapter_keys`.
        """
        return self._restructured(model) or self._samples.elements() != self._content

    def watch(self, model: Any) -> Callable[[], bool]:
        """Return a function that checks whether the model still has this identity and the adapters that are active now.

        Adapters that were switched and switched back since, even within one forward pass, count as a change.
        Callers run it before each forward pass. It does not compare elements of tensors on devices, because that would
        wait for the device.
        """
        # The names come first: if another thread switches adapters meanwhile, they are no longer current.
        names, keys, reference = self._adapter_names(), self.adapter_keys(), weakref.ref(model)

        def unchanged() -> bool:
            now = reference()
            if now is None or self._restructured(now):
                return False
            if not all(map(is_, self._adapter_names(), names)) or self.adapter_keys() != keys:
                return False
            elements = self._samples.elements(on_devices=False)
            return elements == self._content[: len(elements)]

        return unchanged

    def _restructured(self, model: Any) -> bool:
        """Return whether anything but the sampled elements of tensors and the active adapters has changed."""
        try:
            return self._moved or not (
                len(_attributes_of(model, self._left_out)) == len(self._root_names)
                and self._lengths() == self._kept_lengths
                and self._hooks() == self._kept_hooks
                and all(map(is_, self._attributes(model), self._kept))
                and [type(model), *map(type, self._modules.values())] == self._types
                and self._tensor_numbers() == self._numbers
                and not self._functions.changed()
                and not differing(self._held, self._read_held())
            )
        except KeyError:  # an attribute was deleted
            return True

    def adapter_keys(self) -> tuple[str, ...]:
        """Return keys for the active PEFT adapters of each layer and their scaling; () without adapters."""
        states = [
            f"{i} {m.active_adapters} {m.disable_adapters} {getattr(m, 'scaling', None)}"
            for i, m in enumerate(self.adapters)
        ]
        return ("adapters", hashlib.sha256("\n".join(states).encode()).hexdigest()) if states else ()

    def fingerprint(self, model: Any) -> str:
        """Return a hash, in hexadecimal, that is equal in every process with this model.

        It covers all that `changed` compares, with all elements of tensors, and also the content of hooks and objects.

        Raises:
            UnsupportedError: A tensor of the model cannot be read.
        """
        known = {id(value): value for value in (*model.modules(), *self._found)}
        lines: list[Any] = [type(model).__name__, *map(_config_line, _configs(model))]
        for label, module in model.named_modules():
            with refusing(f"the attributes of {label or 'the model'} cannot be compared with those of another process"):
                lines += [
                    f"{label} {type(module).__module__} {type(module).__qualname__}",
                    self._content_of(module, known),
                ]
        for name, value, _ in _in_attributes(model, self._left_out):
            if isinstance(value, torch.Tensor) and (wrappers := wrappers_of(value)):
                with refusing(f"{name} cannot be compared with that of another process"):
                    lines.append(f"{name} {content_digest(wrappers, known)}")
        lines += self._functions.lines(known)
        digest = hashlib.sha256()
        for line in lines:
            digest.update(line.encode())
        for name, tensor in self._tensors.items():
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            with refusing(f"the elements of {name} cannot be compared with those of another process"):
                digest.update(tensor_bytes(tensor))
        return digest.hexdigest()

    def _content_of(self, module: torch.nn.Module, known: dict[int, Any]) -> str:
        """Return a digest of a module's attributes and hooks, without what `known` holds by id."""
        hooks = list(_acting(module).values())
        left_out = {*self._left_out, *_ELSEWHERE, *(ADAPTER_STATE if _is_adapter(module) else ())}
        kept = {n: v for n, v in _attributes_of(module, left_out).items() if not _is_of_framework(n, v)}
        return content_digest((hooks, sorted(kept.items(), key=itemgetter(0))), known)

    def difference(self, later: Identity) -> str:
        """Return the name of one difference between this and a later identity of the model."""
        return next(iter(differing(self._seen(), later._seen())), "the model")

    def _seen(self) -> Held:
        """Return everything that is compared, by a name that a user understands."""
        names = [_joined(label, str(key)) for label, keys in self._labels for key in keys]
        classes = [f"{name}'s class" for name in ("the model", *self._modules)]
        tables = [_joined(label, name) for label in ("", *self._modules) for name in _HOOKS]
        numbers = [f"{name}'s address" for name in self._in_memory] + [f"{name}'s version" for name in self._versioned]
        found: dict[str, Any] = dict(zip(names, self._kept, strict=False))
        found |= zip(classes, self._types, strict=True)
        found |= {f"{tables[n]}, {_name_of(hook)}": hook for n, hook in self._kept_hooks}
        found |= zip(numbers, map(str.encode, map(str, self._numbers)), strict=True)
        found |= {f"{name}'s elements": part for name, part in self._samples.by_name(self._content)}
        functions = {name: [value] for name, value in self._functions.seen()}
        return {name: [value] for name, value in found.items()} | self._held | functions


def _row_settings(hook: Any) -> dict[str, Any]:
    """Return the settings for each row that a hook of PEFT carries; {} for another hook."""
    keywords = hook.keywords if isinstance(hook, partial) else {}
    return keywords if keywords and set(keywords) <= set(ROW_HOOKS) else {}


def is_harmless(hook: Any) -> bool:
    """Return whether a hook computes nothing: it records outputs for transformers, or names adapters for one call."""
    return is_own_hook(hook) or bool(_row_settings(hook))


def _config_line(config: Any) -> str:
    """Return the entries of a config that affect keys and values, as JSON."""
    entries = {name: value for name, value in config.to_dict().items() if name not in SILENT_ENTRIES}
    return json.dumps(entries, sort_keys=True, default=str)


def _is_of_framework(name: str, value: Any) -> bool:
    """Return whether an attribute holds state of the framework, such as whether a module was initialized."""
    return name.startswith("_") and isinstance(value, _SIMPLE)


def _name_of(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def _joined(label: str, name: str) -> str:
    return f"{label}.{name}" if label else name


def _is_adapter(module: torch.nn.Module) -> bool:
    """Return whether a module is a layer of a PEFT adapter."""
    return hasattr(module, "disable_adapters") and not callable(getattr(module, "active_adapters", None))


@contextmanager
def restored_hooks(model: Any) -> Iterator[None]:
    """Put back, after a `with` block, the hooks that hooks of a user have removed, and remove those that they added.

    Within the block, the hooks through which PEFT gives its layers settings for each row are removed. Hooks of
    libraries stay as the block leaves them: a lazy module of torch removes its own once it is initialized.
    """
    # Without such code the tables stay as they are, because another thread may register or remove hooks meanwhile.
    changing = not _CHANGE_HOOKS.isdisjoint(names_used(_hooks_of(model)))
    tables = [vars(m)[name] for m in model.modules() for name in (*_HOOKS, *_OF_HOOKS)]
    kept = [table.copy() for table in tables]
    for table in tables:
        for number in [number for number, hook in table.items() if _row_settings(hook)]:
            del table[number]
    try:
        yield
    finally:
        for table, before in zip(tables, kept, strict=True):
            every = {**before, **table}
            hooks = {n: hook for n, hook in every.items() if n in (before if _is_restored(hook, changing) else table)}
            if list(hooks.items()) != list(table.items()):
                table.clear()
                table.update(hooks)


def _is_restored(hook: Any, changing: bool) -> bool:
    own = isinstance(hook, bool) or not all(map(is_known, _files_of(hook)))
    return bool(_row_settings(hook)) or (own and changing)


def _values_of(module: torch.nn.Module) -> Held:
    """Return the value of each attribute of a module, with the values inside a dict, list or tuple, by its name."""
    found: Held = {}
    for name, value in vars(module).items():
        nested: dict[int, tuple[str, Any]] = {}
        _nested(name, {} if name in _INTERNAL else {name: value}, nested)
        inside = (c.values() if isinstance(c, dict) else c for _, c in nested.values())
        found[name] = [value, *chain.from_iterable(inside)]
    return found


@contextmanager
def set_by_forward(model: Any, functions: Functions) -> Iterator[set[Any]]:
    """Yield a set that gets what forward passes in the `with` block change: attributes, and the names of tensors.

    An attribute is a pair of a class and a name. It is left out in all modules of the class, because a pass may not run
    all of them.
    PEFT's LoRA on parameters, for example, replaces a parameter during each pass and restores it afterwards. The
    parameter has a higher version then. If another thread moves the model meanwhile, it counts as changed at once,
    because what was probed is neither the old model nor the new one.
    """
    found: set[Any] = set()
    read_held = held_reader(model, functions)
    held = read_held()
    before = [(m, _values_of(m)) for m in model.modules()]
    tensors = {name: (t, t._version) for name, t, _ in _model_tensors(model) if not t.is_inference()}
    places = {name: (t.dtype, t.device) for name, (t, _) in tensors.items()}
    yield found
    for module, values in before:
        found.update((type(module), name) for name in differing(values, _values_of(module)))
    for name, tensor, _ in _model_tensors(model):
        old, version = tensors.get(name, (None, 0))
        if old is tensor and tensor._version != version:
            found.add(name)
        if places.get(name, (tensor.dtype, tensor.device)) != (tensor.dtype, tensor.device):
            found.add(_MOVED)
    found.update(differing(held, read_held()))


def held_reader(model: Any, functions: Functions, left_out: Collection[str] = ()) -> Callable[[], Held]:
    """Return a function that reads what a model's hooks, functions and other objects hold.

    It leaves out modules, tensors and their containers.
    """
    return reader_of(_holders(model, functions), left_out, {id(module) for module in model.modules()})


@contextmanager
def restored_holders(model: Any) -> Iterator[Functions]:
    """Put back, after a `with` block, what a model's hooks and functions hold, such as counts. Yield the functions.

    What hooks hold in attributes of the model and of modules with hooks is put back too; see `restored`.
    """
    functions, modules = Functions(model), {id(module): module for module in model.modules()}
    hooks, hooked = _hooks_of(model), [m for m in modules.values() if m is model or _acting(m)]
    others = {
        name: value
        for name, value in _holders(model, functions).items()
        if name not in hooks and (isinstance(value, FunctionType) or name.endswith("forward"))
    }
    with restored(hooks, others, modules, hooked):
        yield functions


def _acting(module: torch.nn.Module) -> dict[str, Any]:
    """Return the hooks of a module that may compute something, also those of accelerate, by name."""
    hooks = {name: [h for h in vars(module)[name].values() if not is_harmless(h)] for name in _HOOKS}
    if _OF_ACCELERATE in vars(module):
        hook = vars(module)[_OF_ACCELERATE]
        hooks[_OF_ACCELERATE] = list(getattr(hook, "hooks", [hook]))  # a SequentialHook has several
    return {f"{name}.{n}, {_name_of(hook)}": hook for name, own in hooks.items() for n, hook in enumerate(own)}


def _hooks_of(model: Any) -> dict[str, Any]:
    """Return the hooks of a model's modules that may compute something, by name."""
    acting = ((label, _acting(module)) for label, module in model.named_modules())
    return {_joined(label, name): hook for label, hooks in acting for name, hook in hooks.items()}


def has_own_code(model: Any) -> bool:
    """Return whether a user's code may compute anything in a model: hooks, or forwards or classes of its modules.

    Hooks of libraries count too, but not their forwards and classes, nor those in the model's own files from the hub.
    """
    kinds = {type(module) for module in model.modules()}
    own = [vars(module)["forward"] for module in model.modules() if "forward" in vars(module)]
    hooks = chain.from_iterable(map(_files_of, _hooks_of(model).values()))
    forwards = chain.from_iterable(map(_files_of, (*own, *(kind.forward for kind in kinds))))
    return not (all(map(is_known, hooks)) and all(map(_is_installed, (*forwards, *(k.__module__ for k in kinds)))))


def _files_of(code: Any) -> list[str]:
    """Return the names of the modules in which the functions of a hook or a forward are defined."""
    functions = list(functions_of(code))  # by their globals: functools.wraps copies `__module__`
    return [str(f.__globals__.get("__name__")) for f in functions] or [type(code).__module__]


def _is_installed(module: str) -> bool:
    """Return whether a module is in an installed package, or made by transformers of a file from the hub."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return is_known(module) or "-packages" in file or module.startswith("transformers_modules.")


def _holders(model: Any, functions: Functions) -> dict[str, Any]:
    """Return a model's hooks, functions and other objects, by name, without modules, tensors and their containers."""
    roots = _hooks_of(model)
    for name, value, _ in _in_attributes(model):
        if not isinstance(value, _COMPARED) and not _is_of_framework(name.rpartition(".")[2], value):
            roots[name] = value
    for f in functions.followed:
        name = f"{f.__module__}.{f.__qualname__}"
        roots[name if name not in roots else f"{name} {len(roots)}"] = f
    return roots


def _changes_itself(module: torch.nn.Module) -> bool:
    """Return whether a module is a rotary embedding that changes its frequencies with the input length."""
    kind = getattr(module, "rope_type", None)
    kinds = kind.values() if isinstance(kind, dict) else (kind,)
    return any(k in CHANGING_ROPE for k in kinds if isinstance(k, str))


def _attributes_of(module: torch.nn.Module, left_out: Collection[Any]) -> dict[str, Any]:
    """Return a module's attributes except those that it changes with the input length, and those in `left_out`.

    `left_out` has names, and pairs of a class and a name.
    """
    kind, ends = type(module), _BY_LENGTH if _changes_itself(module) else ()
    kept = ((n, v) for n, v in vars(module).items() if n not in left_out and (kind, n) not in left_out)
    return {n: v for n, v in kept if not n.endswith(ends)}


def _tensor_tables(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Return a module's parameters and buffers, without buffers that it changes with the input length."""
    return [module._parameters, *([] if _changes_itself(module) else [module._buffers])]


def _nested(label: str, values: dict[str, Any], found: dict[int, tuple[str, Any]], depth: int = 3) -> None:
    """Add to `found` the name of each dict, list and tuple among `values`, and the container itself, by its id.

    Containers inside these are added too, down to `depth` levels.
    """
    for name, value in values.items():
        if isinstance(value, dict | list | tuple) and id(value) not in found and depth:
            own = _joined(label, str(name))
            found[id(value)] = own, value
            within = value if isinstance(value, dict) else {str(n): v for n, v in enumerate(value)}
            _nested(own, within, found, depth - 1)


def _configs(model: Any) -> list[Any]:
    """Return the configs of all modules and their nested configs, without duplicates."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if hasattr(config, "to_dict"):
            found[id(config)] = config
            found |= {id(v): v for v in vars(config).values() if hasattr(v, "to_dict") and hasattr(v, "__dict__")}
    return list(found.values())


def _model_tensors(model: Any, left_out: Collection[Any] = ()) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield each tensor of a model once: its name, the tensor, and whether it is neither a parameter nor a buffer.

    Such plain tensors are in attributes of modules, or in containers there. Attributes in `left_out` are skipped, and
    so are frequencies that change with the input length. Of a tensor subclass, the tensors that it wraps count.
    """
    seen: set[int] = set()
    for name, value, plain in _in_attributes(model, left_out):
        if isinstance(value, torch.Tensor) and id(value) not in seen:
            seen.add(id(value))
            yield from ((n, t, plain) for n, t in inner_tensors(name, value))
        elif type(value).__module__.partition(".")[0] == "bitsandbytes":  # the scales of an 8-bit weight
            yield from ((n, t, plain) for n, t in attached_tensors(name, value))


def _in_attributes(model: Any, left_out: Collection[Any] = ()) -> Iterator[tuple[str, Any, bool]]:
    """Yield each parameter, buffer and attribute of a model's modules, and what containers in attributes hold.

    With each come its name, and whether it is neither a parameter nor a buffer.
    """
    left_out = {*_INTERNAL, *ATTACHED, *left_out}
    for label, module in model.named_modules():
        own = _attributes_of(module, left_out)
        nested: dict[int, tuple[str, Any]] = {}
        _nested(label, own, nested)
        registered = [(label, table, False) for table in _tensor_tables(module)]
        others = [(name, held, True) for name, held in ((label, own), *nested.values())]
        for name, held, plain in (*registered, *others):
            for key, value in held.items() if isinstance(held, dict) else enumerate(held):
                yield _joined(name, str(key)), value, plain


class _Samples:
    """Views of some elements of tensors. Their bytes show whether the tensors have changed."""

    def __init__(self, tensors: list[tuple[str, torch.Tensor, int]]) -> None:
        # Tensors in host memory are grouped by element size, others by device and dtype, those on devices last. `names`
        # has for each group the names of its tensors and the number of bytes of each sample.
        host: dict[int, list[np.ndarray]] = {}
        other: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        names: dict[Any, list[tuple[str, int]]] = {}
        for name, tensor, count in tensors:
            if not tensor.numel() or not (type(tensor) in PLAIN_TENSORS or is_quantized_weight(tensor)):
                continue
            with torch._C.DisableTorchFunctionSubclass():  # the view of a subclass is a plain tensor
                view, size = _sample(tensor.detach(), count), tensor.dtype.itemsize
            key: Any = size if tensor.device.type == "cpu" and size in _INTEGERS else (tensor.device, tensor.dtype)
            if key == size:
                # Not `Tensor.numpy`, which would make the weight's storage fixed in size; FSDP, for one, resizes it.
                host.setdefault(key, []).append(np.from_dlpack(view.view(_INTEGERS[size])))
            else:
                other.setdefault(key, []).append(view)
            names.setdefault(key, []).append((name, view.numel() * size))
        order = sorted(other, key=lambda key: key[0].type != "cpu")
        self._host, self._other = list(host.values()), [other[key] for key in order]
        self._names = [names[key] for key in (*host, *order)]

    @torch.no_grad()
    def elements(self, on_devices: bool = True) -> list[bytes]:
        """Return the bytes of all samples in a few pieces, one for each group.

        Reading tensors on devices waits for the device. Without `on_devices` their pieces, the last ones, are left out.
        """
        found = [np.concatenate(views).tobytes() for views in self._host]
        other = [views for views in self._other if on_devices or views[0].device.type == "cpu"]
        return found + [torch.cat(views).cpu().view(torch.uint8).numpy().tobytes() for views in other]

    def by_name(self, pieces: list[bytes]) -> Iterator[tuple[str, bytes]]:
        """Yield the name and bytes of each tensor in the pieces."""
        for names, piece in zip(self._names, pieces, strict=True):
            begin = 0
            for name, count in names:
                yield name, piece[begin : begin + count]
                begin += count


def _sample(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Return a view of up to `most` elements. Their distance is odd, so that they lie in different columns."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = min(span, most)
    return tensor.as_strided((count,), ((span // count - 1) | 1,), tensor.storage_offset())
