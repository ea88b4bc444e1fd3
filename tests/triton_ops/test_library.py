"""Operators from typed functions: schemas, forwarding, documentation and errors of all of them."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from attention_cases import Case, build
from torch._subclasses.fake_tensor import FakeTensorMode

import pc
from pc.triton_ops._attention.predicate import Mask
from pc.triton_ops._attention.scores import ScoreModifiers
from pc.triton_ops._copy import ops as rows_ops
from pc.triton_ops._core import operator as registration

# In the package, an operator and its module have the same name.
joining = importlib.import_module("pc.triton_ops.join_prefix")

SCHEMAS = Path(__file__).parent.parent / "support" / "schemas.txt"
OPERATORS = sorted(name for name in pc.triton_ops.__all__ if name not in ("set_debug_mode", "warmup"))


def _one(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def test_schemas_stay_what_they_are() -> None:
    """Exported programs contain schemas, so a change of a schema is a change of the interface."""
    found = [str(schema) for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("pc::")]
    assert sorted(found) == SCHEMAS.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", OPERATORS)
def test_the_function_and_its_operator_take_the_same(name: str) -> None:
    parameters = inspect.signature(getattr(pc, name)).parameters
    arguments = getattr(torch.ops.pc, name).default._schema.arguments
    assert [p for p in parameters if p != "out"] == [a.name for a in arguments]
    for argument in arguments:
        default = parameters[argument.name].default
        assert argument.has_default_value() == (default is not inspect.Parameter.empty)
        assert not argument.has_default_value() or argument.default_value == default


@pytest.mark.parametrize("name", OPERATORS)
def test_every_parameter_is_documented(name: str) -> None:
    function = getattr(pc, name)
    documented = re.findall(r"^        (\w+):", "    " + (inspect.getdoc(function) or "").replace("\n", "\n    "), re.M)
    arguments = documented[: len(inspect.signature(function).parameters)]
    assert arguments == list(inspect.signature(function).parameters)
    assert function.__module__ == f"pc.triton_ops.{name.removesuffix('_with_lse').removesuffix('_list')}"
    assert "Raises:" in inspect.getdoc(function)


ATTENTION = [name for name in OPERATORS if "_attention" in name and name != "merge_attention"]


def test_a_result_is_typed() -> None:
    pair = tuple[torch.Tensor, torch.Tensor]
    for name in ATTENTION:
        wanted = pair if name.endswith("_with_lse") else torch.Tensor
        assert typing.get_type_hints(getattr(pc, name))["return"] == wanted


# Code that reads an option by name must change when one is added; docs/architecture.md lists these files.
KNOWN: dict[Any, set[str]] = {
    Mask: {"_attention/arguments", "_attention/predicate", "kernels/predicate"},
    ScoreModifiers: {"_attention/arguments", "_attention/scores", "kernels/scores"},
}


def _names(path: Path) -> set[str]:
    """Return the names, attributes and parameters in a file's code."""
    nodes = [vars(node) for node in ast.walk(ast.parse(path.read_text()))]
    return {node[field] for node in nodes for field in ("id", "attr", "arg") if isinstance(node.get(field), str)}


@pytest.mark.parametrize("options", [Mask, ScoreModifiers], ids=["mask", "terms"])
def test_few_files_know_an_option(options):
    folder = Path(next(iter(pc.triton_ops.__path__)))
    words = {name for name in options._fields if not name.isupper()}
    paths = [*folder.glob("_attention/*.py"), *folder.glob("kernels/*.py")]
    known = {path for path in paths if words & _names(path)}
    assert {path.relative_to(folder).with_suffix("").as_posix() for path in known} == KNOWN[options]


def _attention(**change: object) -> torch.Tensor:
    batch = build(Case(lens=(40, 20), queries=(1, 2)))
    names = list(inspect.signature(pc.paged_attention).parameters)
    return pc.paged_attention(**dict(zip(names, (*batch.tensors, batch.scale), strict=False)) | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": [[[1.0]]]}, "query: got list, needs a tensor"),
        ({"seq_lens": np.array([40, 20])}, "seq_lens: got ndarray, needs a tensor"),
        ({"softcap": None}, "softcap: got None, needs a float"),
        ({"scale": "1"}, "scale: got '1', needs a float"),
        ({"causal": _one(1, 2)}, "causal: got int32 [2] on cpu, needs a bool"),
        ({"causal": None}, "causal: got None, needs a bool"),
        ({"sinks": 3}, "sinks: got 3, needs a tensor or None"),
        ({"max_seq_len": 3.5}, "max_seq_len: got 3.5, needs an int or None"),
        ({"windw": 3}, "pc.paged_attention: got an unexpected keyword argument 'windw'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_type_is_said_in_a_line(change: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError) as caught:
        _attention(**change)
    assert str(caught.value) == message
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_missing_argument_is_named() -> None:
    batch = build(Case(lens=(40,), queries=(1,)))
    with pytest.raises(TypeError, match=r"^pc.paged_attention: missing a required argument: 'scale'$"):
        pc.paged_attention(*batch.tensors)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("inv_freq", lambda keys, ids, one: pc.rotate_keys(keys, ids, ids, ids, None)),
        ("source_slots", lambda keys, ids, one: pc.move_slots(keys, None, None, ids, ids)),
        ("block_tables", lambda keys, ids, one: pc.attention_plan(None, one, one.expand(2), 4)),
        ("block_tables", lambda keys, ids, one: pc.paged_attention(keys[0], keys, keys, None, one, one, 1.0)),
        ("cache", lambda keys, ids, one: pc.latent_attention(keys[0], None, one[None], one, one.expand(2), 1.0, 16)),
    ],
    ids=["rotate_keys", "move_slots", "attention_plan", "paged_attention", "latent_attention"],
)
@pytest.mark.quick
def test_none_for_a_tensor_is_named(name: str, call: Any) -> None:
    """The dispatcher takes None for any tensor, so keys without frequencies were copied without a rotation."""
    ids = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(TypeError, match=f"^{name}: got None, needs a tensor"):
        call(torch.zeros(2, 4, 1, 32), ids, ids.int())


def test_lists_and_devices_are_named_too() -> None:
    cache, ids = torch.zeros(4, 2, 3), torch.tensor([0])
    with pytest.raises(TypeError, match=r"^caches: got ndarray in the list, needs a list of tensors$"):
        pc.gather_blocks_list([cache, cache.numpy()], ids)
    with pytest.raises(TypeError, match=r"^caches: got ndarray, needs a list of tensors$"):
        pc.gather_blocks_list(cache.numpy(), ids)
    with pytest.raises(TypeError, match=r"^device: got 3.5, needs a device or None$"):
        pc.gather_blocks(cache, ids, device=3.5)


@pytest.mark.parametrize("softcap", [-1.0, float("nan"), float("inf")])  # NaN was off, and inf gave NaN
def test_an_error_of_the_operator_itself_passes_unchanged(softcap: float) -> None:
    with pytest.raises(ValueError, match=rf"^softcap: got {softcap}, needs 0"):
        _attention(softcap=softcap)


@contextlib.contextmanager
def _two_devices() -> Iterator[list[torch.device]]:
    """Make tensors on `cuda` without a GPU; yield the devices that were made current, except the first."""
    entered: list[torch.device] = []

    @contextlib.contextmanager
    def enter(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    with (
        FakeTensorMode(),
        # On a machine with one GPU, no context can be made on the second device.
        mock.patch("torch._subclasses.fake_tensor.init_gpu_context"),
        mock.patch("torch.cuda.current_device", return_value=0),
        mock.patch("torch.cuda.device", enter),
    ):
        yield entered


@pytest.mark.parametrize("index", [None, 0, 1])
@pytest.mark.parametrize("place", ["first", "behind host memory", "in a list", "by name"])
def test_kernels_run_on_the_device_of_the_first_tensor_on_one(place: str, index: int | None) -> None:
    """A pinned cache comes before its index on a device. Formerly the cache's device, the CPU, was made current."""
    with _two_devices() as entered:
        host = torch.empty(4, 2, 3)
        other = torch.empty(3, device="cpu" if index is None else f"cuda:{index}")
        args = {"first": (other,), "behind host memory": (host, other), "in a list": ([host, host], 1.0, [other])}
        kwargs = {"out": other} if place == "by name" else {}
        launched = registration._kernel(
            lambda args: lambda args: "launched", lambda *args, **kwargs: (args, kwargs), None, on_device=True
        )
        assert launched(*args.get(place, (host,)), **kwargs) == "launched"
        assert entered == ([torch.device("cuda:1")] if index == 1 else [])


def test_pinned_caches_reach_their_kernels() -> None:
    """The operators take host memory with an index on a device, called through the dispatcher."""
    moves = []
    with (
        _two_devices() as entered,
        mock.patch("torch.Tensor.is_pinned", return_value=True),
        mock.patch.object(rows_ops, "_move_on_device", lambda op, *args, **kwargs: moves.append(op)),
        mock.patch.object(joining, "launch_join_map", lambda call, *args: call.block_tables.new_empty(9)),
        mock.patch.object(joining, "launch_move_rows", lambda op, *args, **kwargs: moves.append(op)),
    ):
        cache = torch.empty(4, 2, 3)
        index = torch.empty(3, dtype=torch.int64, device="cuda:1")
        tables, lens = index.new_empty(2, 2), index.new_empty(2)

        def launch(function: Any, run: Any) -> Any:
            return registration._kernel(lambda args: run, registration.record_of(function), None, on_device=True)

        gathered = launch(pc.gather_slots, rows_ops.move_rows)(cache, index)
        assert gathered.device == index.device
        launch(pc.gather_blocks_list, rows_ops.move_rows)([cache, cache], index)
        call = ([cache], tables, lens, [cache.new_empty(1, 3)], index, 9)
        joined = launch(pc.join_prefix_list, joining._run)(*call)
        assert joined[0].device == index.device
    assert moves == ["gather_slots", "gather_blocks_list", "join_prefix"]
    assert set(entered) == {torch.device("cuda:1")}
