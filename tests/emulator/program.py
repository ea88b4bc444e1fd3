"""A kernel that is ready to run."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from . import instructions_sm90  # noqa: F401  registers its translations
from .build import machine
from .instructions import NORMAL, Instruction, Translation
from .ptx import EmulationError, parse


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    """Return the address of an array, for the machine."""
    return ctypes.c_void_p(array.ctypes.data)


class Program:
    """A kernel, parsed, translated and loaded into the machine.

    Attributes:
        name: The kernel's name.
        ptx: Its text.
        threads: Threads of a program.
        parameters: Offset and size of each, by name.
        code: The machine's instructions.
    """

    def __init__(self, name: str, ptx: str) -> None:
        self.name, self.ptx, self._entry, self._lines = name, ptx, parse(ptx), ptx.splitlines()
        self.threads, self.parameters = self._entry.threads, self._entry.parameters
        translation = Translation(self.parameters, self._entry.body)
        self.code = translation.code
        operands: list[int] = []
        rows = []
        for i in self.code:
            rows.append((self._operation(i), len(operands), i.guard, i.negate, _signed(i.a), i.b, i.kind))
            operands += i.operands
        table, pool = np.array(rows, np.int64), np.array(operands, np.int32)
        image = np.frombuffer(bytes(translation.registers.image), np.uint8)
        library = machine()
        self.handle = ctypes.c_void_p(
            library.emulator_program(len(rows), pointer(table), pointer(pool), len(pool), pointer(image), len(image))
        )

    def _operation(self, instruction: Instruction) -> int:
        if instruction.kind != NORMAL:
            return 0
        found: int = machine().emulator_operation(instruction.operation.encode())
        if not found:
            line, text = instruction.statement.line, instruction.statement.text
            raise EmulationError(f"PTX line {line}: the emulator lacks {instruction.operation}: {text}")
        return found

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return how often each instruction ran since the start, and how often a comparison's operands were equal."""
        ran, ties = np.zeros(len(self.code), np.uint64), np.zeros(len(self.code), np.uint64)
        machine().emulator_counts(self.handle, pointer(ran), pointer(ties))
        return ran.astype(np.int64), ties.astype(np.int64)

    @contextlib.contextmanager
    def flipped(self, *instructions: int) -> Iterator[None]:
        """Replace comparisons by their neighbours in the block: `<` by `<=`, `>=` by `>`."""
        for instruction in instructions:
            machine().emulator_flip(self.handle, instruction)
        try:
            yield
        finally:
            for instruction in instructions:
                machine().emulator_flip(self.handle, instruction)

    def source(self, instruction: int) -> tuple[str, int, int] | None:
        """Return path, line and column of the kernel's source."""
        place = self._entry.source.get(self.code[instruction].statement.line)
        return place and (self._entry.files.get(place[0], "?"), *place[1:])

    def place(self, instruction: int) -> str:
        """Return a description of an instruction."""
        line, source = self.code[instruction].statement.line, self.source(instruction)
        where = f" ({Path(source[0]).name}:{source[1]})" if source else ""
        return f"PTX line {line}{where}: {self._lines[line - 1].strip()}"


def _signed(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number


_edits: list[Callable[[str, str], str]] = []


@contextlib.contextmanager
def edited(edit: Callable[[str, str], str]) -> Iterator[None]:
    """Run `edit(name, ptx)` in place of every kernel within the block, to break kernels on purpose."""
    _edits.append(edit)
    try:
        yield
    finally:
        _edits.pop()


def program(name: str, ptx: str) -> Program:
    """Return the program of a kernel, made once for each text."""
    for edit in _edits:
        ptx = edit(name, ptx)
    return _program(name, ptx)


@functools.cache
def _program(name: str, ptx: str) -> Program:
    return Program(name, ptx)
