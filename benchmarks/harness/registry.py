"""What is measured: an operation has cases (inputs with their bytes and flops) and providers, ours and its rivals.

One thin file per operator, operators/<op>.py, defines BENCHMARK; `discover` finds them all.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

import pc.triton_ops  # noqa: F401  registers torch.ops.pc, in `python -m pc` too, where `import pc` is lazy

from .tables import ROOT

OURS = "pc"
OPERATORS = ROOT / "benchmarks" / "operators"


class UnsupportedError(Exception):
    """A provider cannot do a case; the message says why and lands in the row."""


class WrongError(Exception):
    """A result is not what it should be: such an operation is not timed."""


class Inputs(Protocol):
    """Tensors of one case, several sets of them so that a set is cold when its turn comes again.

    Attributes:
        calls: One object per set, understood by the benchmark's providers.
        bytes: Moved by one call at least: each input element read once, each output element written once.
        flops: Of one call at least.
    """

    calls: list[Any]
    bytes: int
    flops: int

    def check(self, call: Any, run: Callable[[], Any]) -> float:
        """Runs once and gives the largest error; raises WrongError where it is too large."""
        ...


@dataclass(frozen=True, eq=False)
class Case:
    """One set of conditions.

    Attributes:
        name: Unique within the operation, readable in a table.
        build: From device and how many bytes to rotate over to inputs; sizes from nothing else.
        quick: Whether `--quick` runs it.
        device: Kind it is for, "cpu" or "cuda".
        conditions: Columns of the row: heads, lengths, layout and so on.
    """

    name: str
    build: Callable[[torch.device, int], Inputs]
    quick: bool
    device: str
    conditions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Provider:
    """One implementation.

    Attributes:
        name: As it stands in tables.
        prepare: From one call's tensors to a function without arguments that does the work; what may be done once a
            step for all layers (plans, masks) is done here. Raises UnsupportedError.
        version: Of the package; raises ImportError where it is not installed.
        device: Kind it needs, or None for any.
    """

    name: str
    prepare: Callable[[Any], Callable[[], Any]]
    version: Callable[[], str]
    device: str | None = None


@dataclass(frozen=True)
class Benchmark:
    """Everything that is measured of one operator."""

    op: str
    cases: tuple[Case, ...]
    providers: tuple[Provider, ...]

    def of(self, device: str, quick: bool, pattern: str = "") -> list[Case]:
        """Its cases for a kind of device, whose name contains `pattern`."""
        return [c for c in self.cases if c.device == device and (c.quick or not quick) and pattern in c.name]


def operators() -> list[str]:
    """Every operator of the package: one file each."""
    stems = sorted(path.stem for path in (ROOT / "triton_ops").glob("[a-z]*.py"))
    return [stem for stem in stems if hasattr(torch.ops.pc, stem)]


def discover(names: list[str] | None = None) -> list[Benchmark]:
    """The benchmarks of these operators; None: of all that have one.

    Raises:
        ValueError: A name that no benchmark has.
    """
    known = [name for name in operators() if (OPERATORS / f"{name}.py").exists()]
    for name in names or ():
        if name not in known:
            raise ValueError(f"op: got {name!r}, needs one of {', '.join(known)}")
    return [importlib.import_module(f"benchmarks.operators.{name}").BENCHMARK for name in names or known]
