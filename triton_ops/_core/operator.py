"""Operators from typed functions. Schema, public function, fake and errors follow from a function's signature.

A registration looks like this:

    @operator(check=_check, run=_run, build=_build, mutates=("cache",))
    def scatter_blocks(source: torch.Tensor, cache: torch.Tensor, block_ids: torch.Tensor) -> None: ...

This registers `torch.ops.pc.scatter_blocks` and replaces the function with one that calls the operator. The body of the
function is the operator's fake. It returns a result of the right shape, dtype, strides and device, without data.

Every operator has these kernels:

    Autograd        raises for tensors that gradients flow through, backward or forward
    Autocast        turns autocast off, so that it cannot lower the precision inside the operator
    Conjugate,      for operators that write: resolve lazy bits of tensors; torch's own kernels expect a result
    Negative
    CPU, CUDA       run the operator; before a write they copy inputs that share memory with written tensors
    Meta            the fake

A call through `Library.define` and `impl` takes 1.8 us, where `custom_op` takes 7 and `triton_op` 8 (torch 2.13). This
matters, because decode is bound by launches. In inference mode a call skips the Autograd kernel.
"""

from __future__ import annotations

import collections
import functools
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from .cache import launch_finder
from .checks import INDEX_DTYPES, bad_argument, check_writable, describe, reads_values, refuse_grad
from .runtime import KERNELS_ON_CPU, require_triton

# "pc", or the name under which a copy of the package is imported, so that the operators of both do not collide.
NAMESPACE = __name__.partition(".")[0]
LIBRARY = torch.library.Library(NAMESPACE, "DEF")

P = ParamSpec("P")
R = TypeVar("R")

_ARGUMENT_TYPES: dict[object, tuple[str, str, tuple[type, ...]]] = {
    torch.Tensor: ("Tensor", "a tensor", (torch.Tensor,)),
    torch.Tensor | None: ("Tensor?", "a tensor or None", (torch.Tensor, type(None))),
    Sequence[torch.Tensor]: ("Tensor[]", "a list of tensors", (list, tuple)),
    int: ("SymInt", "an int", (int, torch.SymInt)),
    int | None: ("SymInt?", "an int or None", (int, torch.SymInt, type(None))),
    float: ("float", "a float", (float, int, torch.SymFloat, torch.SymInt)),
    bool: ("bool", "a bool", (bool, torch.SymBool)),
    torch.dtype: ("ScalarType", "a torch.dtype", (torch.dtype,)),
    torch.device | str | None: ("Device?", "a device or None", (torch.device, str, type(None))),
}
"""For each annotation of an argument: its type in a schema, its description, and the classes that torch accepts."""

_ROWS = frozenset({"cache", "caches", "source", "sources", "new", "news"})
"""Parameters that hold rows of any dtype, also integers; tensors of integers under other names are indices."""

_RESULT_TYPES: dict[object, str] = {
    type(None): "()",
    torch.Tensor: "Tensor",
    tuple[torch.Tensor, torch.Tensor]: "(Tensor, Tensor)",
    list[torch.Tensor]: "Tensor[]",
}


def record_of(function: Callable[..., object]) -> Any:
    """Return a named tuple class of a function's parameters with their defaults."""
    parameters = inspect.signature(function).parameters
    defaults = [p.default for p in parameters.values() if p.default is not p.empty]
    return collections.namedtuple(function.__name__, parameters, defaults=defaults)


def operator(
    *,
    run: Callable[[Any], Any],
    build: Callable[[Any], Callable[[Any], Any]] | None = None,
    check: Callable[[Any], object] = lambda args: None,
    check_values: Callable[[Any], object] | None = None,
    mutates: tuple[str, ...] = (),
    arguments: Callable[[Callable[..., Any]], Callable[..., Any]] = record_of,
    docs_from: tuple[Callable[..., Any], ...] = (),
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register the decorated function as `torch.ops.pc.<its name>` and return a function that calls the operator.

    All functions below take one named tuple, the arguments by name. A parameter `out: torch.Tensor | None = None` at
    the end makes two operators, `<name>` and `<name>.out`. The second writes to `out` and must return None.

    The returned function has an attribute `check`. It takes the arguments of a call, makes the checks of the operator,
    and returns an empty result.

    Args:
        run: Runs a call on CPU tensors; without `build`, on tensors of any device.
        build: Returns the launch for all calls with the same options and metadata. It runs on GPU tensors, and on CPU
            tensors if kernels run there (`runtime.KERNELS_ON_CPU`).
        check: Checks metadata, before `run`, `build` and the fake.
        check_values: Checks values before a launch that `build` returned, if they may be read. `run` must check values
            itself.
        mutates: The parameters that are written to.
        arguments: Takes the decorated function; returns the function that makes the named tuple.
        docs_from: Operators whose docstrings complete the function's own: see `inherited_doc`.
    """
    required: list[str] = []

    def check_all(args: Any) -> None:
        for name in required:  # torch's dispatcher takes None for any tensor
            if getattr(args, name, args) is None:
                raise bad_argument(name, "None", "a tensor", TypeError)
        check(args)
        for name in mutates:
            for tensor in _tensors([getattr(args, name)]):
                check_writable(name, tensor)

    def find_run(args: Any) -> Callable[[Any], Any]:
        check_all(args)
        return run

    def decorate(fake: Callable[P, R]) -> Callable[P, R]:
        if docs_from and sys.flags.optimize < 2:  # python -OO removes docstrings
            fake.__doc__ = inherited_doc(fake, *docs_from)
        signature, bind, name = _Signature(fake), arguments(fake), fake.__name__
        required.extend(name for name, hint in signature.types.items() if hint is torch.Tensor)

        def build_checked(args: Any) -> Callable[[Any], Any]:
            check_all(args)
            require_triton(name)
            assert build is not None
            return build(args)

        @functools.wraps(fake)
        def checked_fake(*args: P.args, **kwargs: P.kwargs) -> R:
            check_all(bind(*args, **kwargs))
            return fake(*args, **kwargs)

        def check_call(*args: Any, **kwargs: Any) -> Any:
            found, given = checked_fake(*args, **kwargs), bind(*args, **kwargs)
            if check_values is not None and reads_values(given[0]):
                check_values(given)
            return found

        find = find_run if build is None else launch_finder(build_checked, check_values)
        finds = {"CPU": find if KERNELS_ON_CPU else find_run, "CUDA": find}  # ROCm has the same keys
        names, schema = tuple(signature.types), signature.schema(mutates)
        call = _register(name, names, schema, finds, bind, check_all, checked_fake, mutates)
        if signature.has_out:
            schema = signature.schema(mutates, with_out=True)
            nothing, mutated = (lambda *_, **__: None), (*mutates, "out")
            call_out = _register(f"{name}.out", names, schema, finds, bind, check_all, nothing, mutated)
            call = _choosing_out(call, call_out, len(names))
        public = _public(fake, call, signature)
        public.check = check_call  # type: ignore[attr-defined]
        return public

    return decorate


def doc_sections(doc: str | None) -> dict[str, str]:
    """Return the sections of a docstring by heading; the text above them has the heading ''."""
    parts = re.split(r"\n\n(\w+):\n", inspect.cleandoc(doc or ""))
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def joined_sections(sections: Mapping[str, str]) -> str:
    """Return the docstring that has these sections."""
    return "\n\n".join(f"{heading}:\n{text}" if heading else text for heading, text in sections.items())


def inherited_doc(function: Callable[..., object], *docs_from: Callable[..., object]) -> str:
    """Return a function's docstring, completed with arguments and sections of the first function that has them."""
    arguments: dict[str, str] = {}
    for other in (*reversed(docs_from), function):
        entries = re.split(r"\n(?=    \w)", doc_sections(other.__doc__).get("Args", ""))
        arguments |= {entry.strip().partition(":")[0]: entry for entry in entries if entry}
    given = "\n".join(arguments[name] for name in inspect.signature(function).parameters)
    found = doc_sections(docs_from[0].__doc__) | doc_sections(function.__doc__) | {"Args": given}
    if inspect.signature(function).return_annotation in (None, "None"):
        found.pop("Returns", None)
    order = ("", "Args", "Returns", "Raises", "Examples")
    return joined_sections({heading: found[heading] for heading in order if heading in found})


class _Signature:
    """The typed parameters of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        hints = typing.get_type_hints(function)
        self.name = function.__name__
        self._signature = inspect.signature(function)
        self.parameters: Mapping[str, inspect.Parameter] = self._signature.parameters
        self.types = {name: hints[name] for name in self.parameters if name != "out"}
        self.has_out = "out" in self.parameters
        self.result = hints["return"]

    def schema(self, mutates: tuple[str, ...], with_out: bool = False) -> str:
        """Return the schema for torch.library: `(Tensor query, ...) -> Tensor`."""
        assert set(mutates) <= set(self.types), f"{mutates} must be parameters"
        arguments = []
        for name, hint in self.types.items():
            kind = _ARGUMENT_TYPES[hint][0]
            if name in mutates:
                kind = kind.replace("Tensor", f"Tensor({'abcd'[mutates.index(name)]}!)")
            default = self.parameters[name].default
            arguments.append(f"{kind} {name}" + ("" if default is inspect.Parameter.empty else f"={default}"))
        if with_out:
            return f"({', '.join(arguments)}, *, Tensor(a!) out) -> ()"
        return f"({', '.join(arguments)}) -> {_RESULT_TYPES[self.result]}"

    def refusal(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Exception | None:
        """Return the error for an argument of a wrong type, or None if all types are right."""
        try:
            given = self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            return TypeError(f"pc.{self.name}: {error}")
        for name, value in given.items():
            _, needs, classes = _ARGUMENT_TYPES[self.types.get(name, torch.Tensor | None)]
            if not isinstance(value, classes):
                return bad_argument(name, _in_words(value), needs, TypeError)
            if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
                return bad_argument(name, value, f"{needs} of 64 bits")
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if item is not value and not isinstance(item, torch.Tensor):
                    return bad_argument(name, f"{_in_words(item)} in the list", needs, TypeError)
                if isinstance(item, torch.Tensor) and item.layout is not torch.strided:
                    return bad_argument(name, f"layout {item.layout}", "torch.strided", TypeError)
        return None


def _in_words(value: object) -> str:
    return repr(value) if isinstance(value, (bool, int, float, str)) else describe(value)


def _register(
    name: str,
    names: tuple[str, ...],
    schema: str,
    finds: Mapping[str, Callable[[Any], Callable[[Any], Any]]],
    bind: Callable[..., Any],
    check: Callable[[Any], object],
    fake: Callable[..., Any],
    mutates: tuple[str, ...],
) -> Any:
    """Define an operator of the parameters `names`, register its kernels, and return it.

    `finds` has the function that finds the launch of a call, by dispatch key.
    """
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    base, _, overload = name.partition(".")
    call = getattr(getattr(getattr(torch.ops, NAMESPACE), base), overload or "default")
    places = [names.index(parameter) for parameter in mutates if parameter in names]
    for key, find in finds.items():
        LIBRARY.impl(name, _kernel(find, bind, places if mutates else None, key == "CUDA", check), key)
    LIBRARY.impl(name, _refusing_gradients(call, names), "Autograd", with_keyset=True)
    for key in ("AutocastCPU", "AutocastCUDA"):
        LIBRARY.impl(name, _without_autocast(call, key), key)
    for key in ("Conjugate", "Negative") if mutates else ():
        LIBRARY.impl(name, _resolving_bits(call, names, mutates), key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", _refusing_meta(fake, names), lib=LIBRARY)
    return call


def _refusing_gradients(call: Any, names: tuple[str, ...]) -> Callable[..., Any]:
    """Return the Autograd kernel: it refuses tensors with gradients, and dispatches all other calls below autograd."""
    after, guard, redispatch = torch._C._after_autograd_keyset, torch._C._AutoDispatchBelowAutograd, call.redispatch

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_grad(call, (*names[: len(args)], *kwargs), (*args, *kwargs.values()))
        with guard():
            return redispatch(keyset & after, *args, **kwargs)

    return run


def _without_autocast(call: Any, key: str) -> Callable[..., Any]:
    """Return the Autocast kernel: the same call without autocast."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return call(*args, **kwargs)

    return run


def _resolving_bits(call: Any, names: tuple[str, ...], mutates: tuple[str, ...]) -> Callable[..., Any]:
    """Return the kernel for lazily negated or conjugated tensors, for an operator that writes."""

    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False), **kwargs)
        resolved = {name: _resolved(value) for name, value in given.items()}
        result = call(**resolved)
        for name in mutates:
            for tensor, copy in zip(_tensors([given[name]]), _tensors([resolved[name]]), strict=True):
                if copy is not tensor:
                    tensor.copy_(copy)
        return result

    return run


def _resolved(value: Any) -> Any:
    """Return a tensor or a list of them without lazy bits, and anything else as it is."""
    if isinstance(value, (list, tuple)):
        return [_resolved(item) for item in value]
    return value.resolve_conj().resolve_neg() if isinstance(value, torch.Tensor) else value


def _kernel(
    find: Callable[[Any], Callable[[Any], R]],
    bind: Callable[..., Any],
    places: list[int] | None,
    on_device: bool,
    check: Callable[[Any], object] = lambda args: None,
) -> Callable[..., R]:
    """Return an operator's kernel: it finds the function that runs a call, and calls it with one named tuple.

    The device of the first CUDA tensor becomes the current device. That tensor may be an index, since the cache, an
    earlier argument, may be in pinned host memory.

    A write first copies inputs that may share memory with a written tensor. A compiler knows only the operator's
    schema, so it may remove the caller's own copy. A write ends by raising the versions of written tensors, so that
    autograd notices a write to a tensor that it has saved.

    Args:
        find: Takes the named tuple and returns the function that runs the call.
        bind: Makes the named tuple, with the trailing defaults that the dispatcher leaves out.
        places: The places of the parameters that the operator writes, beside those passed by name. None: it writes
            nothing.
        on_device: Whether the kernel is for device tensors.
        check: Checks a call that writes to one address twice. A launch that was found by metadata alone has not.
    """

    def run(*values: Any, **named: Any) -> R:
        written: list[Any] = [*named.values()]
        stores: set[int] = set()
        if places is not None:
            read: list[Any] = []
            for i, value in enumerate(values):
                (written if i in places else read).append(value)
            written = _tensors(written)
            for tensor in written:
                stores.add(tensor.untyped_storage().data_ptr())
            for tensor in _tensors(read):
                if tensor.untyped_storage().data_ptr() in stores:
                    values = tuple([v if i in places else _apart(v, written) for i, v in enumerate(values)])
                    break
        args = bind(*values, **named)
        if 0 < len(stores) < len(written) and len({tensor.data_ptr() for tensor in written}) < len(written):
            check(args)
        first = values[0] if on_device and values else None
        if on_device and not (isinstance(first, torch.Tensor) and first.is_cuda):
            first = next((tensor for tensor in _tensors((*values, *named.values())) if tensor.is_cuda), None)
        if first is None or first.device.index == torch.cuda.current_device():
            launch = find(args)
            result = launch(args)
        else:
            with torch.cuda.device(first.device):
                launch = find(args)
                result = launch(args)
        if places is not None:
            # As for torch's own operators: tensors made in inference mode have no version.
            torch.autograd.graph.increment_version([tensor for tensor in written if not tensor.is_inference()])
        return result

    return run


def _apart(value: Any, written: Sequence[torch.Tensor]) -> Any:
    """Return an argument in which copies replace the tensors that may share memory with a written tensor."""
    if isinstance(value, (list, tuple)):
        return [_apart(tensor, written) for tensor in value]
    if not isinstance(value, torch.Tensor):
        return value
    begin, end = _reach(value)
    spans = [_reach(other) for other in written]
    return value.clone() if any(begin < last and first < end for first, last in spans) else value


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses where a tensor's elements begin and end; equal for an empty tensor."""
    begin, size = tensor.data_ptr(), tensor.element_size()
    steps = [(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return begin, begin + (sum(steps) + 1) * size if tensor.numel() else begin


def _refusing_meta(fake: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """Return `fake`, preceded by a check that refuses a call with some tensors on meta and others on a device.

    Without the check, torch would run the fake for such a call.
    """

    @functools.wraps(fake)
    def run(*args: Any, **kwargs: Any) -> Any:
        named = [*zip(names, args, strict=False), *kwargs.items()]
        given = [(name, tensor) for name, value in named for tensor in _tensors([value])]
        if len({tensor.is_meta for _, tensor in given}) > 1:
            first = given[0][1]
            for name, tensor in given:
                is_host_index = tensor.is_cpu and tensor.dtype in INDEX_DTYPES and name not in _ROWS
                if tensor.is_meta is not first.is_meta and not is_host_index:
                    raise bad_argument(name, f"device {tensor.device}", f"device {first.device} of {given[0][0]}")
        return fake(*args, **kwargs)

    return run


def _tensors(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among arguments and in lists of them."""
    found: list[torch.Tensor] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            found += argument
    return found


def _public(function: Callable[P, R], call: Callable[P, R], signature: _Signature) -> Callable[P, R]:
    """Return the public function: it calls the operator and states in a line what is wrong with an argument's type."""
    bools = [(place, name) for place, (name, hint) in enumerate(signature.types.items()) if hint is bool]

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        for place, name in bools:  # the dispatcher takes None for False
            if (args[place] if place < len(args) else kwargs.get(name, False)) is None:
                raise bad_argument(name, None, "a bool", TypeError) from None
        try:
            return call(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            # The dispatcher's own refusal is a page long and holds the schema.
            refusal = signature.refusal(args, kwargs) if f"{NAMESPACE}::{signature.name}" in str(error) else None
            if refusal is None:
                raise
            raise refusal from None

    run.__annotations__ = function.__annotations__  # which `functools.wraps` loses from Python 3.14 on
    return run


def _choosing_out(call: Callable[P, R], call_out: Callable[..., None], num_arguments: int) -> Callable[P, R]:
    """Return a function that calls `call`, or `call_out` if its argument `out` is given, and returns the result."""

    def run(*args: Any, **kwargs: Any) -> Any:
        out = args[num_arguments] if len(args) > num_arguments else kwargs.pop("out", None)
        if out is None:
            return call(*args[:num_arguments], **kwargs)
        call_out(*args[:num_arguments], out=out, **kwargs)
        return out

    return typing.cast(Callable[P, R], run)
