"""Calls of an operator that repeat an earlier one in all but addresses and values, told by one comparison in C++.

What metadata decide is decided and checked at the first call of a kind, which leaves a function that does the rest. The
layers of a step are calls of a kind, and a decode is bound by what the host does for each: a call found again does
without the dispatcher, which takes 4 us for 17 arguments (torch 2.13, on a CPU).
"""

from __future__ import annotations

import inspect
import typing
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Generic, TypeVar

import torch

from ._debug import reads_values
from ._launcher import aligned, metadata, remember, tensor_guards
from ._triton import KERNELS_ON_CPU

R = TypeVar("R")
Values = tuple[Any, ...]

# Calls that one is compared with: kinds of layers of one model.
_MAX_COMPARED = 4

_modes: Callable[[], int] | None = getattr(torch._C, "_len_torch_dispatch_stack", None)
_functions: Callable[[], int] | None = getattr(torch._C, "_len_torch_function_stack", None)
_functorch: Callable[[], object] | None = getattr(torch._C._functorch, "peek_interpreter_stack", None)
_is_profiling: Callable[[], bool] | None = getattr(torch.autograd, "_profiler_enabled", None)
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
# Where torch does not tell who else looks on, every call goes through the dispatcher.
_CAN_SKIP = None not in (_modes, _functions, _functorch, _is_profiling)

_all: weakref.WeakSet[Repeated[Any]] = weakref.WeakSet()


def forget_repeated() -> None:
    """Makes the next call of every operator decide anew: for whoever changes what the decisions rest on."""
    for repeated in _all:
        repeated.clear()


@dataclass(frozen=True, slots=True)
class _Kind(Generic[R]):
    """What a kind of call left: the device of its tensors, and what runs it, by whether all are aligned."""

    device: int | None
    runs: dict[bool, Callable[..., R]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Alike(Generic[R]):
    """Calls whose arguments have the same types.

    Attributes:
        tensors: Takes them out of the arguments.
        last: The last of them, by what was passed besides tensors: a guard on the tensors, and the kind.
    """

    tensors: Callable[[Values], Values]
    last: dict[object, list[tuple[Any, _Kind[R]]]] = field(default_factory=dict)


class _Style(Generic[R]):
    """One way of passing an operator's arguments, so many by position and these by name."""

    def __init__(self, passed: Sequence[str], hints: Mapping[str, object], defaults: Mapping[str, object]) -> None:
        names = [*passed, *(name for name in hints if name not in passed)]
        self._defaults = tuple(defaults[name] for name in names[len(passed) :])
        self._order = None if names == [*hints] else _picker([names.index(name) for name in hints])
        self._required = [i for i, name in enumerate(passed) if hints[name] is torch.Tensor]
        self._optional = [i for i, name in enumerate(passed) if hints[name] == torch.Tensor | None]
        tensors = {*self._required, *self._optional}
        self._options = _picker([i for i in range(len(passed)) if i not in tensors])
        # A guard on tensors tells their types too.
        self._typed = _picker([i for i in range(len(passed)) if i not in self._required])
        self._alike: dict[object, _Alike[R]] = {}

    def values(self, passed: Values) -> Values:
        """All arguments in the signature's order."""
        values = passed + self._defaults
        return values if self._order is None else self._order(values)

    def parts(self, passed: Values) -> tuple[_Alike[R], object, tuple[torch.Tensor, ...]]:
        """What is known of calls with arguments of these types; what is passed besides tensors, and the tensors.

        5.0 and True equal 5 and 1 and are no window.
        """
        types = tuple(map(type, self._typed(passed)))
        alike = self._alike.get(types)
        if alike is None:
            there = [i for i in self._optional if passed[i] is not None]
            alike = remember(self._alike, types, _Alike(_picker([*self._required, *there])))
        return alike, self._options(passed), alike.tensors(passed)

    @staticmethod
    def find(alike: _Alike[R], options: object, tensors: tuple[torch.Tensor, ...]) -> _Kind[R] | None:
        """The kind of a call like one of the last in all that torch goes by: modes, transforms, gradients too."""
        for guard, kind in alike.last.get(options, ()):
            if guard.check(*tensors):
                return kind
        return None

    @staticmethod
    def expect(alike: _Alike[R], options: object, tensors: tuple[torch.Tensor, ...], kind: _Kind[R]) -> None:
        """Lets `find` know such calls."""
        if (guard := tensor_guards(tensors)) is not None:
            remember(alike.last, options, [(guard, kind), *alike.last.get(options, ())[: _MAX_COMPARED - 1]])


class Repeated(Generic[R]):
    """An operator on device tensors whose decisions are kept.

    Args:
        prepare: Takes the operator's arguments, all by position; checks their metadata and returns what runs on these
            and on all that differ from them in addresses and values only. It keeps none of them.
        check: Takes the same and looks at values; called every time, where values may be read.
        like: A function with the operator's parameters; None: `prepare`.
    """

    def __init__(
        self,
        prepare: Callable[..., Callable[..., R]],
        check: Callable[..., object] | None = None,
        like: Callable[..., object] | None = None,
    ) -> None:
        self._prepare, self._check = prepare, check
        parameters = inspect.signature(like or prepare).parameters
        hints = typing.get_type_hints(like or prepare)
        self._hints = {name: hints[name] for name in parameters}
        self._defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
        # What torch goes by is not the same inside of the dispatcher.
        self._inside: dict[object, _Style[R]] = {}
        self._outside: dict[object, _Style[R]] = {}
        self._kinds: dict[object, _Kind[R]] = {}
        _all.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Runs the operator on arguments that the dispatcher has looked at."""
        style = self._style(self._inside, args, kwargs)
        assert style is not None
        passed = (*args, *kwargs.values())
        alike, options, tensors = style.parts(passed)
        values, is_aligned = style.values(passed), aligned(*tensors)
        kind = style.find(alike, options, tensors)
        run = None if kind is None else kind.runs.get(is_aligned)
        if run is None:
            # Metadata do not tell of gradients, which `prepare` may refuse.
            kind = self._known(values)
            run = kind.runs.get(is_aligned)
            if run is None or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
                run = kind.runs[is_aligned] = self._prepare(*values)
            style.expect(alike, options, tensors, kind)
        if self._check is not None and reads_values(tensors[0]):
            self._check(*values)
        return run(*values)

    def find(self, args: Values, kwargs: Mapping[str, Any]) -> tuple[Callable[..., R], Values] | None:
        """What runs a call like one of the last without the dispatcher, and its arguments by position; None if unknown.

        Not under a profiler or a mode that looks on, nor where another device is current.
        """
        if not _CAN_SKIP or _functions() or _is_profiling():  # type: ignore[misc]
            return None
        style = self._outside.get((len(args), *kwargs) if kwargs else len(args))
        if style is None:
            return None
        passed = (*args, *kwargs.values()) if kwargs else args
        try:
            alike, options, tensors = style.parts(passed)
            kind = style.find(alike, options, tensors)
        except TypeError:  # not what the operator takes; the dispatcher says so
            return None
        if kind is None or (kind.device is not None and kind.device != _current_device()):
            return None
        run = kind.runs.get(aligned(*tensors))
        if run is None:
            return None
        values = style.values(passed)
        if self._check is not None and reads_values(tensors[0]):
            self._check(*values)
        return run, values

    def expect(self, args: Values, kwargs: Mapping[str, Any]) -> None:
        """Lets `find` know a call that went well through the dispatcher."""
        if not _CAN_SKIP or _functions() or _is_profiling() or _modes() or _functorch() is not None:  # type: ignore[misc]
            return
        style = self._style(self._outside, args, kwargs)
        if style is None:
            return
        passed = (*args, *kwargs.values())
        alike, options, tensors = style.parts(passed)
        if (tensors[0].is_cpu and not KERNELS_ON_CPU) or any(type(t) is not torch.Tensor for t in tensors):
            return
        style.expect(alike, options, tensors, self._known(style.values(passed)))

    def clear(self) -> None:
        """Forgets all calls."""
        self._inside.clear()
        self._outside.clear()
        self._kinds.clear()

    def _style(self, styles: dict[object, _Style[R]], args: Values, kwargs: Mapping[str, Any]) -> _Style[R] | None:
        """How arguments are passed; None where they do not fit the signature."""
        key = (len(args), *kwargs) if kwargs else len(args)
        style = styles.get(key)
        if style is None:
            passed = [*list(self._hints)[: len(args)], *kwargs]
            left = self._hints.keys() - {*passed}
            if len(args) + len(kwargs) + len(left) != len(self._hints) or not left <= self._defaults.keys():
                return None
            style = remember(styles, key, _Style(passed, self._hints, self._defaults))
        return style

    def _known(self, values: Values) -> _Kind[R]:
        """The kind of a call by its metadata."""
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        options = tuple(value if not isinstance(value, torch.Tensor) else torch.Tensor for value in values)
        key = (options, *metadata(*tensors))
        kind = self._kinds.get(key)
        return remember(self._kinds, key, _Kind(tensors[0].device.index)) if kind is None else kind


def _picker(places: Sequence[int]) -> Callable[[Values], Values]:
    """`itemgetter` that gives a tuple however many places there are; neighbours, the fastest, are cut out."""
    begin = places[0] if places else 0
    if [*places] == [*range(begin, begin + len(places))]:
        return itemgetter(slice(begin, begin + len(places)))
    return itemgetter(*places)
