"""Launches are built once for calls of a kind, and every call goes through the dispatcher."""

from __future__ import annotations

import inspect
import itertools
import threading
import typing

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import pc
from pc.triton_ops._core import cache as launch_cache
from pc.triton_ops._core import operator as registration
from pc.triton_ops._core.cache import MAX_REMEMBERED, LaunchCache, cached_launch, forget_choices

_names = itertools.count()


class Operator:
    """An operator of two tensors and an optional one, and the calls that a launch was built for."""

    def __init__(self) -> None:
        self.built: list[tuple[object, ...]] = []
        self.checked = 0
        name = f"test_dispatch_{next(_names)}"
        launch = cached_launch(self._build, self._check)
        fake = lambda *args, **kwargs: _like(*args, **kwargs)  # noqa: E731
        fake.__name__ = fake.__qualname__ = name
        fake.__signature__ = inspect.signature(_like)
        fake.__annotations__ = typing.get_type_hints(_like)
        self.call = registration.operator(cpu=launch, launch=launch)(fake)
        self.op = getattr(torch.ops.pc, name)

    def _build(self, args):
        self.built.append(tuple(v.shape if isinstance(v, torch.Tensor) else v for v in args))
        return lambda args: _like(*args)

    def _check(self, args):
        self.checked += 1
        if args.factor < 0:
            raise ValueError("factor")


def _like(one: torch.Tensor, two: torch.Tensor, extra: torch.Tensor | None = None, factor: float = 1.0) -> torch.Tensor:
    return (one + two if extra is None else one + two + extra) * factor


@pytest.fixture
def operator():
    return Operator()


def _tensors(*shapes, **options):
    return tuple(torch.randn(shape, **options) for shape in shapes)


def test_a_launch_is_built_once_however_arguments_are_passed(operator):
    one, two, extra = _tensors(4, 4, 4)
    ways = [
        lambda a, b, c: operator.call(a, b, c, 2.0),
        lambda a, b, c: operator.call(a, b, factor=2.0, extra=c),
        lambda a, b, c: operator.call(two=b, factor=2, one=a, extra=c),
        lambda a, b, c: operator.op(a, b, extra=c, factor=2.0),
    ]
    for call in ways:
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(call(one, two, extra), (one + two + extra) * 2.0)
    assert operator.built == [(one.shape, two.shape, extra.shape, 2.0)]
    assert operator.checked == 3 * len(ways), "values, every time"


@pytest.mark.parametrize("change", ["shape", "dtype", "strides", "option", "absent", "aligned", "resized"])
def test_a_launch_is_built_for_another_kind_of_call(operator, change):
    one, two, extra = _tensors(4, 4, 4)
    for _ in range(2):
        operator.call(one, two, extra, 2.0)
    if change == "resized":
        given = one.resize_(1), two.resize_(1), extra, 2.0
    else:
        given = {
            "shape": (*_tensors(5, 5, 5), 2.0),
            "dtype": (*_tensors(4, 4, 4, dtype=torch.float64), 2.0),
            "strides": (torch.randn(8)[::2], two, extra, 2.0),
            "option": (one, two, extra, 3.0),
            "absent": (one, two, None, 2.0),
            "aligned": (torch.randn(5)[1:], two, extra, 2.0),
        }[change]
    for _ in range(2):
        assert torch.equal(operator.call(*given), _like(*given))
    assert len(operator.built) == 2


def test_layers_that_alternate_are_all_found(operator):
    layers = [_tensors(n, n) for n in range(1, 5)]
    for _ in range(3):
        for one, two in layers:
            assert torch.equal(operator.call(one, two), one + two)
    assert len(layers) == len(operator.built)


class _Functions(TorchFunctionMode):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class _Tensor(torch.Tensor):
    seen = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen += "test_dispatch" in str(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_modes_profilers_and_subclasses_see_every_call(operator):
    one, two = _tensors(4, 4)
    name = str(operator.op.default)
    operator.call(one, two)
    for mode in (_Functions(), _Operators()):
        for _ in range(2):
            with mode:
                operator.call(one, two)
        assert mode.seen.count(name) == 2, mode
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        operator.call(one, two)
    assert any(event.name == name.replace(".default", "").replace("pc.", "pc::") for event in profile.events())
    for _ in range(2):
        operator.call(one.as_subclass(_Tensor), two)
    assert _Tensor.seen == 2
    for _ in range(2):
        doubled = torch.vmap(operator.call)(torch.stack([one, one]), torch.stack([two, two]))
        assert torch.equal(doubled[1], one + two)


def test_values_are_checked_and_types_refused_at_every_call(operator):
    one, two = _tensors(4, 4)
    for _ in range(2):
        operator.call(one, two, None, 2.0)
    with pytest.raises(ValueError, match="factor"):
        operator.call(one, two, None, -2.0)
    with pytest.raises(TypeError, match="two: got 3, needs a tensor"):
        operator.call(one, 3, None, 2.0)
    with pytest.raises(TypeError, match="extra: got 'x', needs a tensor or None"):
        operator.call(one, two, "x", 2.0)
    with pytest.raises(TypeError, match="factor"):
        operator.call(one, two, None, [2.0])
    with pytest.raises(TypeError, match="one"):
        operator.call(two=two)
    with pytest.raises(TypeError):
        operator.call(one, two, one=one)
    with pytest.raises(TypeError):
        operator.call(one, two, none=one)


def test_the_compiler_sees_the_operator(operator):
    one, two = _tensors(4, 4)
    for _ in range(2):
        operator.call(one, two)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(operator.call, fullgraph=True, backend=backend)
    assert torch.equal(compiled(one, two), one + two)
    assert [node.target for node in graphs[0].graph.nodes if node.op == "call_function"] == [operator.op.default]


def test_calls_are_forgotten_when_decisions_change(operator):
    one, two = _tensors(4, 4)
    for _ in range(2):
        operator.call(one, two)
    forget_choices()
    operator.call(one, two)
    assert len(operator.built) == 2


def test_memory_of_choices_is_bounded():
    cache: LaunchCache[int] = LaunchCache()
    for option in range(MAX_REMEMBERED + 1):
        assert cache.get_or(option, (), lambda option=option: -option) == -option
    built = [cache.get_or(option, (), lambda: 1) for option in (MAX_REMEMBERED, 0, MAX_REMEMBERED - 1)]
    assert built == [-MAX_REMEMBERED, 1, 1], "the last is known, those before it are built anew"


def test_a_cache_tells_calls_apart_by_all_that_kernels_are_chosen_by():
    cache, base = LaunchCache(), torch.zeros(4, 8, 16)
    calls = {
        "same": (base, torch.zeros(3)),
        "length": (base[:2], torch.zeros(3)),
        "strides": (base.transpose(0, 1).contiguous().transpose(0, 1), torch.zeros(3)),
        "dtype": (base.half(), torch.zeros(3)),
        "other": (base, torch.zeros(4)),
        "device": (base.to("meta"), torch.zeros(3)),
        "address": (base, torch.zeros(4)[1:]),
    }

    def found(options, tensors):
        """What is known of such a call; None if it would be built anew, which is forgotten."""
        built = []
        name = cache.get_or(options, tensors, lambda: built.append(1) or "")
        if built:
            cache._known.popitem()
            cache._last.get(options, [None]).pop(0)
        return name or None

    for name, tensors in calls.items():
        assert found((1,), tensors) is None, name
        assert cache.get_or((1,), tensors, lambda name=name: name) == name
    for _ in range(2):
        for name, tensors in calls.items():
            assert found((1,), tensors) == name
            assert name == "address" or found((1,), [tensor.clone() for tensor in tensors]) == name
            assert found((2,), tensors) is None
    with torch.inference_mode():
        assert found((1,), (base, torch.zeros(3))) == "same"
    grown = torch.zeros(3)
    assert found((1,), (base, grown)) == "same"
    grown.resize_(4)
    assert found((1,), (base, grown)) == "other", "in place"
    assert cache.get_or("twice", (grown, grown), lambda: "twice") == "twice"
    assert found("twice", (grown, grown)) == "twice"
    forget_choices()
    assert found("twice", (grown, grown)) is None


def test_a_cache_does_without_what_torch_does_not_promise(monkeypatch):
    monkeypatch.setattr(launch_cache, "TensorGuards", None)
    test_a_cache_tells_calls_apart_by_all_that_kernels_are_chosen_by()


def test_modes_and_profilers_see_calls_of_cpu_tensors():
    cache, ids = torch.randn(4, 2, 3), torch.tensor([2, 0])
    name = str(torch.ops.pc.gather_blocks.default)
    for mode in (_Functions(), _Operators()):
        with mode:
            pc.gather_blocks(cache, ids)
        assert mode.seen.count(name) == 1, mode
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pc.gather_blocks(cache, ids)
    assert any(event.name == "pc::gather_blocks" for event in profile.events())


def test_calls_of_many_threads_find_what_is_theirs(operator):
    """Kinds in turn, more than are remembered, while choices are forgotten."""
    wrong = []

    def work(seed):
        numbers = torch.Generator().manual_seed(seed)
        for n in torch.randint(1, 40, (150,), generator=numbers).tolist():
            one, two = torch.full((n,), float(seed)), torch.full((n,), float(n))
            if not torch.equal(operator.call(one, two, factor=seed), (one + two) * seed):
                wrong.append((seed, n))
            if n == 1:
                forget_choices()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
