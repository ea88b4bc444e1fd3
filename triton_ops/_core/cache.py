"""Launches that are built once for all calls of a kind, and a check whether a compiler or a mode watches a call.

The first call of a kind checks metadata (shapes, strides, dtypes, options) and chooses kernels, grids and constants.
The result is a launch, which later calls use. All layers of a step make calls of one kind, and the time of a decode
depends on the host's work for each call.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Generic, TypeVar

import torch

from .checks import reads_values
from .runtime import KERNELS_ON_CPU

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # private in torch, and only saves time
    TensorGuards = None  # type: ignore[misc, assignment]

R = TypeVar("R")
T = TypeVar("T")
Values = tuple[Any, ...]
Tensors = Sequence[torch.Tensor]

# The number of kinds of calls that an operator remembers. Steps of different lengths are different kinds.
MAX_REMEMBERED = 1024
# The number of recent calls that a call is compared with, about a model's number of kinds of layers.
_MAX_COMPARED = 4

_modes: Callable[[], int] | None = getattr(torch._C, "_len_torch_dispatch_stack", None)
_functions: Callable[[], int] | None = getattr(torch._C, "_len_torch_function_stack", None)
_functorch: Callable[[], object] | None = getattr(torch._C._functorch, "peek_interpreter_stack", None)
_is_profiling: Callable[[], bool] | None = getattr(torch.autograd, "_profiler_enabled", None)
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
# Without these private functions of torch every call counts as watched.
_CAN_TELL = None not in (_modes, _functions, _functorch, _is_profiling)
_is_traced = torch.compiler.is_dynamo_compiling


def needs_dispatcher() -> bool:
    """Return whether a tracer, mode, transform or profiler must see the operators called here.

    The caller then uses PyTorch's operators, and neither keeps tensors nor launches kernels. Dynamo traces this
    function too, so the check for Dynamo comes first. Export and fake tensors are modes.
    """
    if _is_traced() or not _CAN_TELL:
        return True
    return bool(_modes() or _functions() or _is_profiling()) or _functorch() is not None  # type: ignore[misc]


def checks_values(tensor: torch.Tensor) -> bool:
    """Return whether a call may check values of such tensors. Compilers, modes and transforms may pass some without."""
    if _is_traced() or not _CAN_TELL or not reads_values(tensor):
        return False
    return not _modes() and _functorch() is None  # type: ignore[misc]


def may_cache_tensors(on_gpu: bool) -> bool:
    """Return whether a call may keep tensors for later calls. A watched or captured call may not."""
    return not (needs_dispatcher() or (on_gpu and torch.cuda.is_current_stream_capturing()))


def alignments(*tensors: torch.Tensor) -> object:
    """Return True if all tensors begin at a multiple of 16 bytes, else a tuple of the distances from such a multiple.

    Triton compiles kernels for the alignment of 16 bytes, and rows are moved in units of the alignment that they have.
    """
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return not bits & 15 or tuple([tensor.data_ptr() & 15 for tensor in tensors])


def aligned(*arguments: object) -> bool:
    """Return whether all tensors among the arguments begin at a multiple of 16 bytes."""
    return alignments(*[value for value in arguments if isinstance(value, torch.Tensor)]) is True


def _guard(tensors: Tensors) -> Any:
    """Return an object whose `check` compares tensors with these in C++, in all but addresses; None if impossible."""
    # TensorGuards rejects duplicate tensors and ignores grad mode for tensors that require grad.
    if TensorGuards is None or not tensors or len({id(tensor) for tensor in tensors}) != len(tensors):
        return None
    if any(tensor.requires_grad for tensor in tensors):
        return None
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    lengths: Any = {"dynamic_dims_sizes": sizes, "dynamic_dims_strides": strides}
    return TensorGuards(*tensors, **lengths)


def _remember(memory: dict[object, T], key: object, value: T) -> T:
    """Store a value. If there are too many, forget all others first."""
    if len(memory) >= MAX_REMEMBERED:
        memory.clear()
    memory[key] = value
    return value


_all: weakref.WeakSet[LaunchCache[Any]] = weakref.WeakSet()
_clear_cached: list[Callable[[], None]] = []


def forget_choices() -> None:
    """Drop all cached launches, so that new tile sizes or options take effect. The next calls build launches again."""
    for clear in (*[cache.clear for cache in _all], *_clear_cached):
        clear()


def cached(build: Callable[..., T]) -> Callable[..., T]:
    """Decorate a function that builds a launch, or a tensor, from hashable arguments: build each only once."""
    found = functools.lru_cache(MAX_REMEMBERED)(build)
    _clear_cached.append(found.cache_clear)
    return found


class LaunchCache(Generic[T]):
    """A cache of launches, which are built once for all calls of a kind.

    The key of an entry is a call's options, and the metadata and alignments of its tensors.

    Recent calls are matched by TensorGuards, in C++. They compare all that torch's dispatcher looks at: classes,
    metadata, modes, transforms and gradients. Options are everything else that the launch depends on, such as which
    optional tensors are given. Options match if they compare equal, so 1 matches True. If a caller must tell these
    apart, its options must include types.
    """

    def __init__(self) -> None:
        self._last: dict[object, list[tuple[Any, object, T]]] = {}
        self._known: dict[object, T] = {}
        _all.add(self)

    def get_or(self, options: object, tensors: Tensors, build: Callable[[], T]) -> T:
        """Return the object for calls with these options and metadata. The first such call builds it."""
        for guard, addresses, found in self._last.get(options, ()):
            if guard.check(*tensors) and alignments(*tensors) == addresses:
                return found
        addresses = alignments(*tensors)
        key = (options, addresses, *[(t.shape, t.stride(), t.dtype, t.device) for t in tensors])
        built = self._known.get(key)
        if built is None:
            built = _remember(self._known, key, build())
        if (guard := _guard(tensors)) is not None:
            recent = self._last.get(options, ())[: _MAX_COMPARED - 1]
            _remember(self._last, options, [(guard, addresses, built), *recent])
        return built

    def clear(self) -> None:
        """Forget everything."""
        self._last.clear()
        self._known.clear()


def runs_kernels(tensors: Tensors) -> bool:
    """Return whether kernels run on the device of these tensors, and all are of torch's own class."""
    first = tensors[0]  # on the meta device nothing runs
    return (first.is_cuda or (KERNELS_ON_CPU and first.is_cpu)) and all(type(t) is torch.Tensor for t in tensors)


def launch_finder(
    build: Callable[[Any], Callable[[Any], R]], check_values: Callable[[Any], object] | None = None
) -> Callable[[Any], Callable[[Any], R]]:
    """Return a function that finds the launch for a call's arguments, and the first time builds it.

    All calls with equal options and metadata have one launch.

    Args:
        build: Takes a call's arguments, a named tuple, and returns the launch. The launch takes the arguments of any
            call that differs only in addresses and values. It keeps none of the arguments of the first call.
        check_values: Takes the arguments and checks values, in every call whose values may be read.
    """
    pickers: dict[object, tuple[Callable[[Values], Values], Callable[[Values], Values]]] = {}
    launches: LaunchCache[Callable[[Any], R]] = LaunchCache()

    def find(args: Any) -> Callable[[Any], R]:
        types = tuple(map(type, args))
        found = pickers.get(types)
        if found is None:
            found = _remember(pickers, types, _pickers(types))
        options_of, tensors_of = found
        tensors = tensors_of(args)
        options = (tensors_of, *options_of(args))  # `tensors_of` identifies the types
        launch = launches.get_or(options, tensors, lambda: build(args))
        if check_values is not None and reads_values(tensors[0]):
            check_values(args)
        return launch

    return find


def _pickers(types: tuple[type, ...]) -> tuple[Callable[[Values], Values], Callable[[Values], Values]]:
    """Return a function that picks the options, and one that picks the tensors, of arguments with these types."""
    given = [i for i, found in enumerate(types) if found is not type(None)]
    tensors = [i for i in given if issubclass(types[i], torch.Tensor)]
    return _picker([i for i in given if i not in tensors]), _picker(tensors)


def _picker(places: Sequence[int]) -> Callable[[Values], Values]:
    """Return an `itemgetter` that gives a tuple for any number of places. Adjacent places become a slice, for speed."""
    begin = places[0] if places else 0
    if [*places] == [*range(begin, begin + len(places))]:
        return itemgetter(slice(begin, begin + len(places)))
    return itemgetter(*places)
