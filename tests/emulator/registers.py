"""The register file of a warp, with 32 lanes of every register and constant."""

from __future__ import annotations

import re
import struct

from .ptx import SIZES, EmulationError, Statement, split

# Registers begin as these bytes, which are NaN as a float and large as an integer.
POISON = {1: b"\1", 2: b"\xff\x7f", 4: b"\xff\x7f" * 2, 8: b"\xff\x7f" * 4}
SHARED = 1024
"""The address of global_smem (machine/memory.h)."""
_NAME = re.compile(r"[%A-Za-z_$]")


def number_of(text: str, size: int) -> int:
    """Return the bits of a literal of `size` bytes."""
    if text == "global_smem":
        return SHARED
    if text[:2] in ("0f", "0F"):
        return int(text[2:], 16)
    if text[:2] in ("0d", "0D"):
        bits = int(text[2:], 16)
        if size == 8:
            return bits
        (value,) = struct.unpack("<d", struct.pack("<Q", bits))
        return int.from_bytes(struct.pack("<f", value), "little")
    if "." in text:
        return int.from_bytes(struct.pack("<f" if size == 4 else "<d", float(text)), "little")
    return int(text.rstrip("U"), 0)


class Registers:
    """Assigns places to registers and constants."""

    def __init__(self) -> None:
        self.image = bytearray()
        self._scopes: dict[int, dict[str, tuple[int, int]]] = {}
        self._constants: dict[tuple[int, bytes], int] = {}

    def _space(self, data: bytes) -> int:
        self.image += data
        return len(self.image) - len(data)

    def declare(self, statement: Statement) -> None:
        """`.reg .b32 %r<5>;`"""
        match = re.match(r"\.reg\s+\.(\w+)\s+", statement.text)
        if match is None:
            raise EmulationError(f"line {statement.line}: {statement.text}")
        size, scope = SIZES[match[1]], self._scopes.setdefault(statement.scopes[-1], {})
        for name in split(statement.text[match.end() :]):
            several = re.match(r"([\w%$]+)<(\d+)>", name)
            names = [f"{several[1]}{k}" for k in range(int(several[2]))] if several else [name]
            for each in names:
                scope[each] = (self._space(POISON[size] * 32), size)

    def find(self, name: str, statement: Statement) -> tuple[int, int]:
        """Return the offset and size of a register."""
        for scope in reversed(statement.scopes):
            if name in self._scopes.get(scope, ()):
                return self._scopes[scope][name]
        raise EmulationError(f"line {statement.line}: no register {name}")

    def value(self, text: str, kind: str, statement: Statement) -> int:
        """Return the offset of an operand: a register, or a constant of this type; -1 for `_`."""
        text = text.strip()
        if text == "_":
            return -1
        if _NAME.match(text) and text != "global_smem":
            return self.find(text, statement)[0]
        return self.constant(number_of(text, SIZES[kind]), SIZES[kind])

    def constant(self, number: int, size: int) -> int:
        """Return the offset of a constant."""
        data = (number % (1 << 8 * size)).to_bytes(size, "little")
        if (size, data) not in self._constants:
            self._constants[size, data] = self._space(data * 32)
        return self._constants[size, data]

    def address(self, text: str, kind: str, statement: Statement) -> tuple[int, int]:
        """Return the offset of the register, and the constant, of [register + constant]."""
        base, _, offset = text.strip().strip("[]").partition("+")
        base = base.strip()
        if base == "global_smem" or base[0].isdigit():
            return self.constant(number_of(base, SIZES[kind]), SIZES[kind]), int(offset.strip() or "0", 0)
        return self.find(base, statement)[0], int(offset.strip() or "0", 0)
