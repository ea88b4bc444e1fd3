"""Values that hooks, patched functions and other objects hold: the cache is emptied when the user changes one."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import random
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import PurePath
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
tqdm: Any = pytest.importorskip("tqdm").tqdm

from calls import calls_within  # noqa: E402
from generate_cases import LLAMA, assert_same, plain, prompt  # noqa: E402

from pc.integrations.huggingface import enable_prefix_caching  # noqa: E402
from pc.integrations.huggingface.functions import differing  # noqa: E402
from pc.integrations.huggingface.identity import Identity  # noqa: E402
from pc.integrations.huggingface.support import harmless_tokens  # noqa: E402

FACTOR = SimpleNamespace(value=1.5)
VALUES = {"of": [1.5]}


class Steering:
    """A hook that multiplies a layer's output by what it holds, and counts its passes."""

    kind = 1.0

    def __init__(self, value: Any) -> None:
        self.value, self.count, self.seen, self.last = value, 0, list[Any](), dict[str, Any]()

    def factor(self) -> Any:
        return self.value * self.kind

    def __call__(self, module: Any, inputs: Any, output: Any) -> Any:
        self.count += 1
        self.seen.append(output)
        self.last["output"] = output
        return output * self.factor()

    def method(self, module: Any, inputs: Any, output: Any) -> Any:
        return self(module, inputs, output)


class Applied(Steering):
    def factor(self) -> Any:
        return self.value(torch.ones(64))


class Chosen(Steering):
    def factor(self) -> Any:
        factors = torch.ones(64)
        factors[self.value] = 3.0
        return factors


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.5

    def __call__(self, module: Any, inputs: Any, output: Any) -> Any:
        return output * self.value


class Listed(Steering):
    def factor(self) -> Any:
        return self.value[0]


class Named(Steering):
    def factor(self) -> Any:
        return {"strong": 3.0, "weak": 1.5}[str(self.value)]


class Weak(Steering):
    def factor(self) -> Any:
        return self.value().value


OWNER = Steering(1.5)


class OfAccelerate(Steering):
    """A hook as accelerate runs it, in a forward that it gives the module."""

    no_grad = False

    def init_hook(self, module: Any) -> Any:
        return module

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def post_forward(self, module: Any, output: Any) -> Any:
        return self(module, (), output)

    def detach_hook(self, module: Any) -> Any:
        return module


class Third(OfAccelerate):
    def factor(self) -> Any:
        return 9 if self.count == 3 else 1


class InArray(Steering):
    def factor(self) -> Any:
        return float(self.value[0])


class Nested(Steering):
    def factor(self) -> Any:
        return self.value.inner["value"]


class ByNumber(Steering):
    def factor(self) -> Any:
        return self.value[1]


class Coder(torch.nn.Module):
    """A module that only the hook holds, as a sparse autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)


class Coding(Steering):
    def __call__(self, module: Any, inputs: Any, output: Any) -> Any:
        return output + self.value.linear(output)


def _by_function(module: Any, inputs: Any, output: Any) -> Any:
    return output * FACTOR.value


def _by_global(module: Any, inputs: Any, output: Any) -> Any:
    return output * VALUES["of"][0]


def _mlp(model: Any) -> Any:
    return model.model.layers[0].mlp


def _hooked(hook: Any, change: Callable[[Any], Any]) -> Callable[[Any], Callable[[], Any]]:
    """Return a function that puts a hook on a model and returns a function that changes what the hook holds."""

    def put(model: Any) -> Callable[[], Any]:
        own = hook()
        _mlp(model).register_forward_hook(own)
        return lambda: change(own)

    return put


def _set(value: Any, name: str = "value") -> Callable[[Any], Any]:
    return lambda hook: setattr(hook, name, value)


def _method(model: Any) -> Callable[[], Any]:
    hook = Steering(1.5)
    _mlp(model).register_forward_hook(hook.method)
    return lambda: setattr(hook, "value", 3.0)


def _before(model: Any) -> Callable[[], Any]:
    hook = Steering(1.5)
    _mlp(model).register_forward_pre_hook(lambda module, inputs: hook(module, inputs, inputs[0]))
    return lambda: setattr(hook, "value", 3.0)


def _closure(model: Any) -> Callable[[], Any]:
    value = 1.5

    def change() -> None:
        nonlocal value
        value = 3.0

    _mlp(model).register_forward_hook(lambda module, inputs, output: output * value)
    return change


def _partial(model: Any) -> Callable[[], Any]:
    values = {"value": 1.5}
    _mlp(model).register_forward_hook(functools.partial(lambda values, m, i, output: output * values["value"], values))
    return lambda: values.update(value=3.0)


def _default(model: Any) -> Callable[[], Any]:
    def hook(module: Any, inputs: Any, output: Any, value: float = 1.5) -> Any:
        return output * value

    _mlp(model).register_forward_hook(hook)
    return lambda: setattr(hook, "__defaults__", (3.0,))


def _forward(model: Any) -> Callable[[], Any]:
    own, values = _mlp(model).forward, SimpleNamespace(value=1.5)
    _mlp(model).forward = lambda x: own(x) * values.value
    return lambda: setattr(values, "value", 3.0)


class Scaled(torch.nn.Module):
    """A module around another one, as those that hold control vectors."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.control = inner, Steering(1.5)

    def forward(self, x: Any) -> Any:
        return self.inner(x) * self.control.value


class ByGlobal(Scaled):
    def forward(self, x: Any) -> Any:
        return self.inner(x) * FACTOR.value


def _module(kind: type[Scaled], change: Callable[[Any], Any]) -> Callable[[Any], Callable[[], Any]]:
    def put(model: Any) -> Callable[[], Any]:
        model.model.layers[0].mlp = kind(_mlp(model))
        return lambda: change(_mlp(model))

    return put


def _hook_with_accelerate(module: Any, *hooks: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    for hook in hooks:
        accelerate.hooks.add_hook_to_module(module, hook, append=True)


def _accelerate(model: Any) -> Callable[[], Any]:
    hook = OfAccelerate(1.5)
    _hook_with_accelerate(_mlp(model), hook)
    return lambda: setattr(hook, "value", 3.0)


def _several_of_accelerate(model: Any) -> Callable[[], Any]:
    change = _accelerate(model)
    _hook_with_accelerate(_mlp(model), OfAccelerate(1.0))
    return change


def _of_class(model: Any) -> Callable[[], Any]:
    kind, values = type(model.model.norm), [1.5]
    own = kind.forward
    kind.forward = lambda self, x: own(self, x) * values[0]

    def change() -> None:
        values[0] = 3.0

    return change


CHANGES: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "number of a hook": _hooked(lambda: Steering(1.5), _set(3.0)),
    "number of a hook, by vars": _hooked(lambda: Steering(1.5), lambda hook: vars(hook).update(value=3.0)),
    "whole number": _hooked(lambda: Steering(1), _set(2)),
    "flag": _hooked(lambda: Steering(True), _set(False)),
    "none": _hooked(Slotted, _set(torch.tensor(3.0))),
    "slot": _hooked(Slotted, _set(3.0)),
    "name": _hooked(lambda: Named("weak"), _set("strong")),
    "class attribute": _hooked(
        lambda: type("Own", (Steering,), {"kind": 1.5})(1.0), lambda h: _set(3.0, "kind")(type(h))
    ),
    "class attribute of a base": _hooked(
        lambda: type("Own", (type("Base", (Steering,), {"kind": 1.5}),), {})(1.0),
        lambda hook: _set(3.0, "kind")(type(hook).__base__),
    ),
    "in a list": _hooked(lambda: Listed([1.5]), lambda hook: hook.value.insert(0, 3.0)),
    "in a tuple": _hooked(lambda: Listed((1.5,)), _set((3.0,))),
    "in a deque": _hooked(lambda: Listed(deque([1.5])), lambda hook: hook.value.appendleft(3.0)),
    "in a view of a dict": _hooked(lambda: Listed(MappingProxyType({0: 1.5})), _set(MappingProxyType({0: 3.0}))),
    "slice": _hooked(lambda: Chosen(slice(0, 8)), _set(slice(8, 16))),
    "function in C": _hooked(lambda: Applied(torch.tanh), _set(torch.sigmoid)),
    "operator": _hooked(lambda: Applied(torch.ops.aten.tanh.default), _set(torch.ops.aten.sigmoid.default)),
    "array": _hooked(lambda: InArray(np.full(3, 1.5)), lambda hook: hook.value.fill(3.0)),
    "memory": _hooked(lambda: InArray(memoryview(bytearray(b"12"))), lambda hook: hook.value.__setitem__(0, 99)),
    "weak reference": _hooked(lambda: Weak(weakref.ref(OWNER)), lambda hook: _set(3.0)(OWNER)),
    "path": _hooked(lambda: Named(PurePath("weak")), _set(PurePath("strong"))),
    "in an object": _hooked(
        lambda: Nested(SimpleNamespace(inner={"value": 1.5})), lambda hook: hook.value.inner.update(value=3.0)
    ),
    "of two keys that read alike": _hooked(
        lambda: ByNumber({1: 1.5, "1": 9.0}), lambda hook: hook.value.update({1: 3.0})
    ),
    "tensor in place": _hooked(lambda: Steering(torch.full((64,), 1.5)), lambda hook: hook.value.mul_(2)),
    "tensor replaced": _hooked(lambda: Steering(torch.full((64,), 1.5)), _set(torch.full((64,), 3.0))),
    "weight of a module": _hooked(
        lambda: Coding(Coder().requires_grad_(False)), lambda h: h.value.linear.weight.mul_(9)
    ),
    "method": _method,
    "hook before": _before,
    "closure": _closure,
    "partial": _partial,
    "default": _default,
    "forward of a module": _forward,
    "object of a module": _module(Scaled, lambda module: _set(3.0)(module.control)),
    "global object of a module's class": _module(ByGlobal, lambda module: _set(3.0)(FACTOR)),
    "global object of a hook": _hooked(lambda: _by_function, lambda hook: _set(3.0)(FACTOR)),
    "list in a global dict": _hooked(lambda: _by_global, lambda hook: VALUES["of"].__setitem__(0, 3.0)),
    "closure of a class's function": _of_class,
    "hook of accelerate": _accelerate,
    "several hooks of accelerate": _several_of_accelerate,
}


def _by_list() -> Any:
    seen: list[Any] = []
    return lambda *values: seen.append(0) or (values[2] * 9 if len(seen) == 3 else None)


def _by_attribute() -> Any:
    own = SimpleNamespace(count=0)

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        own.count += 1
        return output * 9 if own.count == 3 else None

    return hook


def _by_closure() -> Any:
    count = 0

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        nonlocal count
        count += 1
        return output * 9 if count == 3 else None

    return hook


def _in_global() -> Any:
    global COUNT
    COUNT = 0

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        global COUNT
        COUNT += 1
        return output * 9 if COUNT == 3 else None

    return hook


def _in_place(count: Any) -> Any:
    def hook(module: Any, inputs: Any, output: Any) -> Any:
        count[0] += 1
        return output * 9 if count[0] == 3 else None

    return hook


def _in_module(module: Any, inputs: Any, output: Any) -> Any:
    module.count += 1
    module.seen.append(module.count)
    return output * 9 if module.count == 3 or len(module.seen) == 5 else None


def _makes(module: Any, inputs: Any, output: Any) -> Any:
    module.made = getattr(module, "made", 0) + 1
    return output * 9 if module.made == 3 else None


def _marks(module: Any, inputs: Any, output: Any) -> Any:
    if not getattr(module, "_marked", False):
        module._marked, module.made = True, 0
    return _makes(module, inputs, output)


def _calls(module: Any, inputs: Any, output: Any) -> Any:
    return output * 9 if module.counted() == 3 else None


class Counter(torch.nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x)

    def counted(self) -> int:
        self.made = getattr(self, "made", 0) + 1
        return self.made


def _by_chance(draw: Callable[[], Any]) -> Any:
    return lambda module, inputs, output: output * (1.0 + draw())


COUNT = 0
COUNTING: dict[str, Callable[[], Any]] = {
    "module": lambda: _in_module,
    "made in a module": lambda: _makes,
    "made in a module, with a flag": lambda: _marks,
    "method of a module": lambda: _calls,
    "list": _by_list,
    "attribute": _by_attribute,
    "closure": _by_closure,
    "global": _in_global,
    "tensor": lambda: _in_place(torch.zeros(1)),
    "array": lambda: _in_place(np.zeros(1)),
    "random": lambda: _by_chance(functools.partial(random.Random.random, random.Random(3))),
    "generator": lambda: _by_chance(functools.partial(torch.rand, 1, generator=torch.Generator().manual_seed(3))),
}


@pytest.fixture(autouse=True)
def _own_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    FACTOR.value = OWNER.value = 1.5
    VALUES["of"] = [1.5]
    kind = transformers.models.llama.modeling_llama.LlamaRMSNorm
    monkeypatch.setattr(kind, "forward", kind.forward)  # a case replaces it


@pytest.mark.parametrize("put", CHANGES.values(), ids=CHANGES.keys())
def test_a_value_that_changes_empties_the_cache(model: Any, put: Callable[[Any], Callable[[], Any]]) -> None:
    ids, options = prompt(40), {"max_new_tokens": 2, "return_dict_in_generate": True, "output_logits": True}
    change = put(model)
    with enable_prefix_caching(model, num_blocks=64) as handle:
        before = plain(model, input_ids=ids, **options).logits[0]
        for _ in range(2):
            model.generate(ids, **options)
        assert handle.last_requests[0].cached_tokens == 32  # passes change the hook's counts, which is no change
        change()
        want, got = plain(model, input_ids=ids, **options).logits[0], model.generate(ids, **options).logits[0]
        assert not torch.allclose(want, before)
        torch.testing.assert_close(got, want)
        model.generate(ids, **options)
        assert handle.last_requests[0].cached_tokens == 32


def test_an_equal_value_is_no_change(model: Any) -> None:
    """Services set such a number before each call."""
    hook = Steering(1.5)
    _mlp(model).register_forward_hook(hook)
    with enable_prefix_caching(model, num_blocks=64) as handle:
        for number in range(3):
            hook.value, hook.last = float("1.5"), {}
            hook.seen.clear()
            model.generate(prompt(40), max_new_tokens=4)
            assert handle.last_requests[0].cached_tokens == (32 if number else 0)


def test_counts_of_decode_steps_are_no_change(model: Any) -> None:
    hook, counts = Steering(1.5), {"steps": 0}

    def step(module: Any, inputs: Any, output: Any) -> None:
        module.passes = getattr(module, "passes", 0) + 1
        if output.shape[1] == 1:
            counts["steps"] += 1
            hook.seen.append(output)

    _mlp(model).register_forward_hook(step)
    with enable_prefix_caching(model, num_blocks=64) as handle:
        answer = model.generate(prompt(40), max_new_tokens=12)
        model.generate(answer, max_new_tokens=4)
        assert handle.last_requests[0].cached_tokens == 48
        assert counts["steps"] > 11


@pytest.mark.parametrize("name", COUNTING)
@pytest.mark.parametrize("is_new", [True, False], ids=["added later", "there before"])
def test_hooks_that_count_see_the_passes_of_calls_alone(model: Any, name: str, is_new: bool) -> None:
    """Interventions at one step are often hooks that count passes. The test of a model must not count as steps."""
    ids, options = prompt(40), {"max_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}
    model.model.layers[0].mlp = Counter(_mlp(model))
    _mlp(model).count, _mlp(model).seen = 0, []
    with _mlp(model).register_forward_hook(COUNTING[name]()):
        want = [model.generate(input_ids=ids, **options).logits for _ in range(2)]
    _mlp(model).count, _mlp(model).seen = 0, []
    vars(_mlp(model)).pop("made", None)
    vars(_mlp(model)).pop("_marked", None)
    with contextlib.ExitStack() as stack, warnings.catch_warnings(record=True):
        if is_new:
            stack.enter_context(enable_prefix_caching(model, num_blocks=64))
        stack.enter_context(_mlp(model).register_forward_hook(COUNTING[name]()))
        if not is_new:
            stack.enter_context(enable_prefix_caching(model, num_blocks=64))
        got = [model.generate(input_ids=ids, **options).logits for _ in range(2)]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("hooks", [1, 2])
def test_a_hook_of_accelerate_sees_the_passes_of_calls_alone(model: Any, hooks: int) -> None:
    ids, options = prompt(40), {"max_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}
    usual = model.generate(ids, **options).logits
    with warnings.catch_warnings(record=True), enable_prefix_caching(model, num_blocks=64):
        third = Third(0)
        _hook_with_accelerate(_mlp(model), *[third, OfAccelerate(1.0)][:hooks])
        got = model.generate(ids, **options).logits
    assert third.count == 6
    torch.testing.assert_close(got[:2], usual[:2])
    assert not torch.allclose(got[2], usual[2])


def _once(model: Any, factor: float | None) -> Any:
    """Register a hook that removes itself in its first pass. With a factor it also changes the output."""

    def hook(module: Any, inputs: Any, output: Any, **_: Any) -> Any:
        handle.remove()
        shapes.append(tuple(output.shape))
        return None if factor is None else output * factor

    shapes: list[Any] = []
    handle = _mlp(model).register_forward_hook(hook)
    return shapes


def _adding(model: Any, _: Any) -> Any:
    """Register a hook that registers another one in its first pass."""
    handles: list[Any] = []

    def hook(module: Any, inputs: Any, output: Any) -> None:
        if not handles:
            handles.append(model.model.layers[1].mlp.register_forward_hook(lambda *given: given[2] * 3))

    return _mlp(model).register_forward_hook(hook)


@pytest.mark.parametrize(
    ("put", "value"), [(_once, None), (_once, 3.0), (_adding, None)], ids=["looks once", "acts once", "adds another"]
)
def test_hooks_that_change_hooks_act_in_calls_alone(model: Any, put: Callable[[Any, Any], Any], value: Any) -> None:
    """The test of a model used up a hook that removes itself, and left the hooks there that hooks add."""
    ids, options = prompt(40), {"max_new_tokens": 4, "return_dict_in_generate": True, "output_logits": True}
    other = copy.deepcopy(model)
    want_seen, want = put(other, value), [other.generate(ids, **options).logits for _ in range(2)]
    seen = put(model, value)
    tables = [list(m._forward_hooks) for m in model.modules()]
    with warnings.catch_warnings(record=True), enable_prefix_caching(model, num_blocks=64):
        assert [list(m._forward_hooks) for m in model.modules()] == tables
        got = [model.generate(ids, **options).logits for _ in range(2)]
    torch.testing.assert_close(got, want)
    if put is _once:
        assert seen == want_seen == [(1, 40, 64)]


class Prepared(torch.nn.Module):
    """A module that prepares itself in its first pass, as some quantized layers do."""

    def __init__(self, inner: Any, **attributes: Any) -> None:
        super().__init__()
        self.inner, self.ready, self.done = inner, False, True
        vars(self).update(attributes)

    def forward(self, x: Any) -> Any:
        if not self.ready:
            self.ready, self.factor = self.done, 1.5
            vars(self).setdefault("factors", []).append(1.5)
            self.inner.steering.value = 1.5
        return self.inner(x) * self.factor * self.factors[0] * self.inner.steering.value


@pytest.mark.parametrize(
    "attributes",
    [{}, {"factor": 0.0}, {"factors": []}, {"ready": None, "done": SimpleNamespace(), "factor": 0.0}],
    ids=["new", "number", "list", "number without a flag"],
)
def test_a_module_that_prepares_itself_stays_prepared(model: Any, attributes: dict[str, Any]) -> None:
    inner, ids = _mlp(model), prompt(40)
    inner.steering = Steering(0.0)
    model.model.layers[0].mlp = Prepared(inner)
    want = plain(model, input_ids=ids, max_new_tokens=4)
    inner.steering = Steering(0.0)
    model.model.layers[0].mlp = Prepared(inner, **copy.deepcopy(attributes))
    _mlp(model).register_forward_hook(lambda *_: None)
    with enable_prefix_caching(model, num_blocks=64) as handle:
        for cached in (0, 32):
            assert torch.equal(model.generate(ids, max_new_tokens=4), want)
            assert handle.last_requests[0].cached_tokens == cached


def test_hooks_count_in_a_module_that_prepares_itself(model: Any) -> None:
    inner, ids = _mlp(model), prompt(40)
    options = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}

    def prepare() -> None:
        inner.steering = Steering(0.0)
        model.model.layers[0].mlp = Prepared(inner, count=0, seen=[], factor=0.0)
        _mlp(model).register_forward_hook(_in_module)

    prepare()
    want = plain(model, input_ids=ids, **options).logits
    prepare()
    with warnings.catch_warnings(record=True), enable_prefix_caching(model, num_blocks=64):
        torch.testing.assert_close(model.generate(ids, **options).logits, want)


@pytest.mark.parametrize("part", [slice(40, None), slice(40, 50)])
def test_a_hook_that_looks_at_positions_of_a_long_pass_is_not_served(model: Any, part: slice) -> None:
    """Libraries for steering vectors have such options. The first test of a model is shorter than its prompts."""

    def add(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[:, part] += 3
        return output

    ids, options = prompt(100), {"max_new_tokens": 2, "return_dict_in_generate": True, "output_logits": True}
    _mlp(model).register_forward_hook(add)
    want = [model.generate(ids[:, :end], **options).logits for end in (30, 52, 100)]
    with enable_prefix_caching(model, num_blocks=64) as handle, warnings.catch_warnings(record=True):
        got = [model.generate(ids[:, :end], **options).logits for end in (30, 52, 100)]
        torch.testing.assert_close(got, want)
        (reason,) = handle.stats().calls_handed_back
        assert "computes other values" in reason


STEPS: dict[str, Callable[[int, int], bool]] = {
    "one token": lambda tokens, first: tokens == 1,
    "several tokens": lambda tokens, first: tokens > 1,
    "few tokens": lambda tokens, first: tokens < 10,
    "many tokens": lambda tokens, first: tokens > 30,
    "late tokens": lambda tokens, first: first > 41,
}


def _wrapped(module: Any, add: Any) -> None:
    """Give a module a forward of its own, as `functools.wraps` makes it, in place of a hook."""
    forward = module.forward

    @functools.wraps(forward)
    def own(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = add(module, args, kwargs)
        return forward(*args, **kwargs)

    module.forward = own


def _as_class(module: Any, add: Any) -> None:
    """Give a module a class of its own."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = add(self, args, kwargs)
        return kind.forward(self, *args, **kwargs)

    kind = type(module)
    module.__class__ = type("Own", (kind,), {"forward": forward})


def _by_accelerate(module: Any, add: Any) -> None:
    """Give a module a hook through accelerate, in place of one of torch."""
    hook = OfAccelerate(1.0)
    hook.pre_forward = lambda module, *args, **kwargs: add(module, args, kwargs)  # type: ignore[method-assign]
    _hook_with_accelerate(module, hook)


@pytest.mark.parametrize(
    "put",
    [lambda module, add: module.register_forward_pre_hook(add, with_kwargs=True), _wrapped, _as_class, _by_accelerate],
    ids=["hook", "forward", "class", "accelerate"],
)
@pytest.mark.parametrize("acts", STEPS.values(), ids=STEPS.keys())
def test_a_hook_that_looks_at_the_size_or_place_of_a_pass_is_not_served(
    model: Any, acts: Callable[[int, int], bool], put: Callable[[Any, Any], None]
) -> None:
    """Steering of generated tokens alone is often a hook on passes of one token. A hit leaves other passes."""

    def add(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        hidden, *others = args
        factor = 3 if acts(hidden.shape[1], int(kwargs["position_ids"][0, 0])) else 1
        return (hidden * factor, *others), kwargs

    options = {"max_new_tokens": 2, "return_dict_in_generate": True, "output_logits": True}
    put(model.model.layers[0], add)
    calls = [prompt(length) for length in (40, 40, 60, 60, 20, 20)]
    want = [model.generate(ids, **options).logits for ids in calls]
    with warnings.catch_warnings(record=True), enable_prefix_caching(model, num_blocks=64) as handle:
        got = [model.generate(ids, **options).logits for ids in calls]
        torch.testing.assert_close(got, want)
        (reason,) = handle.stats().calls_handed_back
        assert "computes other values" in reason


def test_a_hook_that_treats_all_tokens_alike_is_served_at_any_length(model: Any) -> None:
    with enable_prefix_caching(model, num_blocks=256) as handle:
        _mlp(model).register_forward_hook(lambda module, inputs, output: output * 1.5)
        most = model.config.max_position_embeddings
        for length in (20, 40, 200, most - 4):
            assert_same(model, input_ids=prompt(length), max_new_tokens=4, times=2)
            assert handle.last_requests[0].cached_tokens == (length - 1) // 16 * 16
    model.config.eos_token_id = [*range(20)]
    assert len(harmless_tokens(model, 10_000)) == 10_000  # of a longer test, in which each token comes again


def test_a_model_that_nnsight_wraps_runs_no_passes_of_ours(model: Any) -> None:
    """nnsight puts an object of this name into each module, and runs a user's code at the passes of one call."""
    passes: list[bool] = []
    vars(_mlp(model))["__nnsight__"] = SimpleNamespace()
    _mlp(model).register_forward_hook(lambda *_: passes.append(True))
    with pytest.warns(UserWarning, match="nnsight counts its forward passes"):
        enable_prefix_caching(model, num_blocks=64)
    assert not passes
    assert_same(model, input_ids=prompt(40), max_new_tokens=4)


def test_the_clock_of_a_progress_bar_is_no_change(model: Any) -> None:
    """tqdm's class has a monitor, which notes the time every few seconds."""

    def hook(module: Any, inputs: Any, output: Any) -> None:
        list(tqdm([output], disable=True))

    model.model.layers[0].register_forward_hook(hook)
    tqdm.monitor = SimpleNamespace(woken=0.0, exit=lambda: None)
    try:
        identity = Identity(model)
        before = identity.fingerprint(model)
        tqdm.monitor.woken = 1.0
        assert not identity.changed(model)
        assert Identity(model).fingerprint(model) == before
    finally:
        tqdm.monitor = None


def test_a_value_that_changes_before_each_call_is_named(model: Any) -> None:
    hook = Steering(1.5)
    _mlp(model).register_forward_hook(hook)
    name = "model.layers.0.mlp._forward_hooks.0, Steering.value"
    with enable_prefix_caching(model, num_blocks=64) as handle, warnings.catch_warnings(record=True) as told:
        for number in range(4):
            hook.value = 1.5 + number
            assert_same(model, input_ids=prompt(40), max_new_tokens=4)
        assert f"because {name} changed" in str(told[-1].message)
        assert handle.explain(prompt(41, 1)).there == name


def test_a_look_at_models_without_hooks_takes_no_time_and_at_others_little(model: Any) -> None:
    def count(identity: Identity) -> int:
        found, calls = calls_within(lambda: differing(identity._held, identity._read_held()))
        assert not found
        return len(calls)

    assert count(Identity(model)) < 4
    hook = Steering(1.5)
    hook.seen = [1.5] * 100_000
    _mlp(model).register_forward_hook(hook)
    assert 4 < count(Identity(model)) < 500


def test_what_a_hook_held_is_not_kept_in_memory() -> None:
    model, hook = LLAMA.build(), Steering(torch.ones(64))
    _mlp(model).register_forward_hook(hook)
    value, known = weakref.ref(hook.value), weakref.ref(model)
    handle = enable_prefix_caching(model, num_blocks=64)
    hook.value = 2.0
    gc.collect()
    assert value() is None
    del model
    gc.collect()
    assert known() is None
    assert handle.manager is None


class Odd:
    """An object that fails at whatever is done to it."""

    def _fail(self, *_: Any) -> Any:
        raise RuntimeError("odd")

    __getattr__ = __repr__ = __str__ = __eq__ = __hash__ = __bool__ = __len__ = __iter__ = _fail


def test_odd_objects_break_no_call(model: Any) -> None:
    hook = Steering(1.5)
    hook.seen = [Odd(), {1: Odd()}, {prompt, 3}, np.array([None, 1]), torch.ones(0), torch.ones(2).to_sparse(), hook]
    hook.seen.append(hook.seen)
    hook.last = {prompt: 1, Steering: 2, hook: 3}
    _mlp(model).register_forward_hook(hook)
    with enable_prefix_caching(model, num_blocks=64, fallback="raise") as handle:
        assert_same(model, input_ids=prompt(40), max_new_tokens=4, times=2)
        assert handle.last_requests[0].cached_tokens == 32
