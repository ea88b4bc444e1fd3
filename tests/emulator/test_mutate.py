"""The mutation run knows a comparison that is noticed from one that is not, and its reasons belong to the sources."""

from __future__ import annotations

import ast

import pytest
import torch
import triton

from emulator import comparisons, kernels
from emulator.cases import CASES
from emulator.comparisons import NO_EFFECT, NOT_MET, NOTICED
from emulator.equivalents import REASONS


def _add(n: int, room: int) -> None:
    x, y, out = torch.randn(n + room), torch.randn(n + room), torch.zeros(n + room)
    kernels.add[(triton.cdiv(n, 256),)](x, y, out, n, 256)
    assert torch.equal(out[:n], (x + y)[:n])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("n", "room", "outcome"),
    [(300, 0, NOTICED), (256, 0, NOT_MET), (300, 1, NO_EFFECT)],
    ids=["the next element is of no tensor", "no lane is at the bound", "there is room for one more"],
)
def test_a_comparison_is_noticed_where_its_boundary_is_met(monkeypatch, n, room, outcome):
    monkeypatch.setitem(CASES, "add", lambda: _add(n, room))
    found = [counts for _, counts, _ in comparisons.outcomes(["add"], 0)]
    assert len(found) == 1
    assert found[0][outcome], found
    assert not any(found[0][other] for other in {NOTICED, NO_EFFECT} - {outcome})
    _add(n, room)  # the kernel is whole again


# With all cases of `make emulate`. After a change of a kernel, update the reasons with `make mutate`.
@pytest.mark.slow
@pytest.mark.parametrize("path", REASONS)
def test_reasons_are_of_expressions_of_the_sources(path):
    if (comparisons.SOURCES / path).exists():
        tree = ast.parse((comparisons.SOURCES / path).read_text(encoding="utf-8"))
        found = {ast.unparse(node).split("\n")[0].removesuffix(":") for node in ast.walk(tree)
                 if isinstance(node, (ast.expr, ast.stmt))}  # fmt: skip
        assert REASONS[path].keys() <= found, REASONS[path].keys() - found
    else:
        assert path.startswith("_"), "a kernel's name"
        assert REASONS[path].keys() == {"several"}
