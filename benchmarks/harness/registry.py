"""Registry of benchmarks: an operator has cases (inputs with bytes and flops) and providers (ours and its rivals).

Each file in operators/ defines BENCHMARKS, for one operator or several similar ones. `discover` finds them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import pc
import pc.triton_ops  # registers torch.ops.pc, in `python -m pc` too, where `import pc` is lazy

from .inputs import Inputs
from .tables import ROOT

OURS = "pc"
OPERATORS = ROOT / "benchmarks" / "operators"


class UnsupportedError(Exception):
    """A provider cannot do a case; the message says why and lands in the row."""


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
        name: The name in tables.
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
    found = {}
    for path in sorted(OPERATORS.glob("[a-z]*.py")):
        module = importlib.import_module(f"benchmarks.operators.{path.stem}")
        found |= {benchmark.op: benchmark for benchmark in getattr(module, "BENCHMARKS", ())}
    known = [name for name in operators() if name in found]
    for name in names or ():
        if name not in known:
            raise ValueError(f"op: got {name!r}, needs one of {', '.join(known)}")
    return [found[name] for name in names or known]


def case(
    name: str,
    device: str,
    quick: bool,
    build: Callable[..., Inputs],
    *sizes: Any,
    **conditions: Any,
) -> Case:
    """A case whose inputs are `build(*sizes, device, rotate)`."""
    columns = {key: str(value) for key, value in conditions.items()}
    return Case(name, lambda where, rotate: build(*sizes, where, rotate), quick, device, columns)


def ours(op: str, body: Callable[[Any], Any] | None = None) -> Provider:
    """`pc.<op>` with a call's tensors by name, or what calls it."""

    def prepare(call: Any) -> Callable[[], Any]:
        return functools.partial(body, call) if body else functools.partial(getattr(pc, op), **vars(call))

    return Provider(OURS, prepare, lambda: pc.__version__)


def in_torch(name: str, body: Callable[[Any], Any]) -> Provider:
    """A way of PyTorch's, called with a call."""
    return Provider(name, lambda call: functools.partial(body, call), lambda: torch.__version__)
