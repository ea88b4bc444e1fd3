"""Every kind of call gets its own launch, built once, and every call goes through the dispatcher."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import Case, attend, build, check
from processes import in_threads
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import pc
from pc.triton_ops._core import cache as launch_cache
from pc.triton_ops._core.cache import MAX_REMEMBERED, LaunchCache, forget_choices

F16, BF16 = torch.float16, torch.bfloat16
STEP = Case(lens=(40, 20), queries=(1, 2), heads=(2, 1), head_dim=16)
KINDS = [
    STEP,
    dataclasses.replace(STEP, dtype=F16),
    dataclasses.replace(STEP, heads=(4, 1)),
    dataclasses.replace(STEP, queries=(2, 2)),
    dataclasses.replace(STEP, head_major=True),
    dataclasses.replace(STEP, block_size=8),
    dataclasses.replace(STEP, softcap=2.0),
    dataclasses.replace(STEP, softcap=3.0),
    dataclasses.replace(STEP, sinks=True),
    dataclasses.replace(STEP, causal=False),
]


@pytest.fixture(params=[True, False], ids=["guards", "no guards"])
def guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do without TensorGuards, which torch does not promise."""
    if not request.param:
        monkeypatch.setattr(launch_cache, "TensorGuards", None)


@pytest.mark.quick
@pytest.mark.usefixtures("guards")
def test_layers_of_all_kinds_in_turn_get_their_own_results(device: torch.device) -> None:
    """A call whose launch is that of another kind gives a wrong result, or an access outside of a tensor."""
    batches = [build(case).to(device) for case in KINDS]
    for _ in range(2):
        for batch in batches:
            check(build(batch.case), *attend(batch))


@pytest.mark.quick
@pytest.mark.interpreter
def test_the_second_call_of_a_kind_is_checked_as_the_first(device: torch.device) -> None:
    batch = build(STEP).to(device)
    pc.set_debug_mode(True)
    for _ in range(2):
        attend(batch)
    batch.block_tables[0, 0] = 1000
    with pytest.raises(ValueError, match="block_tables: got 1000"):
        attend(batch)


BASE = torch.zeros(4, 8, 16)
CALLS = {
    "first": (BASE, torch.zeros(3)),
    "length": (BASE[:2], torch.zeros(3)),
    "strides": (BASE.transpose(0, 1).contiguous().transpose(0, 1), torch.zeros(3)),
    "dtype": (BASE.half(), torch.zeros(3)),
    "other tensor": (BASE, torch.zeros(4)),
    "device": (BASE.to("meta"), torch.zeros(3)),
    "address": (BASE, torch.zeros(4)[1:]),
}


@pytest.mark.quick
@pytest.mark.usefixtures("guards")
def test_a_launch_is_built_once_for_all_calls_of_a_kind() -> None:
    cache: LaunchCache[object] = LaunchCache()
    built: list[object] = []

    def launch(options: object, *tensors: torch.Tensor) -> object:
        return cache.get_or(options, tensors, lambda: built.append(object()) or built[-1])

    launches = {(option, name): launch(option, *tensors) for option in (1, 2) for name, tensors in CALLS.items()}
    assert len({*map(id, launches.values())}) == len(built) == 2 * len(CALLS)
    for (option, name), wanted in launches.items():
        assert launch(option, *CALLS[name]) is wanted
        assert name == "address" or launch(option, *(tensor.clone() for tensor in CALLS[name])) is wanted
    with torch.inference_mode():
        assert launch(1, BASE, torch.zeros(3)) is launches[1, "first"]
    grown = torch.zeros(3)
    assert launch(1, BASE, grown) is launches[1, "first"]
    grown.resize_(4)
    assert launch(1, BASE, grown) is launches[1, "other tensor"]
    assert launch(1, grown, grown) is launch(1, grown, grown)
    count = len(built)
    forget_choices()
    launch(1, *CALLS["first"])
    assert len(built) == count + 1


def test_memory_of_launches_is_bounded() -> None:
    cache: LaunchCache[int] = LaunchCache()
    for option in range(MAX_REMEMBERED + 1):
        assert cache.get_or(option, (), lambda option=option: -option) == -option
    built = [cache.get_or(option, (), lambda: 1) for option in (MAX_REMEMBERED, 0, MAX_REMEMBERED - 1)]
    assert built == [-MAX_REMEMBERED, 1, 1], "the last is known, those before it are built again"


def test_threads_find_their_own_launches() -> None:
    """Kinds in turn, more than are compared, while launches are forgotten."""
    cache: LaunchCache[int] = LaunchCache()
    wrong = []

    def work(seed: int) -> None:
        numbers = torch.Generator().manual_seed(seed)
        for n in torch.randint(1, 40, (300,), generator=numbers).tolist():
            if cache.get_or(seed, (torch.zeros(n), torch.zeros(2 * n)), lambda n=n: seed * n) != seed * n:
                wrong.append((seed, n))
            if n == 1:
                forget_choices()

    in_threads(work, 1, 2, 3)
    assert not wrong


class _Functions(TorchFunctionMode):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class _Tensor(torch.Tensor):
    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


CACHE, IDS = torch.randn(4, 2, 3), torch.tensor([2, 0])
OPERATORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "gather_blocks": lambda cache: pc.gather_blocks(cache, IDS),
    "gather_slots": lambda cache: pc.gather_slots(cache, IDS),
    "scatter_blocks": lambda cache: pc.scatter_blocks(CACHE[:2].clone(), cache, IDS),
    "scatter_slots": lambda cache: pc.scatter_slots(CACHE[:2, 0].clone(), cache, IDS),
    "paged_attention": lambda cache: attend(build(STEP), with_lse=False),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", OPERATORS)
def test_modes_profilers_subclasses_and_compilers_see_every_call(name: str) -> None:
    call, operator = OPERATORS[name], getattr(torch.ops.pc, name).default
    for mode in (_Functions(), _Operators()):
        for _ in range(2):
            with mode:
                call(CACHE.clone())
        assert mode.seen.count(str(operator)) == 2, mode
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call(CACHE.clone())
    assert any(event.name == f"pc::{name}" for event in profile.events())
    if name == "paged_attention":
        return
    for _ in range(2):
        _Tensor.seen.clear()
        call(CACHE.clone().as_subclass(_Tensor))
        assert str(operator) in _Tensor.seen
    graphs: list[torch.fx.GraphModule] = []
    compiled = torch.compile(call, fullgraph=True, backend=lambda graph, inputs: graphs.append(graph) or graph)
    compiled(CACHE.clone())
    assert operator in {node.target for node in graphs[0].graph.nodes}
