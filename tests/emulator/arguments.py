"""The arguments of a launch: packed as PTX expects them, and compared with what the kernel was compiled for."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .ptx import EmulationError

CODES = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I"}
CODES |= {"u64": "Q", "fp32": "f", "f32": "f", "fp64": "d"}
ITEM_SIZES = {"i1": 1, "i8": 1, "u8": 1, "fp8e4nv": 1, "i16": 2, "fp16": 2, "bf16": 2, "i32": 4, "fp32": 4, "i64": 8}


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors within an argument."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif hasattr(value, "base") and hasattr(value, "data_ptr"):  # reinterpreted
        yield value.base


class Arguments:
    """The arguments of one compiled kernel.

    Args:
        source: Triton's compiled source: its signature, constants, and what it knows of the arguments.
    """

    def __init__(self, source: Any) -> None:
        def index(key: Any) -> tuple[int, ...]:
            return (source.fn.arg_names.index(key),) if isinstance(key, str) else key

        self._name, self._names = source.fn.__name__, source.fn.arg_names
        self._signature = list(source.signature.values())
        self._constants = {index(key): value for key, value in source.constants.items()}
        self._attributes = {index(key): value for key, value in (source.attrs or {}).items()}

    def check(self, values: Sequence[Any]) -> list[tuple[str, int | float]]:
        """Return type and number of every parameter.

        Raise EmulationError if one is not what the kernel was compiled for.
        """
        found: list[tuple[str, int | float]] = []
        self._check(self._signature, values, (), found)
        return found

    def _check(self, kinds: Sequence[Any], values: Sequence[Any], path: tuple[int, ...], found: list[Any]) -> None:
        for k, (kind, value) in enumerate(zip(kinds, values, strict=True)):
            here = (*path, k)
            name = f"{self._name}: argument {self._names[here[0]]}"
            if isinstance(kind, tuple):
                self._check(kind, value, here, found)
            elif kind == "constexpr":
                self._check_constant(name, value, self._constants.get(here, value))
            else:
                code, number = self._number(name, kind, value)
                if ["tt.divisibility", 16] in [list(a) for a in self._attributes.get(here, ())] and number % 16:
                    raise EmulationError(f"{name} is {number}, compiled for multiples of 16")
                found.append((code, number))

    @staticmethod
    def _check_constant(name: str, value: Any, compiled: Any) -> None:
        plain = (int, float, bool)
        if isinstance(value, plain) and isinstance(compiled, plain) and value != compiled:
            raise EmulationError(f"{name} is {value}, compiled for {compiled}")

    @staticmethod
    def _number(name: str, kind: str, value: Any) -> tuple[str, int | float]:
        if kind[0] == "*":
            dtype, size = getattr(value, "dtype", None), ITEM_SIZES.get(kind[1:].removeprefix("k"))
            if isinstance(dtype, torch.dtype) and size is not None and dtype.itemsize != size:
                raise EmulationError(f"{name} is {dtype}, compiled for {kind}")
            return "Q", 0 if value is None else value if isinstance(value, int) else value.data_ptr()
        code = CODES[kind]
        return code, float(value) if code in "fd" else int(value)


def packed(name: str, given: Sequence[tuple[str, int | float]], parameters: dict[str, tuple[int, int]]) -> bytes:
    """Return the bytes of all parameters."""
    data = b""
    if len(given) != len(parameters):
        raise EmulationError(f"{name}: {len(given)} arguments for {len(parameters)} parameters")
    for (code, number), (parameter, (offset, size)) in zip(given, parameters.items(), strict=True):
        if struct.calcsize(code) != size:
            raise EmulationError(f"{name}: {parameter} has {size} bytes, given {code}")
        data = data.ljust(offset, b"\0") + struct.pack("<" + code, number)
    return data
