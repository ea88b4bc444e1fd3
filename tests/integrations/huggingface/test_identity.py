"""The identity of a model, which decides whether cached KV is valid: every change is noticed, at little cost."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from calls import calls_within
from generate_cases import SMALL, build_model, cached, cached_each

from pc.integrations.huggingface import PrefixCaching, enable_prefix_caching
from pc.integrations.huggingface.functions import Functions
from pc.integrations.huggingface.identity import Identity, set_by_forward


class Halved(transformers.models.llama.modeling_llama.LlamaMLP):  # type: ignore[misc, name-defined]
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * 0.5


class Other(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """The model's class as `torch.distributed.fsdp.fully_shard` replaces it: a subclass."""


def _layer(model: Any) -> Any:
    return model.model.layers[0]


class Adapted(torch.nn.Module):
    """A linear layer with two adapters, and the attributes that name the active adapter in PEFT's layers."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.deltas = {name: torch.randn_like(base.weight) for name in "ab"}
        self.active_adapters, self.disable_adapters, self.scaling = ["a"], False, {"a": 1.0, "b": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        if not self.disable_adapters:
            for name in self.active_adapters:
                y = y + self.scaling[name] * torch.nn.functional.linear(x, self.deltas[name])
        return y


def _adapt(model: Any) -> None:
    _layer(model).self_attn.k_proj = Adapted(_layer(model).self_attn.k_proj)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "buffer in place": lambda m: m.model.rotary_emb.inv_freq.mul_(0.9),
    "buffer through data": lambda m: m.model.rotary_emb.inv_freq.data.mul_(0.9),
    "buffer added": lambda m: _layer(m).mlp.register_buffer("more", torch.ones(1)),
    "setting added": lambda m: setattr(_layer(m), "other", 1),
    "setting of a module": lambda m: setattr(_layer(m).self_attn, "scaling", 0.7),
    "setting equal to another": lambda m: setattr(_layer(m).input_layernorm, "variance_epsilon", float("1e-6") * 1),
    "epsilon": lambda m: setattr(_layer(m).input_layernorm, "variance_epsilon", 1.0),
    "class": lambda m: setattr(_layer(m).mlp, "__class__", Halved),
    "class of the model": lambda m: setattr(m, "__class__", Other),
    "module replaced": lambda m: setattr(_layer(m).mlp, "act_fn", torch.nn.ReLU()),
    "layers swapped": lambda m: m.model.layers.insert(0, m.model.layers.pop(1)),
    "layer dropped": lambda m: m.model.layers.pop(1),
    "hook": lambda m: _layer(m).register_forward_hook(lambda *a: None),
    "hook with keywords": lambda m: _layer(m).self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"hidden_states": kwargs["hidden_states"].flip(-1)}),
        with_kwargs=True,
    ),
    "forward": lambda m: setattr(_layer(m).mlp, "forward", lambda x: x),
    "config": lambda m: setattr(m.config, "rms_norm_eps", 0.1),
    "within the config": lambda m: m.config.rope_parameters.update(rope_theta=3.0),
    "weight through data": lambda m: _layer(m).self_attn.k_proj.weight.data.neg_(),
    "weight in place": lambda m: _layer(m).self_attn.k_proj.weight.detach().add_(0.3),
    "weight replaced": lambda m: setattr(_layer(m).mlp.up_proj.weight, "data", torch.zeros(96, 64)),
    "adapter": _adapt,
    "one submodule in training": lambda m: _layer(m).mlp.train(),
    "entry moved to the next list": lambda m: _layer(m).mlp.after.insert(0, _layer(m).mlp.before.pop()),
}


@pytest.mark.quick
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_keys_and_values_from_before_a_change_are_not_read(
    model: Any, handle: PrefixCaching, change: Callable[[Any], Any]
) -> None:
    _layer(model).mlp.before, _layer(model).mlp.after = [1.0, 2.0], [3.0]
    assert cached_each(model, handle) == [0, 39]
    with torch.no_grad():
        change(model)
    assert cached_each(model, handle) == [0, 39]


def _halved(module: Any) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: tuple(part * 0.5 for part in forward(*args, **kwargs))


ROTARY: dict[str, Callable[[Any], Any]] = {
    "hook": lambda m: m.register_forward_hook(lambda module, args, out: (out[0] * 0.5, out[1])),
    "forward": _halved,
    "setting": lambda m: setattr(m, "attention_scaling", 0.5),
}


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("change", ROTARY.values(), ids=ROTARY.keys())
def test_changes_of_a_rotary_embedding_that_changes_itself(kind: str, change: Callable[[Any], Any]) -> None:
    """Only its frequencies change with the length of the input."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 128}
    model = build_model("LlamaConfig", "LlamaForCausalLM", rope_parameters=rope)
    with enable_prefix_caching(model, num_blocks=64) as handle:
        assert cached_each(model, handle) == [0, 39]
        change(model.model.rotary_emb)
        assert cached_each(model, handle) == [0, 39]


class CountingTwice(transformers.models.llama.modeling_llama.LlamaMLP):  # type: ignore[misc, name-defined]
    def forward(self, x: torch.Tensor) -> Any:
        for _ in range(2):
            self.counts[0] += 1.0
        return super().forward(x)


class Observed(transformers.models.llama.modeling_llama.LlamaMLP):  # type: ignore[misc, name-defined]
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        self.scale = float(y.abs().max())
        return y


class Steered(transformers.models.llama.modeling_llama.LlamaMLP):  # type: ignore[misc, name-defined]
    scale = 1.0

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * self.scale


def test_an_attribute_is_compared_if_only_passes_of_another_class_change_its_name(
    model: Any, handle: PrefixCaching
) -> None:
    steered, observed = (layer.mlp for layer in model.model.layers)
    steered.__class__, observed.__class__ = Steered, Observed
    steered.scale = observed.scale = 1.0
    assert cached_each(model, handle) == [0, 39]
    steered.scale = 3.0
    assert cached_each(model, handle) == [0, 39]


def test_a_count_in_a_list_is_no_change(model: Any, handle: PrefixCaching) -> None:
    """Python often gives each second number the address of the one before the last."""
    mlp = _layer(model).mlp
    mlp.__class__, mlp.counts = CountingTwice, [float(id(mlp))]
    assert cached_each(model, handle) == [0, 39]


def test_adapters_have_blocks_of_their_own(model: Any, handle: PrefixCaching) -> None:
    _adapt(model)
    layer = _layer(model).self_attn.k_proj
    assert cached(model, handle) == 0
    before = dict(vars(layer))
    for change in ({"active_adapters": ["b"]}, {"disable_adapters": True}, {"scaling": {"a": 3.0, "b": 1.0}}):
        vars(layer).update(change)
        assert cached(model, handle) == 0, change
        vars(layer).update(before)
    assert cached(model, handle) == 39, "the first adapter's are still there"


PLAIN: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attribute": (lambda m: setattr(m, "plain", torch.ones(64)), lambda m: m.plain),
    "in a dict": (lambda m: setattr(m, "plain", {"of": [torch.ones(64)]}), lambda m: m.plain["of"][0]),
    "in a tuple": (lambda m: setattr(m, "plain", (torch.ones(64),)), lambda m: m.plain[0]),
}


def test_changes_within_a_compiled_module_are_noticed(model: Any) -> None:
    """torch.compile wraps a module into one that has no mode of its own."""
    with torch.no_grad():
        model.model = torch.compile(model.model, backend="eager")
        for change in (lambda m: m.norm.weight.mul_(2), lambda m: m.layers[0].train(), lambda m: setattr(m, "x", 1)):
            identity = Identity(model)
            assert not identity.changed(model)
            change(model.model)
            assert identity.changed(model)


@pytest.mark.parametrize("write", [lambda t: t.mul_(2), lambda t: t.data.mul_(2)], ids=["in place", "through data"])
@pytest.mark.parametrize(("put", "get"), PLAIN.values(), ids=PLAIN.keys())
def test_tensors_that_are_no_buffers(model: Any, put: Any, get: Any, write: Callable[[torch.Tensor], Any]) -> None:
    """A patched forward may add such a steering vector. A forward pass may also count in one, which is no change."""
    mlp = _layer(model).mlp
    put(mlp)
    mlp.count = torch.zeros(())
    mlp.register_forward_hook(lambda module, *_: module.count.add_(1).zero_())
    with set_by_forward(model, Functions(model)) as transient:
        model(torch.arange(8)[None])
    identity = Identity(model, transient)
    model(torch.arange(8)[None])
    assert not identity.changed(model)
    write(get(mlp))
    assert identity.changed(model)


State = type("MatmulLtState", (SimpleNamespace,), {"__module__": "bitsandbytes.autograd._functions"})


class Int8Weight(torch.nn.Parameter):
    """A weight as bitsandbytes quantizes it: the scales are attributes of the weight."""

    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor) -> Int8Weight:
        made = torch.Tensor._make_subclass(cls, codes, False)
        made.scales, made.state = scales, SimpleNamespace(scales=scales.clone())  # type: ignore[attr-defined]
        return made  # type: ignore[return-value]


QUANTIZED: dict[str, Callable[[Any], torch.Tensor]] = {
    "codes": lambda layer: layer.weight.data,
    "scales": lambda layer: layer.weight.scales.data,
    "scales of an attribute": lambda layer: layer.weight.state.scales.data,
    "scales of the layer": lambda layer: layer.state.SCB.data,
}


@pytest.mark.parametrize("part", QUANTIZED.values(), ids=QUANTIZED.keys())
def test_weights_of_a_subclass(model: Any, part: Callable[[Any], torch.Tensor]) -> None:
    layer = _layer(model).mlp.up_proj
    layer.weight, layer.state = Int8Weight(torch.ones(96, 64, dtype=torch.int8), torch.ones(96)), State()
    layer.state.SCB = torch.ones(96)
    identity = Identity(model)
    before = identity.fingerprint(model)
    assert not identity.changed(model)
    part(layer).mul_(2)
    assert identity.changed(model)
    assert identity.fingerprint(model) != before


def test_memory_that_a_weight_of_torch_has_freed_is_not_read(model: Any) -> None:
    """FSDP's FlatParameter keeps the gathered weight as an attribute, and frees its memory after a pass."""
    kind = type("FlatParameter", (torch.nn.Parameter,), {"__module__": "torch.distributed.fsdp._flat_param"})
    weight, gathered = torch.Tensor._make_subclass(kind, torch.ones(96, 64)), torch.ones(1 << 20)
    weight._full_param_padded = gathered  # type: ignore[attr-defined]
    _layer(model).mlp.up_proj.weight = weight
    gathered.untyped_storage().resize_(0)
    identity = Identity(model)
    assert not identity.changed(model)
    assert not any("_full_param_padded" in name for name in identity._tensors)


@dataclass
class Kind:
    """A setting of a layer, as optimum-quanto's `qtype` is."""

    name: str


Kind.__module__ = "optimum.quanto"


class Scaled(torch.Tensor):
    """A tensor subclass as torchao's: it wraps a tensor and holds settings of the layer."""

    inner: torch.Tensor
    kind: Any

    @staticmethod
    def __new__(cls, inner: torch.Tensor, kind: Any) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: torch.Tensor, kind: Any) -> None:
        self.inner, self.kind = inner, kind

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], {"kind": self.kind}

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(args[0].inner, args[0].kind) if "detach" in str(func) else NotImplemented


def _packed(value: float) -> Any:
    return torch.ops.quantized.linear_prepack_fp16(torch.full((96, 64), value), None)


SETTINGS: dict[str, Callable[[int], Any]] = {
    "of a tensor subclass": lambda n: Scaled(torch.ones(2), n),
    "of a tensor subclass, in a dataclass": lambda n: Scaled(torch.ones(2), Kind(f"int{n}")),
    "dataclass": lambda n: Kind(f"int{n}"),
    "enumeration": lambda n: list(inspect._ParameterKind)[n],
    "packed weights": lambda n: _packed(float(n)),
    "quantized": lambda n: torch.quantize_per_tensor(torch.full((4,), 3.0), float(n), 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
@pytest.mark.parametrize("make", SETTINGS.values(), ids=SETTINGS.keys())
def test_settings_of_quantized_layers_are_in_the_fingerprint(model: Any, make: Callable[[int], Any]) -> None:
    found = []
    for number in (1, 2, 1):
        _layer(model).mlp.up_proj.setting = make(number)
        identity = Identity(model)
        assert not identity.changed(model)
        found.append(identity.fingerprint(model))
    assert found[0] == found[2] != found[1]


def test_host_weights_are_compared_during_a_call_beside_weights_on_a_device(model: Any) -> None:
    identity = Identity(model)
    identity._samples._other.append([SimpleNamespace(device=torch.device("cuda"))])  # type: ignore[list-item]
    identity._content.append(b"of the device")
    unchanged = identity.watch(model)
    assert unchanged()
    _layer(model).mlp.up_proj.weight.data.neg_()
    assert not unchanged()


@pytest.mark.parametrize("compiles", [False, True])
def test_a_static_cache_of_transformers_changes_nothing(model: Any, compiles: bool) -> None:
    """On a GPU, generate compiles with such a cache. What it keeps in the model for later once emptied our cache."""
    identity = Identity(model)
    given = {"cache_implementation": "static", "do_sample": False, "max_new_tokens": 4}
    if compiles:
        given["compile_config"] = transformers.CompileConfig(backend="eager", mode=None)
        given["compile_config"]._compile_all_devices = True
    for _ in range(2):  # 304 tokens: the length that it keeps is another object each time
        type(model).generate(model, torch.ones(1, 300, dtype=torch.long), **given)
        assert hasattr(model, "_compiled_call") == compiles
        assert not identity.changed(model)


def test_looking_at_many_layers_takes_little() -> None:
    """A look before each call reads thousands of attributes, so it must not call Python for each module."""
    config = transformers.LlamaConfig(**SMALL | {"num_hidden_layers": 48, "hidden_size": 16, "intermediate_size": 16})
    model = transformers.LlamaForCausalLM(config).eval()
    identity = Identity(model)
    changed, calls = calls_within(lambda: identity.changed(model))
    assert not changed
    assert 0 < len(calls) < len(list(model.modules())) / 2
