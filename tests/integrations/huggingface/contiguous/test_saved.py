"""Blocks saved to a file: another process with the same model finds them, and any other model raises."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from generate_cases import FAMILIES, LLAMA, Family, assert_same, cached, prompt

from pc.integrations.huggingface import enable_prefix_caching
from pc.integrations.huggingface.store import tiers
from pc.integrations.huggingface.store.tiers import pack


def save(model: Any, path: Path, *prompts: torch.Tensor) -> None:
    """Save the blocks of some prompts."""
    with enable_prefix_caching(model, num_blocks=64) as handle:
        for ids in prompts or (prompt(64),):
            assert_same(model, input_ids=ids)
        handle.save(path)


def load(model: Any, path: Path, **options: Any) -> int:
    """Load a file, and return the number of blocks."""
    with enable_prefix_caching(model, num_blocks=64, **options) as handle:
        return handle.load(path)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(LLAMA.build(), tmp_path / "blocks")
    return tmp_path / "blocks"


def _other_weights(model: Any) -> Any:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-3
    return model


OTHERS = {
    "weights": (lambda: _other_weights(LLAMA.build()), {}, "another model"),
    "class": (lambda: next(f for f in FAMILIES if f.name == "qwen2").build(), {}, "another model"),
    "dtype": (lambda: LLAMA.build().to(torch.bfloat16), {}, "another model"),
    "block size": (LLAMA.build, {"block_size": 8}, "another block_size"),
}


@pytest.mark.parametrize(("build", "options", "text"), OTHERS.values(), ids=OTHERS.keys())
def test_kv_of_another_is_refused(saved: Path, build: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        load(build(), saved, **options)


def test_blocks_that_another_call_evicts_meanwhile_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory then holds other text, which was once written under the old hash."""
    model = LLAMA.build()
    packed: list[bytes] = []

    def pack_while_others_generate(*args: Any) -> bytes:
        if not packed:
            model.generate(input_ids=prompt(100, 1), max_new_tokens=4)
        packed.append(pack(*args))
        return packed[-1]

    monkeypatch.setattr(tiers, "pack", pack_while_others_generate)
    with enable_prefix_caching(model, num_blocks=8) as handle:
        assert_same(model, input_ids=prompt(64))
        assert handle.save(tmp_path / "blocks") == len(packed) < 4
    with enable_prefix_caching(model, num_blocks=64) as handle:
        assert handle.load(tmp_path / "blocks") == len(packed)
        assert_same(model, input_ids=prompt(64))


def test_files_of_another_kind(saved: Path, tmp_path: Path) -> None:
    assert saved.stat().st_mode & 0o077 == 0
    (tmp_path / "text").write_text("nothing")
    (tmp_path / "cut").write_bytes(saved.read_bytes()[:2000])
    torch.save({"format": 2}, tmp_path / "newer")
    model = LLAMA.build()
    with enable_prefix_caching(model, num_blocks=64) as handle:
        for name in ("text", "cut", "newer"):
            with pytest.raises(ValueError, match="path: got"):
                handle.load(tmp_path / name)
        with pytest.raises(OSError, match="absent"):
            handle.load(tmp_path / "absent")
        with pytest.raises(OSError, match="absent"):
            handle.save(tmp_path / "absent" / "file")
    with pytest.raises(ValueError, match="cannot be served, caching is disabled"):
        handle.save(tmp_path / "late")


VECTORS: dict[str, Any] = {}  # read by the hook and the forward pass of two cases


class Slots:
    __slots__ = ("vector",)


class Steering:
    def __init__(self, vector: torch.Tensor) -> None:
        self.vector = vector

    def __call__(self, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + self.vector


def _held(name: str, hold: Callable[[torch.Tensor], Any], get: Callable[[Any], Any]) -> Callable[..., None]:
    """Return a function that keeps a vector in an attribute of a module, from where a hook adds it to the output."""

    def put(module: Any, vector: torch.Tensor) -> None:
        setattr(module, name, hold(vector))
        module.register_forward_hook(lambda module, inputs, output: output + get(getattr(module, name)))

    return put


def _slots(vector: torch.Tensor) -> Slots:
    held = Slots()
    held.vector = vector
    return held


def _outside(vector: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_buffer("vector", vector)
    return module


def _add_global(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output + VECTORS["of the hook"]


def _by_global(module: Any, vector: torch.Tensor) -> None:
    VECTORS["of the hook"] = vector
    module.register_forward_hook(_add_global)


def _by_many_functions(module: Any, vector: torch.Tensor) -> None:
    """Add a vector by a function that calls another, and so on, more than Python's recursion goes."""
    lines = [f"def add{n}(output): return add{n + 1}(output)" for n in range(1000)]
    space = {"__name__": "steering", "vector": vector}
    exec("\n".join([*lines, "def add1000(output): return output + vector"]), space)
    add: Any = space["add700"]
    module.register_forward_hook(lambda module, inputs, output: add(output))


def _patched(module: Any, vector: torch.Tensor) -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        return type(self).forward(self, x) + VECTORS["of the forward"]

    VECTORS["of the forward"] = vector
    module.forward = types.MethodType(forward, module)


STEERED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "attribute": _held("vector", lambda v: v, lambda v: v),
    "name with an underscore": _held("_vector", lambda v: v, lambda v: v),
    "in a tuple in a dict": _held("plain", lambda v: {"of": (v,)}, lambda held: held["of"][0]),
    "number in a dict": _held("plain", lambda v: {"scale": float(v[0])}, lambda held: held["scale"]),
    "slice": _held("cut", lambda v: slice(0, int(60 * v[0])), lambda held: (torch.arange(64) < held.stop).float()),
    "array": _held("vector", lambda v: v.numpy(), torch.from_numpy),
    "arrays in a list": _held("vector", lambda v: [v.numpy()], lambda held: torch.from_numpy(held[0])),
    "sparse": _held("vector", lambda v: v.to_sparse(), lambda v: v.to_dense()),
    "object": _held("_steering", Steering, lambda held: held.vector),
    "slots": _held("steering", _slots, lambda held: held.vector),
    "namespace": _held("steering", lambda v: types.SimpleNamespace(vector=v), lambda held: held.vector),
    "module in a list": _held("helpers", lambda v: [_outside(v)], lambda held: held[0].vector),
    "hook object": lambda module, vector: module.register_forward_hook(Steering(vector)),
    "method as hook": lambda module, vector: module.register_forward_hook(Steering(vector).__call__),
    "partial hook": lambda module, vector: module.register_forward_hook(
        functools.partial(lambda added, module, inputs, output: output + added, vector)
    ),
    "hook that reads a global": _by_global,
    "function behind many others": _by_many_functions,
    "forward that reads a global": _patched,
}


def steered(place: str, scale: float) -> Any:
    model = LLAMA.build()
    STEERED[place](model.model.layers[0].mlp, torch.full((64,), scale))
    return model


@pytest.mark.parametrize("place", STEERED)
def test_a_vector_that_is_no_parameter_is_part_of_the_model(place: str, tmp_path: Path) -> None:
    """Another process may steer with another vector, and must not read the KV of the first."""
    with enable_prefix_caching(model := steered(place, 0.5), num_blocks=64, disk=tmp_path) as handle:
        assert_same(model, input_ids=prompt(64))
        handle.save(tmp_path / "blocks")
    for scale, hit in ((0.5, 63), (0.7, 0)):
        with enable_prefix_caching(model := steered(place, scale), num_blocks=64, disk=tmp_path) as handle:
            if hit:
                handle.load(tmp_path / "blocks")
            else:
                with pytest.raises(ValueError, match="another model"):
                    handle.load(tmp_path / "blocks")
            assert cached(model, handle, prompt(64)) == hit


def test_what_forward_passes_count_is_no_part_of_the_model(tmp_path: Path) -> None:
    def counting() -> Any:
        def count(module: Any, *_: Any) -> None:
            module.calls = getattr(module, "calls", 0) + 1
            module.seen["passes"] = module.calls
            module.total.add_(1)

        model = LLAMA.build()
        model.model.layers[0].seen, model.model.layers[0].total = {}, torch.zeros(())
        model.model.layers[0].register_forward_hook(count)
        return model

    save(counting(), tmp_path / "blocks")
    assert load(counting(), tmp_path / "blocks") > 0


def test_addresses_in_the_hooks_of_accelerate_are_no_part_of_the_model(tmp_path: Path) -> None:
    """accelerate keeps such a hook in each module of a model with a device map."""
    hook = type("AlignDevicesHook", (), {"__module__": "accelerate.hooks"})

    def placed(kind: type) -> Any:
        model = LLAMA.build()
        for module in model.modules():
            module._hf_hook = kind()
            module._hf_hook.tied_params_map = {parameter.data_ptr(): {} for parameter in model.parameters()}
        return model

    save(placed(hook), tmp_path / "blocks")
    assert load(placed(hook), tmp_path / "blocks") > 0
    with pytest.raises(ValueError, match="another model"):
        load(placed(type("Own", (), {})), tmp_path / "blocks")


def test_frequencies_that_change_with_the_length_are_no_part_of_the_model(tmp_path: Path) -> None:
    """After a call beyond the switch, the rotary embedding of longrope holds other frequencies."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, "factor": 8.0}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0 + i for i in range(8)]}
    family = Family("llama", "LlamaConfig", "LlamaForCausalLM", {"rope_parameters": rope})
    save(family.build(), tmp_path / "blocks", prompt(40), prompt(90, 1))
    assert load(family.build(), tmp_path / "blocks") > 0


class Unreadable:
    """A vector whose attributes cannot be read."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            raise RuntimeError("on purpose")
        return super().__getattribute__(name)


def test_a_model_that_cannot_be_recognized_is_not_saved(tmp_path: Path) -> None:
    model = LLAMA.build()
    model.model.layers[1].helper = Unreadable()
    reason = "the attributes of model.layers.1 cannot be compared with those of another process"
    with pytest.raises(ValueError, match=reason):
        enable_prefix_caching(model, num_blocks=64, disk=tmp_path)
    with enable_prefix_caching(model, num_blocks=64) as handle:
        assert_same(model, input_ids=prompt(64))
        with pytest.raises(ValueError, match=reason):
            handle.save(tmp_path / "blocks")
