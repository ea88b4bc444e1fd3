"""Statements of PTX as instructions of the machine.

An instruction is the name of an operation in machine/, offsets of its operands in the register file, and two numbers
`a` and `b` whose meaning is said at the operation.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from .ptx import SIZES, TYPES, EmulationError, Label, Statement, split
from .registers import Registers

NORMAL, BRANCH, RETURN, BARRIER = range(4)
TYPE_NUMBERS = {
    name: k
    for k, name in enumerate(
        ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64", "f16", "bf16", "f32", "f64", "tf32"]
    )
}
COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
ATOMICS = {name: k for k, name in enumerate(["add", "min", "max", "exch", "cas", "and", "or", "xor"])}
SPECIAL = [f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"]
SPECIAL += ["%laneid", "%warpid", "%clock64", "%clock"]
# Words of an opcode that mean nothing to the machine, and those that are part of an operation's name.
IGNORED = frozenset(["rn", "ftz", "full", "approx"])
NAMED = frozenset(["relu", "lo", "hi", "wide", "NaN", "wrap", "clamp", "l", "r"])


@dataclasses.dataclass
class Instruction:
    """An instruction of the machine; see machine/state.h."""

    operation: str
    operands: list[int]
    statement: Statement
    guard: int = -1
    negate: bool = False
    a: int = 0
    b: int = 0
    kind: int = NORMAL
    target: str = ""


class Translation:
    """Instructions and registers, translated from statements in order."""

    def __init__(self, parameters: dict[str, tuple[int, int]], body: Sequence[Statement | Label]) -> None:
        self.parameters, self.registers = parameters, Registers()
        self.code: list[Instruction] = []
        labels: dict[tuple[int, str], int] = {}
        for item in body:
            if isinstance(item, Label):
                labels[item.scope, item.name] = len(self.code)
            else:
                self._statement(item)
        for instruction in self.code:
            if instruction.kind == BRANCH:
                scopes = reversed(instruction.statement.scopes)
                places = (labels[s, instruction.target] for s in scopes if (s, instruction.target) in labels)
                instruction.a = next(places)

    def _statement(self, statement: Statement) -> None:
        self.now, self.guard, text = statement, (-1, False), statement.text
        if text.startswith(".reg"):
            self.registers.declare(statement)
        if text.startswith("."):
            return
        if match := re.match(r"@(!?)([%\w]+)\s+", text):
            self.guard = (self.registers.find(match[2], statement)[0], bool(match[1]))
            text = text[match.end() :]
        opcode, _, rest = text.replace("\n", " ").replace("\t", " ").partition(" ")
        name, *words = opcode.split(".")
        OPERATIONS.get(name, uniform)(self, Words(name, words), split(rest.strip()))

    def emit(self, operation: str, operands: Sequence[int] = (), **given: int | str) -> None:
        """Add an instruction under the statement's guard."""
        self.code.append(Instruction(operation, list(operands), self.now, *self.guard, **given))

    def value(self, text: str, kind: str) -> int:
        """Return the offset of a register or a constant."""
        return self.registers.value(text, kind, self.now)

    def values(self, texts: Sequence[str], kind: str) -> list[int]:
        """Return the offsets of several operands of one type."""
        return [self.value(text, kind) for text in texts]

    def address(self, text: str, kind: str = "b32") -> tuple[int, int]:
        """Return the register's offset and the constant of [register + constant]."""
        return self.registers.address(text, kind, self.now)

    def width(self, name: str, otherwise: str) -> int:
        """Return the bytes of a register, or of a type if the operand is a constant."""
        return self.registers.find(name, self.now)[1] if re.match(r"[%A-Za-z]", name) else SIZES[otherwise]

    def refuse(self) -> EmulationError:
        """Return the error for an unknown statement."""
        return EmulationError(f"PTX line {self.now.line}: the emulator lacks {self.now.text}")


class Words:
    """An opcode: its name, the words after dots, and which of these are types."""

    def __init__(self, name: str, rest: list[str]) -> None:
        self.name, self.rest, self.types = name, rest, [word for word in rest if word in TYPES]

    def __contains__(self, word: str) -> bool:
        return word in self.rest

    def __getitem__(self, place: int) -> str:
        return self.rest[place]

    def beyond(self, known: frozenset[str]) -> set[str]:
        """Return the words that are neither types nor known."""
        return set(self.rest) - known - TYPES


Translator = Callable[[Translation, Words, list[str]], None]
OPERATIONS: dict[str, Translator] = {}


def operation(*names: str) -> Callable[[Translator], Translator]:
    """Register the translator of these opcodes."""

    def put(translator: Translator) -> Translator:
        OPERATIONS.update(dict.fromkeys(names, translator))
        return translator

    return put


def plain(kind: str) -> str:
    """Return the untyped type of the same size."""
    return kind if kind == "pred" else f"b{8 * SIZES[kind]}"


def vector(text: str) -> list[str]:
    """Return the names in {a, b}, or the single name."""
    return split(text.strip().strip("{} "))


def uniform(t: Translation, words: Words, operands: list[str]) -> None:
    """Translate an operation whose operands have one type."""
    if not words.types or words.beyond(IGNORED | NAMED):
        raise t.refuse()
    kind = words.types[-1]
    if words.name in ("and", "or", "xor", "not", "selp", "shl"):
        kind = plain(kind)
    types = [kind] * len(operands)
    if "wide" in words:
        types[0] = f"{kind[0]}{2 * int(kind[1:])}"
        if words.name == "mad":
            types[3] = types[0]
    if words.name in ("shl", "shr"):
        types[2] = "u32"
    elif words.name == "selp":
        types[3] = "pred"
    elif words.name == "bfe":
        types[2] = types[3] = "u32"
    elif words.name in ("popc", "clz"):
        types[0] = "b32"
    name = ".".join([words.name, *(word for word in words.rest if word in NAMED), kind])
    t.emit(name, [t.value(text, kind) for text, kind in zip(operands, types, strict=True)])


@operation("bra")
def _bra(t: Translation, words: Words, operands: list[str]) -> None:
    t.emit("", kind=BRANCH, target=operands[0])


@operation("ret", "exit")
def _ret(t: Translation, words: Words, operands: list[str]) -> None:
    t.emit("", kind=RETURN)


@operation("trap")
def _trap(t: Translation, words: Words, operands: list[str]) -> None:
    t.emit("trap")


# Hints, and fences, which do nothing, since memory is in order here.
@operation("createpolicy", "fence", "membar", "griddepcontrol", "prefetch", "discard", "nanosleep", "setmaxnreg")
def _nop(t: Translation, words: Words, operands: list[str]) -> None:
    t.emit("nop")


@operation("bar", "barrier")
def _bar(t: Translation, words: Words, operands: list[str]) -> None:
    if "warp" in words:
        t.emit("nop")
        return
    count = t.value(operands[1], "u32") if len(operands) > 1 else -1
    t.emit("", [t.value(operands[0], "u32"), count], a=int("arrive" in words), kind=BARRIER)


@operation("mov")
def _mov(t: Translation, words: Words, operands: list[str]) -> None:
    kind, (to, source) = plain(words.types[0]), operands
    if to.startswith("{"):
        names = vector(to)
        t.emit("unpack", [*t.values(names, kind), t.value(source, kind)], a=len(names), b=SIZES[kind] // len(names))
    elif source.startswith("{"):
        names = vector(source)
        size = SIZES[kind] // len(names)
        t.emit("pack", [t.value(to, kind), *t.values(names, f"b{8 * size}")], a=len(names), b=size)
    elif source in SPECIAL:
        t.emit("special", [t.value(to, kind)], a=SPECIAL.index(source), b=SIZES[kind])
    else:
        t.emit(f"mov.{kind}", t.values(operands, kind))


@operation("cvta")
def _cvta(t: Translation, words: Words, operands: list[str]) -> None:
    t.emit(f"mov.{plain(words.types[0])}", t.values(operands, words.types[0]))


@operation("setp")
def _setp(t: Translation, words: Words, operands: list[str]) -> None:
    comparison, kind = UNSIGNED.get(words[0], words[0]), words.types[-1]
    if comparison == "ne" and kind[0] in "usb" and kind != "bf16":  # integers are never NaN
        comparison = "neu"
    mix = next((k for k, word in enumerate(("and", "or", "xor"), 1) if word in words), 0)
    p, _, q = operands[0].partition("|")
    found = [t.value(p, "pred"), t.value(q, "pred") if q else -1, *t.values(operands[1:3], kind)]
    if mix:
        if operands[3].startswith("!"):
            raise t.refuse()
        found.append(t.value(operands[3], "pred"))
    t.emit(f"setp.{kind}", found, a=COMPARISONS.index(comparison) | mix << 8)


@operation("cvt")
def _cvt(t: Translation, words: Words, operands: list[str]) -> None:
    to, source = words.types
    if source == "e4m3x2" and to == "f16x2":
        t.emit("cvt.f16x2.e4m3x2", [t.value(operands[0], "b32"), t.value(operands[1], "b16")])
        return
    if to in ("f16x2", "bf16x2") and "rn" in words:
        t.emit(f"cvt.{to}.f32", [t.value(operands[0], to), *t.values(operands[1:], "f32")], a=int("relu" in words))
        return
    modes = [(f"r{letter}", f"r{letter}i") for letter in "nzmp"]
    if words.beyond(frozenset(["rna", "sat", "ftz", *(word for pair in modes for word in pair)])):
        raise t.refuse()
    rounding = next((k for k, mode in enumerate(modes, 1) if mode[0] in words or mode[1] in words), int("rna" in words))
    found = [t.value(operands[0], to), t.value(operands[1], source), t.width(operands[1], source)]
    a = TYPE_NUMBERS[to] | TYPE_NUMBERS[source] << 8 | rounding << 16 | int("sat" in words) << 24
    t.emit("cvt", found, a=a, b=t.width(operands[0], to))


@operation("bfi", "lop3", "prmt")
def _bits(t: Translation, words: Words, operands: list[str]) -> None:
    if words.rest != ["b32"]:
        raise t.refuse()
    t.emit(f"{words.name}.b32", t.values(operands, "b32"))


def _access(t: Translation, words: Words, registers: str, address: str) -> None:
    kind = words.types[-1]
    spaces = [word.split("::")[0] for word in words.rest]
    space = next((s for s in ("global", "shared", "param") if s in spaces), None)
    if space is None:  # a generic address
        raise t.refuse()
    names = vector(registers)
    named = next((name for name in names if re.match(r"[%A-Za-z]", name)), names[0])
    a = SIZES[kind] | (kind[0] == "s") << 8 | len(names) << 16 | t.width(named, kind) << 24
    if space == "param":
        name, _, offset = address.strip("[] ").partition("+")
        place = t.parameters[name.strip()][0] + int(offset.strip() or "0", 0)
        t.emit("ld.param", t.values(names, kind), a=a, b=place)
        return
    base, offset = t.address(address, "b64" if space == "global" else "b32")
    t.emit(f"{words.name}.{space}", [*t.values(names, kind), base], a=a, b=offset)


@operation("ld")
def _ld(t: Translation, words: Words, operands: list[str]) -> None:
    _access(t, words, operands[0], operands[1])


@operation("st")
def _st(t: Translation, words: Words, operands: list[str]) -> None:
    _access(t, words, operands[1], operands[0])


def cp_async(t: Translation, words: Words, operands: list[str]) -> None:
    """Translate copies of at most 16 bytes a lane, and waits for them."""
    if "commit_group" in words:
        t.emit("cp.async.commit_group")
    elif "wait_group" in words:
        t.emit("cp.async.wait_group", a=int(operands[0], 0))
    elif "wait_all" in words:
        t.emit("cp.async.wait_all")
    elif "mbarrier" in words or "bulk" in words:
        raise t.refuse()
    else:
        (to, at), (source, offset) = t.address(operands[0]), t.address(operands[1], "b64")
        given = t.value(operands[3], "b32") if len(operands) > 3 else -1
        t.emit("cp.async", [to, source, given, offset], a=int(operands[2], 0), b=at)


OPERATIONS["cp"] = cp_async


@operation("atom", "red")
def _atom(t: Translation, words: Words, operands: list[str]) -> None:
    if words.name == "red":
        operands = ["_", *operands]
    kind = words.types[-1]
    space = "shared" if any(word.startswith("shared") for word in words.rest) else "global"
    base, offset = t.address(operands[1], "b64" if space == "global" else "b32")
    how = next(ATOMICS[word] for word in words.rest if word in ATOMICS)
    t.emit(f"atom.{space}.{kind}", [t.value(operands[0], kind), base, *t.values(operands[2:], kind)], a=how, b=offset)


@operation("shfl")
def _shfl(t: Translation, words: Words, operands: list[str]) -> None:
    d, _, p = operands[0].partition("|")
    found = [t.value(d, "b32"), t.value(p, "pred") if p else -1, *t.values(operands[1:4], "b32")]
    t.emit("shfl", found, a=("up", "down", "bfly", "idx").index(words[1]))


@operation("vote")
def _vote(t: Translation, words: Words, operands: list[str]) -> None:
    negated, source = operands[1].startswith("!"), t.value(operands[1].lstrip("!"), "pred")
    if words[1] == "ballot":
        t.emit("vote.ballot", [t.value(operands[0], "b32"), source], a=int(negated))
    else:
        how = ("any", "all", "uni").index(words[1])
        t.emit("vote", [t.value(operands[0], "pred"), source], a=how, b=int(negated))


@operation("redux")
def _redux(t: Translation, words: Words, operands: list[str]) -> None:
    t.emit(f"redux.{words.types[-1]}", t.values(operands[:2], "b32"), a=ATOMICS[words[1]])


@operation("activemask")
def _activemask(t: Translation, words: Words, operands: list[str]) -> None:
    t.emit("activemask", t.values(operands, "b32"))


@operation("elect")
def _elect(t: Translation, words: Words, operands: list[str]) -> None:
    d, _, p = operands[0].partition("|")
    t.emit("elect", [t.value(d, "b32"), t.value(p, "pred")])


@operation("ldmatrix", "stmatrix")
def _matrix(t: Translation, words: Words, operands: list[str]) -> None:
    names, address = operands if words.name == "ldmatrix" else reversed(operands)
    base, offset = t.address(address)
    registers = t.values(vector(names), "b32")
    t.emit(words.name, [*registers, base, int("trans" in words)], a=len(registers), b=offset)


@operation("mma")
def _mma(t: Translation, words: Words, operands: list[str]) -> None:
    shape = re.fullmatch(r"m16n8k(\d+)", words[2])
    d, a, b, _ = words.types
    if not shape or words.rest[3:5] != ["row", "col"]:
        raise t.refuse()
    types = TYPE_NUMBERS[a] | TYPE_NUMBERS[b] << 8 | TYPE_NUMBERS[d] << 16 | int("satfinite" in words) << 24
    t.emit("mma", [t.value(name, "b32") for operand in operands for name in vector(operand)], a=int(shape[1]), b=types)
