"""The check of kernels on a device: the results of every operator against formulas in PyTorch."""

from __future__ import annotations

import importlib
import inspect
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from .._attention.layout import PlanShape, plan_views
from .._attention.plan_check import COMPARED
from .._core.checks import on_host
from .._core.runtime import HAS_TRITON, INTERPRET, KERNELS_ON_CPU
from ..attention_plan import attention_plan
from .cases import USES, Case, Shape, all_cases, small_cases
from .oracle import Expected, arguments_of, difference, plan_facts

__all__ = ["USES", "Row", "Shape", "check_kernels", "runs_kernels"]


class Row(NamedTuple):
    """The outcome of a case.

    Attributes:
        operator: The operator, as in `torch.ops.pc`.
        case: A description of the call.
        error: The largest difference from the formula; infinite if a result's shape or dtype is wrong, or
            it contains NaN or misplaced infinities, and after an exception.
        allowed: The largest difference that rounding explains; 0 if bytes must be equal.
        seconds: Time of the calls, with compilation.
        problem: The fault; empty if there is none.

    Examples:
        >>> from pc.check import Row
        >>> row = Row("gather_slots", "float16", error=2.0, allowed=0.0, seconds=0.1, problem="off by 2")
        >>> row.ok
        False
    """

    operator: str
    case: str
    error: float
    allowed: float
    seconds: float
    problem: str

    @property
    def ok(self) -> bool:
        """Whether the kernel's result agrees with the formula's."""
        return not self.problem


def runs_kernels(device: torch.device) -> bool:
    """Return whether operators on tensors of a device launch kernels."""
    return HAS_TRITON and (device.type == "cuda" or (device.type == "cpu" and KERNELS_ON_CPU))


def check_kernels(
    device: torch.device,
    small: Shape | None = None,
    uses: Sequence[str] = USES,
    only: str = "",
    advance: Callable[[str], None] = lambda case: None,
) -> list[Row]:
    """Run kernels on a device and compare their results with formulas in PyTorch on the CPU.

    Args:
        device: The device whose kernels are checked.
        small: Check only the kernels that a model with these attention layers launches.
        uses: With `small`, the purposes to check: some of `USES`.
        only: Check only cases whose name, "operator: case", contains this text.
        advance: Called with the name of each case before it runs.

    Returns:
        A row for each case. If a case raises, its row has the error as problem, and later cases still run.
    """
    cases: Iterable[Case] = all_cases(wide=not INTERPRET and device.type != "cpu")
    if small is not None:
        cases = [case for use in uses for case in small_cases(small, use)]
    rows = []
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        for case in cases:
            name = f"{case.operator}: {case.name}"
            if only in name:
                advance(name)
                rows.append(_check(case, device))
    return rows


def _check(case: Case, device: torch.device) -> Row:
    """Run a case and return its row. Outside the interpreter, run it twice, because the second call reuses a launch."""
    begin = time.perf_counter()
    error, allowed, problem = 0.0, 0.0, ""
    try:
        # In the interpreter the case runs once, because there is no compiled kernel to reuse.
        for call in ("",) if INTERPRET else ("", "the second call: "):
            for place, found, expected in _results(case, device):
                wrong, within = difference(found, expected)
                error, allowed = max(error, wrong), max(allowed, within)
                if not wrong <= within and not problem:
                    off = f"off by {wrong:.2g}" if math.isfinite(wrong) else _SPOILED
                    needs = f"rounding explains {within:.2g}" if within else "needs to be equal"
                    problem = f"{call}{place} is {off}, {needs}"
    except Exception as caught:
        problem = f"{type(caught).__name__}: {str(caught).strip().splitlines()[0] if str(caught).strip() else ''}"
        error = math.inf
    return Row(case.operator, case.name, error, allowed, time.perf_counter() - begin, problem)


_SPOILED = "wrong: its shape, dtype or infinities differ, or it contains NaN"


def _results(case: Case, device: torch.device) -> list[tuple[str, torch.Tensor, Expected]]:
    """Run a case. Return name, result and expectation of each tensor that the call returns or writes."""
    call = case.make()
    arguments = {name: _to(device, value) for name, value in call.arguments.items()}
    operators = importlib.import_module("..", __name__)
    name = case.calls or case.operator
    module = importlib.import_module("..flash_attn", __name__) if name.startswith("flash_attn") else operators
    results: list[tuple[str, torch.Tensor, Expected]] = []
    if call.planned:
        args = arguments_of(arguments)
        names = inspect.signature(attention_plan).parameters
        batch = {name: getattr(args, name) for name in names if hasattr(args, name)}
        batch["num_kv_heads"] = args.key_cache.shape[2]
        # A captured graph refreshes a plan in place, whatever it held.
        held = torch.full_like(attention_plan(**batch), -(1 << 30))
        arguments["plan"] = attention_plan(**batch, out=held)
        if not on_host(held):  # in host memory a plan has no facts
            info = plan_views(held.cpu(), PlanShape.of(args.block_tables, args.block_size))[0]
            results.append(("the plan", info[:, COMPARED], plan_facts(arguments_of(call.arguments))))
    returned = getattr(module, name)(**arguments)
    returned = returned if isinstance(returned, (tuple, list)) else [] if returned is None else [returned]
    results += [
        ("the result" if len(call.returned) == 1 else f"result {place}", found, expected)
        for place, (found, expected) in enumerate(zip(returned, call.returned, strict=True), 1)
    ]
    for name, expected in call.written.items():
        for found, each in zip(_list(arguments[name]), _list(expected), strict=True):
            results.append((name, found, each))
    return results


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _to(device: torch.device, value: Any) -> Any:
    """Return a copy of a value on a device, strides included."""
    if isinstance(value, list):
        return [_to(device, item) for item in value]
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device).copy_(value)
    return value
