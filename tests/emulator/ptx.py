"""PTX text of one kernel, as parameters, statements and labels."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

TYPES = {f"{letter}{bits}" for letter in "bus" for bits in (8, 16, 32, 64)}
TYPES |= {"e4m3x2", "f16", "f16x2", "bf16", "bf16x2", "f32", "f64", "tf32", "pred"}
SIZES = {"pred": 1, "e4m3x2": 2, "f16x2": 4, "bf16": 2, "bf16x2": 4, "tf32": 4}
SIZES |= {name: int(name[1:]) // 8 for name in TYPES if name[1:].isdigit()}

_LABEL = re.compile(r"([$\w%]+):")


class EmulationError(Exception):
    """A kernel made an invalid access, or the emulator lacks an instruction."""


@dataclasses.dataclass(frozen=True)
class Statement:
    """An instruction or a declaration; `scopes` are the numbers of the braces around it, outermost first."""

    text: str
    line: int
    scopes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Label:
    """A place to branch to, within a scope."""

    name: str
    scope: int


@dataclasses.dataclass
class Entry:
    """The kernel of a PTX file.

    Attributes:
        parameters: Offset and size of each, by name.
        threads: Threads of a program.
        body: Statements and labels in order.
        source: File number, line and column of the kernel's source, by line of PTX.
        files: Paths of files by number.
    """

    parameters: dict[str, tuple[int, int]]
    threads: int
    body: list[Statement | Label]
    source: dict[int, tuple[int, int, int] | None]
    files: dict[int, str]


def split(text: str) -> list[str]:
    """Return the parts between commas that are outside of brackets."""
    parts, depth, now = [], 0, ""
    for letter in text:
        depth += letter in "{[("
        depth -= letter in "}])"
        if letter == "," and not depth:
            parts.append(now.strip())
            now = ""
        else:
            now += letter
    return [*parts, now.strip()] if now.strip() else parts


def parse(ptx: str) -> Entry:
    """Return the only kernel of a text."""
    begin = ptx.index(".entry")
    opened = ptx.index("(", begin)
    closed = ptx.index(")", opened)
    start = ptx.index("{", closed) + 1
    end = ptx.find("$L__func_end", start)
    end = ptx.index("}", end) if end >= 0 else ptx.rfind("}", start)
    threads = re.search(r"\.reqntid\s+(\d+)", ptx)
    if threads is None:
        raise EmulationError("PTX without .reqntid")
    names = re.findall(r'\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?', ptx)
    first = ptx.count("\n", 0, start) + 1
    text, source = _without_debug(ptx[start:end], first)
    return Entry(
        _parameters(ptx[opened + 1 : closed]),
        int(threads[1]),
        list(_statements(text, first)),
        source,
        {int(number): str(Path(one) / second) if second else one for number, one, second in names},
    )


def _parameters(text: str) -> dict[str, tuple[int, int]]:
    found, offset = {}, 0
    for item in split(text):
        words = item.split()
        kind, count = next(word[1:] for word in words if word[1:] in SIZES), 1
        align = size = SIZES[kind]
        if ".align" in words and "ptr" not in item:
            align = int(words[words.index(".align") + 1])
        name, _, array = words[-1].partition("[")
        if array:
            count = int(array.rstrip("]"))
        offset = -(-offset // align) * align
        found[name] = (offset, size * count)
        offset += size * count
    return found


def _without_debug(text: str, first: int) -> tuple[str, dict[int, tuple[int, int, int] | None]]:
    """Return the text without comments and debug directives, and the sources of its lines."""
    place, source, lines = None, {}, text.split("\n")
    for number, line in enumerate(lines):
        if match := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)", line):
            place, lines[number] = (int(match[1]), int(match[2]), int(match[3])), ""
        else:
            lines[number] = re.sub(r"//.*", "", line)
            if lines[number].lstrip().startswith((".file", ".section", ".pragma")):
                lines[number] = ""
        source[first + number] = place
    return re.sub(r"/\*.*?\*/", "", "\n".join(lines)), source


def _statements(text: str, line: int) -> Iterator[Statement | Label]:
    position, scopes, made = 0, [0], 0
    while True:
        while position < len(text) and text[position].isspace():
            line += text[position] == "\n"
            position += 1
        if position >= len(text):
            return
        if text[position] == "{":
            made += 1
            scopes.append(made)
            position += 1
        elif text[position] == "}":
            scopes.pop()
            position += 1
        elif label := _LABEL.match(text, position):
            yield Label(label[1], scopes[-1])
            position = label.end()
        else:
            end = text.index(";", position)
            yield Statement(text[position:end].strip(), line, tuple(scopes))
            line += text.count("\n", position, end)
            position = end + 1
