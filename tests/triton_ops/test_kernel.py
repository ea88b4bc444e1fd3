"""Named tuples as parameters of kernels, and who knows the options that they hold."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import pc
from pc.triton_ops._attention.predicate import Mask
from pc.triton_ops._attention.scores import Terms
from pc.triton_ops._core.launch import constants, numbers
from pc.triton_ops._core.runtime import INTERPRET

tl = pytest.importorskip("triton.language")
kernel = importlib.import_module("pc.triton_ops.kernels.bundles").kernel


class Options(NamedTuple):
    """Two numbers, and a flag that decides which of them is used."""

    first: int
    second: int
    TAKE_FIRST: bool


@kernel(["n"], options=Options)
def _chosen_kernel(out_ptr, options, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    value = options.second
    if options.TAKE_FIRST:
        value = options.first
    tl.store(out_ptr + offsets, value + offsets, mask=offsets < n)
    for i in tl.static_range(len(options)):
        tl.store(out_ptr + BLOCK + i, tl.cast(options[i], tl.int32))


def test_tuples_are_spelled_out():
    options = Options(3, 16, TAKE_FIRST=True)
    assert numbers(options) == (3, 16)
    assert constants(options) == {"TAKE_FIRST": True}
    assert _chosen_kernel.arg_names == ["out_ptr", "first", "second", "n", "TAKE_FIRST", "BLOCK"]


@pytest.mark.skipif(INTERPRET, reason="the interpreter compiles nothing")
def test_nothing_is_compiled_for_a_number():
    compiled = {p.name: (p.is_constexpr, p.do_not_specialize) for p in _chosen_kernel.params}
    assert compiled["first"] == compiled["second"] == compiled["n"] == (False, True)
    assert compiled["TAKE_FIRST"][0]


@pytest.mark.skipif(not INTERPRET, reason="launches a kernel on the CPU")
@pytest.mark.parametrize("take_first", [True, False])
def test_a_kernel_has_its_tuple_together(take_first):
    options, out = Options(3, 16, take_first), torch.zeros(7, dtype=torch.int32)
    _chosen_kernel[(1,)](out, *numbers(options), 2, **constants(options), BLOCK=4)
    value = 3 if take_first else 16
    assert out.tolist() == [value, value + 1, 0, 0, 3, 16, int(take_first)]


def test_numbers_come_before_what_is_compiled_for():
    class Mixed(NamedTuple):
        FLAG: bool
        number: int

    with pytest.raises(AssertionError, match="numbers before"):
        numbers(Mixed(FLAG=True, number=1))


# Code that reads an option by name must change when one is added; docs/architecture.md lists these files.
KNOWN: dict[Any, set[str]] = {
    Mask: {"_attention/arguments", "_attention/predicate", "kernels/predicate"},
    Terms: {"_attention/arguments", "_attention/scores", "kernels/scores"},
}


def _names(path: Path) -> set[str]:
    """Return the names, attributes and parameters in a file's code."""
    nodes = [vars(node) for node in ast.walk(ast.parse(path.read_text()))]
    return {node[field] for node in nodes for field in ("id", "attr", "arg") if isinstance(node.get(field), str)}


@pytest.mark.parametrize("options", [Mask, Terms], ids=["mask", "terms"])
def test_few_files_know_an_option(options):
    folder = Path(next(iter(pc.triton_ops.__path__)))
    words = {name for name in options._fields if not name.isupper()}
    paths = [*folder.glob("_attention/*.py"), *folder.glob("kernels/*.py")]
    known = {path for path in paths if words & _names(path)}
    assert {path.relative_to(folder).with_suffix("").as_posix() for path in known} == KNOWN[options]
