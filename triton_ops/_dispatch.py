"""Launch cache: reuses what was built for a call signature and skips the dispatcher when nothing observes the call.

What metadata decide (kernels, grids, constants) is checked and chosen at the first call of a kind, which leaves a
launch that does the rest. The layers of a step are calls of a kind, and a decode is bound by what the host does for
each: a call found again does without the dispatcher, which takes 4 us for 17 arguments (torch 2.13, on a CPU).
"""

from __future__ import annotations

import inspect
import typing
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Generic, TypeVar

import torch

from ._checks import reads_values
from ._triton import KERNELS_ON_CPU

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # not a promise of torch's: it saves time, nothing else
    TensorGuards = None  # type: ignore[misc, assignment]

R = TypeVar("R")
T = TypeVar("T")
Values = tuple[Any, ...]
Tensors = Sequence[torch.Tensor]

# Calls remembered by an operator: some steps' worth of lengths, each with a kind of layer or two.
MAX_REMEMBERED = 1024
# Calls that one is compared with: kinds of layers of one model.
_MAX_COMPARED = 4

_modes: Callable[[], int] | None = getattr(torch._C, "_len_torch_dispatch_stack", None)
_functions: Callable[[], int] | None = getattr(torch._C, "_len_torch_function_stack", None)
_functorch: Callable[[], object] | None = getattr(torch._C._functorch, "peek_interpreter_stack", None)
_is_profiling: Callable[[], bool] | None = getattr(torch.autograd, "_profiler_enabled", None)
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
# Where torch does not tell who else looks on, every call goes through the dispatcher.
_CAN_TELL = None not in (_modes, _functions, _functorch, _is_profiling)
_is_traced = torch.compiler.is_dynamo_compiling


def needs_dispatcher() -> bool:
    """Whether a tracer, mode, transform or profiler has to see a call, which then goes through the dispatcher.

    A tracer of Python code comes first, since it traces this too; others, of exports and fake tensors, are modes.
    Tensors that the dispatcher would treat in another way (subclasses, gradients) are told by who looks at them.
    """
    if _is_traced() or not _CAN_TELL:
        return True
    return bool(_modes() or _functions() or _is_profiling()) or _functorch() is not None  # type: ignore[misc]


def may_cache_tensors(on_gpu: bool) -> bool:
    """Whether tensors that a call makes may serve later ones: not where it is watched, nor of a graph's own memory."""
    return not (needs_dispatcher() or (on_gpu and torch.cuda.is_current_stream_capturing()))


def aligned(*tensors: torch.Tensor | None) -> bool:
    """Whether all begin at a multiple of 16 bytes, which triton compiles kernels for."""
    bits = 0
    for tensor in tensors:
        if tensor is not None:
            bits |= tensor.data_ptr()
    return not bits & 15


def _guard(tensors: Tensors) -> Any:
    """Whose `check` tells in C++ whether tensors are like these in all but addresses; None where torch has none."""
    # It takes no tensor twice, and one that requires grad, met while grad mode is off, it takes for one met while on.
    if TensorGuards is None or not tensors or len({id(tensor) for tensor in tensors}) != len(tensors):
        return None
    if any(tensor.requires_grad for tensor in tensors):
        return None
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    lengths: Any = {"dynamic_dims_sizes": sizes, "dynamic_dims_strides": strides}
    return TensorGuards(*tensors, **lengths)


def _remember(memory: dict[object, T], key: object, value: T) -> T:
    """Keeps a value, in place of all others once they are too many."""
    if len(memory) >= MAX_REMEMBERED:
        memory.clear()
    memory[key] = value
    return value


_all: weakref.WeakSet[LaunchCache[Any]] = weakref.WeakSet()


def forget_choices() -> None:
    """Makes the next call of every operator choose anew: for whoever changes what choices rest on."""
    for cache in [*_all]:
        cache.clear()


class LaunchCache(Generic[T]):
    """What was built for calls, by their options and by metadata and `of_addresses` of their tensors.

    A call like one of the last is told by a comparison in C++ of all that torch goes by: classes, metadata, modes,
    transforms and gradients. Options are all that matters besides: which optional tensors are given, for one. What
    compares equal is the same option: callers whose 1 and True differ put types among them.
    """

    def __init__(self, of_addresses: Callable[..., object] = aligned) -> None:
        self._of_addresses = of_addresses
        self._last: dict[object, list[tuple[Any, object, T]]] = {}
        self._known: dict[object, T] = {}
        _all.add(self)

    def lookup(self, options: object, tensors: Tensors) -> T | None:
        """What was built for a call like one of the last; None if nothing was."""
        for guard, addresses, built in self._last.get(options, ()):
            if guard.check(*tensors) and self._of_addresses(*tensors) == addresses:
                return built
        return None

    def insert(self, options: object, tensors: Tensors, built: T) -> None:
        """Lets `lookup` know such calls."""
        if (guard := _guard(tensors)) is not None:
            entry = (guard, self._of_addresses(*tensors), built)
            _remember(self._last, options, [entry, *self._last.get(options, ())[: _MAX_COMPARED - 1]])

    def get_or(self, options: object, tensors: Tensors, build: Callable[[], T]) -> T:
        """What was built for such a call, as far as metadata tell; else what `build` makes, remembered."""
        if not tensors:
            found = self._known.get(options)
            return _remember(self._known, options, build()) if found is None else found
        built = self.lookup(options, tensors)
        if built is None:
            metadata = [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]
            key = (options, self._of_addresses(*tensors), *metadata)
            built = self._known.get(key)
            if built is None:
                built = _remember(self._known, key, build())
            self.insert(options, tensors, built)
        return built

    def clear(self) -> None:
        """Forgets all."""
        self._last.clear()
        self._known.clear()


class _Passing:
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
        self._tensors: dict[object, Callable[[Values], Values]] = {}

    def values(self, passed: Values) -> Values:
        """All arguments in the signature's order."""
        values = passed + self._defaults
        return values if self._order is None else self._order(values)

    def split(self, passed: Values) -> tuple[Values, Values]:
        """Options of calls with such types, and tensors; 5.0 and True equal 5 and 1 and are no window."""
        types = tuple(map(type, self._typed(passed)))
        tensors_of = self._tensors.get(types)
        if tensors_of is None:
            given = [i for i in self._optional if passed[i] is not None]
            tensors_of = _remember(self._tensors, types, _picker([*self._required, *given]))
        # There is one for these types and this way of passing them.
        return (tensors_of, *self._options(passed)), tensors_of(passed)


def runs_kernels(tensors: Tensors) -> bool:
    """Whether kernels run on these, which are tensors of torch's own class."""
    first = tensors[0]  # on the meta device nothing runs
    return (first.is_cuda or (KERNELS_ON_CPU and first.is_cpu)) and all(type(t) is torch.Tensor for t in tensors)


class CachedOp(Generic[R]):
    """An operator on device tensors whose launch is built once for all calls of a kind.

    `build` takes the operator's arguments, all by position, checks their metadata and returns what runs on these and
    all that differ from them in addresses and values only; it keeps none of them. `check` takes the same and looks at
    values, every time that they may be read. `signature_of` has the operator's parameters: `operator` signs what it is
    given without one.
    """

    def __init__(
        self,
        build: Callable[..., Callable[..., R]],
        check: Callable[..., object] | None = None,
        signature_of: Callable[..., object] | None = None,
    ) -> None:
        self._build, self._check = build, check
        self._hints: dict[str, object] = {}
        self._defaults: dict[str, object] = {}
        if signature_of is not None:
            self.sign(signature_of)
        self._ways: dict[object, _Passing] = {}
        self._built: LaunchCache[Callable[..., R]] = LaunchCache()
        # What torch goes by is not the same within the dispatcher. Without it, the device must be the current one.
        self._inside: LaunchCache[Callable[..., R]] = LaunchCache()
        self._outside: LaunchCache[tuple[int | None, Callable[..., R]]] = LaunchCache()

    def sign(self, function: Callable[..., object]) -> None:
        """Takes the parameters of a function, unless there are some."""
        if not self._hints:
            parameters, hints = inspect.signature(function).parameters, typing.get_type_hints(function)
            self._hints = {name: hints[name] for name in parameters}
            self._defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Runs the operator on arguments that the dispatcher has looked at."""
        way = self._passing(args, kwargs)
        assert way is not None
        passed = (*args, *kwargs.values())
        options, tensors = way.split(passed)
        values = way.values(passed)
        launch = self._inside.lookup(options, tensors)
        if launch is None:
            launch = self.launch_for(values)
            self._inside.insert(options, tensors, launch)
        if self._check is not None and reads_values(tensors[0]):
            self._check(*values)
        return launch(*values)

    def lookup(self, args: Values, kwargs: Mapping[str, Any]) -> tuple[Callable[..., R], Values] | None:
        """What runs an unwatched call like one of the last on the current device, and its arguments; else None."""
        way = self._ways.get((len(args), *kwargs) if kwargs else len(args))
        if way is None:
            return None
        passed = (*args, *kwargs.values()) if kwargs else args
        try:
            options, tensors = way.split(passed)
            found = self._outside.lookup(options, tensors)
        except TypeError:  # not what the operator takes; the dispatcher says so
            return None
        if found is None:
            return None
        device, launch = found
        if device is not None and device != current_device():
            return None
        values = way.values(passed)
        if self._check is not None and reads_values(tensors[0]):
            self._check(*values)
        return launch, values

    def insert(self, args: Values, kwargs: Mapping[str, Any]) -> None:
        """Lets `lookup` know an unwatched call that went well through the dispatcher."""
        way = self._passing(args, kwargs)
        if way is None:
            return
        passed = (*args, *kwargs.values())
        options, tensors = way.split(passed)
        if runs_kernels(tensors):
            self._outside.insert(options, tensors, (tensors[0].device.index, self.launch_for(way.values(passed))))

    def _passing(self, args: Values, kwargs: Mapping[str, Any]) -> _Passing | None:
        """How arguments are passed; None where they do not fit the signature."""
        key = (len(args), *kwargs) if kwargs else len(args)
        way = self._ways.get(key)
        if way is None:
            passed = [*list(self._hints)[: len(args)], *kwargs]
            left = self._hints.keys() - {*passed}
            if len(args) + len(kwargs) + len(left) != len(self._hints) or not left <= self._defaults.keys():
                return None
            way = _remember(self._ways, key, _Passing(passed, self._hints, self._defaults))
        return way

    def launch_for(self, values: Values) -> Callable[..., R]:
        """What runs a call, built by its metadata; however arguments are passed it is one."""
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        # Metadata do not tell of gradients, which `build` may refuse.
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return self._build(*values)
        options = tuple([torch.Tensor if isinstance(value, torch.Tensor) else value for value in values])
        return self._built.get_or(options, tensors, lambda: self._build(*values))


def _picker(places: Sequence[int]) -> Callable[[Values], Values]:
    """`itemgetter` that gives a tuple however many places there are; neighbours, the fastest, are cut out."""
    begin = places[0] if places else 0
    if [*places] == [*range(begin, begin + len(places))]:
        return itemgetter(slice(begin, begin + len(places)))
    return itemgetter(*places)
