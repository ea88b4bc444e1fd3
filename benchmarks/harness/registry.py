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
    """A case that a provider does not support; the row has the message."""


@dataclass(frozen=True, eq=False)
class Case:
    """One set of conditions.

    Attributes:
        name: Name in tables, unique within the operator.
        build: Function from a device and the bytes to rotate over to inputs.
        quick: Whether `--quick` runs the case.
        device: Kind of device, "cpu" or "cuda".
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
        prepare: Function from one call's tensors to a function that does the work. It prepares what an engine computes
            once a step for all layers (plans, masks), and raises UnsupportedError.
        version: Function that returns the package's version, or raises ImportError if it is not installed.
        device: Kind of device that it needs, or None for any.
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
        """Return the cases for a kind of device whose name contains `pattern`."""
        return [c for c in self.cases if c.device == device and (c.quick or not quick) and pattern in c.name]


def operators() -> list[str]:
    """Return the names of the package's operators; each has a file."""
    stems = sorted(path.stem for path in (ROOT / "triton_ops").glob("[a-z]*.py"))
    return [stem for stem in stems if hasattr(torch.ops.pc, stem)]


def discover(names: list[str] | None = None) -> list[Benchmark]:
    """Return the benchmarks of some operators, or of all for None.

    Raises:
        ValueError: No benchmark has one of the names.
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
    """Return a case whose inputs are `build(*sizes, device, rotate)`."""
    columns = {key: str(value) for key, value in conditions.items()}
    return Case(name, lambda where, rotate: build(*sizes, where, rotate), quick, device, columns)


def ours(op: str, body: Callable[[Any], Any] | None = None) -> Provider:
    """Return our provider: `pc.<op>` with a call's tensors by name, or `body` with the call."""

    def prepare(call: Any) -> Callable[[], Any]:
        return functools.partial(body, call) if body else functools.partial(getattr(pc, op), **vars(call))

    return Provider(OURS, prepare, lambda: pc.__version__)


def in_torch(name: str, body: Callable[[Any], Any]) -> Provider:
    """Return a provider that calls `body` of PyTorch's operators with a call."""
    return Provider(name, lambda call: functools.partial(body, call), lambda: torch.__version__)
