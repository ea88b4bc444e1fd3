"""A memory checker for kernels in Triton's interpreter, which finds accesses outside of tensors and races.

Each argument of a kernel gets a made-up address, terabytes from the others. So an access that leaves its tensor is
found, however far away it is. Each load, store and atomic is checked lane by lane against the tensor's elements,
without the gaps of a strided view, and then executed at the real address. Masked lanes are not checked. Programs of a
launch have no order: no program may read or write what another one writes, and no two lanes of a store may write to the
same place.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from triton.language import core, semantic
from triton.runtime import interpreter

_SHIFT = 44
_MASKABLE = 1 << 26
_MANY = -1

Addresses = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.int64]


class AccessError(Exception):
    """A kernel made an invalid access; the message names the kernel, program, tensor and offset."""


class _Shadow:
    """By byte, the last programs (number plus one, or _MANY) whose writes and reads began at it."""

    def __init__(self, num_bytes: int) -> None:
        self.writer, self.reader = (np.zeros(num_bytes, np.int32) for _ in range(2))


class _Argument:
    """A tensor argument of a launch, with its made-up address, its real address, and a map of its elements' bytes."""

    def __init__(self, tensor: torch.Tensor, number: int) -> None:
        real = tensor.data_ptr()
        self.fake = (number << _SHIFT) + (1 << (_SHIFT - 1)) + real % 4096
        self.shift = np.array((real - self.fake) % 2**64, np.uint64)
        self.storage, self.tensor = tensor.untyped_storage(), tensor
        self.in_storage = real - self.storage.data_ptr()
        self.itemsize = tensor.itemsize
        reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        self.num_bytes = reach * self.itemsize if tensor.numel() else 0
        self.elements: npt.NDArray[np.bool_] | None = None
        if tensor.numel() and tensor.numel() != reach <= _MASKABLE:
            self.elements = np.zeros(reach, np.bool_)
            np.lib.stride_tricks.as_strided(self.elements, tensor.shape, tensor.stride())[...] = True

    def __str__(self) -> str:
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return f"{dtype} {list(self.tensor.shape)} with strides {list(self.tensor.stride())}"

    def outside(self, offsets: Offsets, width: int) -> npt.NDArray[np.bool_] | None:
        """Return which byte offsets are outside, or None if none is."""
        if offsets.min() < 0 or offsets.max() + width > self.num_bytes:
            return (offsets < 0) | (offsets + width > self.num_bytes)
        if self.elements is not None:
            last = (offsets + (width - 1)) // self.itemsize
            within = self.elements[offsets // self.itemsize] & self.elements[last]
            return None if within.all() else ~within
        return None


class _Launch:
    """A launch of a kernel, with its arguments, the current program, and a record of accesses."""

    def __init__(self, kernel: str) -> None:
        self.kernel, self.program, self.grid_index = kernel, 0, (0, 0, 0)
        self.arguments: list[_Argument] = []
        self.shadows: dict[int, _Shadow] = {}

    def add(self, tensor: torch.Tensor) -> int:
        argument = _Argument(tensor, len(self.arguments) + 1)
        self.arguments.append(argument)
        return argument.fake

    def fault(self, what: str, argument: _Argument | None, offsets: Offsets) -> AccessError:
        place = f"at bytes {sorted(set(offsets.tolist()))[:4]} of {argument}" if argument else "outside of every tensor"
        return AccessError(f"{self.kernel}, program {self.grid_index}: {what} {place}")

    def real(self, pointers: Addresses, mask: npt.NDArray[np.bool_], width: int, kind: str) -> Addresses:
        """Return the real addresses of pointers, of which `mask` are used; raise AccessError if one is invalid."""
        used = pointers[np.broadcast_to(mask, pointers.shape)]
        if not used.size:
            return pointers
        number = int(used[0]) >> _SHIFT
        if not 1 <= number <= len(self.arguments):
            raise self.fault(kind, None, used.astype(np.int64))
        argument = self.arguments[number - 1]
        offsets = (used - np.uint64(argument.fake)).view(np.int64)
        outside = argument.outside(offsets, width)
        if outside is not None:
            raise self.fault(kind, argument, offsets[outside])
        self._order(argument, offsets, kind)
        return pointers + argument.shift

    def _order(self, argument: _Argument, offsets: Offsets, kind: str) -> None:
        key = argument.storage.data_ptr()
        shadow = self.shadows.get(key)
        if shadow is None:
            shadow = self.shadows[key] = _Shadow(argument.storage.nbytes())
        at, me = offsets + argument.in_storage, self.program + 1
        written = shadow.writer[at]
        if kind == "load":
            other = (written != 0) & (written != me)
            if other.any():
                raise self.fault("load of what another program writes", argument, offsets[other])
            read = shadow.reader[at]
            shadow.reader[at] = np.where((read == 0) | (read == me), me, _MANY)
            return
        if kind == "store":
            read = shadow.reader[at]
            other = ((written != 0) & (written != me)) | ((read != 0) & (read != me))
            if other.any():
                raise self.fault("store to what another program reads or writes", argument, offsets[other])
            if len(at) > 1 and len(np.unique(at)) < len(at):
                raise self.fault("store of two lanes to one place", argument, offsets)
            shadow.writer[at] = me


@contextlib.contextmanager
def _replaced(before: dict[tuple[Any, str], Any], after: tuple[Any, ...]) -> Iterator[None]:
    """Replace attributes within the block."""
    for (owner, name), function in zip(before, after, strict=True):
        setattr(owner, name, function)
    try:
        yield
    finally:
        for (owner, name), function in before.items():
            setattr(owner, name, function)


@contextlib.contextmanager
def language_patched_once() -> Iterator[None]:
    """Make a launch patch each module with the interpreter's language only once, within the block.

    The interpreter patches at every call of a function, which takes a third of a kernel's time. It also describes the
    type and shape of every value anew, which takes a fifth; here each is described once. It computes whether each sum
    and product of integers overflows, which takes a third of the rest, and drops the result outside of debug mode.
    """
    before = {
        (owner, name): getattr(owner, name)
        for owner, name in (
            (interpreter, "_patch_lang"),
            (interpreter.GridExecutor, "__call__"),
            (interpreter, "_get_np_dtype"),
            (core.block_type, "__init__"),
            (core.tensor, "__init__"),
            (semantic.TritonSemantic, "binary_op_sanitize_overflow_impl"),
        )
    }
    patch, call, numpy_type, make_type, make_tensor, find_overflow = before.values()
    patched: set[str] = set()
    numpy_types: dict[str, Any] = {}
    types: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def make_type_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = (str(element_ty), *map(core._unwrap_if_constexpr, shape))
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = self.shape, self.numel, self.name
        self.element_ty, (self.shape, self.numel, self.name) = element_ty, types[key]

    def make_shape_once(self: Any, handle: Any, type: Any) -> None:
        sizes = (*type.shape,) if type.is_block() else ()
        if sizes not in shapes:
            make_tensor(self, handle, type)
            shapes[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype, (self.shape, self.numel) = handle, type, type.scalar, shapes[sizes]

    def numpy_type_once(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(dtype)
        return numpy_types[name]

    def patch_once(fn: Any) -> Any:
        if fn.__module__ in patched:
            return None  # never for a launch's own kernel, which comes first
        patched.add(fn.__module__)
        return patch(fn)

    def call_afresh(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        try:
            return call(self, *args, **kwargs)
        finally:
            patched.clear()

    def find_overflow_to_report(self: Any, *operands: Any) -> None:
        if self.builder.options.debug:
            find_overflow(self, *operands)

    after = (patch_once, call_afresh, numpy_type_once, make_type_once, make_shape_once, find_overflow_to_report)
    with _replaced(before, after):
        yield


@contextlib.contextmanager
def guarded_memory(seed: int | None = None) -> Iterator[None]:
    """Check every kernel that the interpreter launches within the block.

    Args:
        seed: Programs of a launch run in a random order drawn from it. None: in the order of the grid.

    Raises:
        AccessError: A kernel made an invalid access. It is the cause of an InterpreterError.
    """
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    before = {
        (owner, name): getattr(owner, name)
        for owner, name in (
            (interpreter, "_implicit_cvt"),
            (executor, "__call__"),
            (builder, "set_grid_dim"),
            (builder, "set_grid_idx"),
            (builder, "create_masked_load"),
            (builder, "create_masked_store"),
            (builder, "create_atomic_rmw"),
            (builder, "create_atomic_cas"),
        )
    }
    convert, call, set_dim, set_index, load, store, rmw, cas = before.values()
    rng = None if seed is None else random.Random(seed)
    launch = _Launch("none")
    order: list[int] = []

    def guarded_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal launch
        launch = _Launch(self.fn.__name__)
        return call(self, *args, **kwargs)

    def guarded_convert(arg: Any) -> Any:
        value = convert(arg)
        if hasattr(arg, "data_ptr"):
            value.handle.data = np.array([launch.add(interpreter._unwrap_tensor(arg))], np.uint64)
        return value

    def guarded_dim(self: Any, *dims: int) -> None:
        set_dim(self, *dims)
        order[:] = range(dims[0] * dims[1] * dims[2])
        if rng is not None:
            rng.shuffle(order)

    def guarded_index(self: Any, x: int, y: int, z: int) -> None:
        _, ny, nz = self.grid_dim
        launch.program = order[(x * ny + y) * nz + z]
        launch.grid_index = (launch.program // (ny * nz), launch.program // nz % ny, launch.program % nz)
        set_index(self, *launch.grid_index)

    def at(pointers: Any, mask: Any, kind: str) -> Any:
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        real = launch.real(pointers.data, mask, width, kind)
        return interpreter.TensorHandle(real, pointers.dtype)

    def guarded_load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return load(self, at(pointers, mask.data, "load"), mask, *rest, **named)

    def guarded_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return store(self, at(pointers, mask.data, "store"), value, mask, *rest, **named)

    def guarded_rmw(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return rmw(self, op, at(pointers, mask.data, "atomic"), value, mask, *rest)

    def guarded_cas(self: Any, pointers: Any, *rest: Any) -> Any:
        return cas(self, at(pointers, np.True_, "atomic"), *rest)

    after = (
        guarded_convert,
        guarded_call,
        guarded_dim,
        guarded_index,
        guarded_load,
        guarded_store,
        guarded_rmw,
        guarded_cas,
    )
    with _replaced(before, after), language_patched_once():
        yield
