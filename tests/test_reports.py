"""Faults that public bug reports of other projects describe, translated to this library: one case for each report.

The comment above a case names the report or the kind of report that it comes from. A new report is added here first,
as a case that fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import operator
import os
import sys
import threading
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import batching_cases  # noqa: E402
import changed_models  # noqa: E402
from compression_cases import ASKED, CONTEXT, QUESTION, ask  # noqa: E402
from generate_cases import plain, prompt  # noqa: E402
from image_cases import CASES, IMAGE, VisionCase, text  # noqa: E402
from processes import python  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402

from pc.integrations import huggingface  # noqa: E402
from pc.integrations.huggingface import CompressedDocument, UnsupportedError  # noqa: E402
from pc.integrations.huggingface.api import CACHE_NAMES, OLDEST_BATCHING  # noqa: E402
from pc.integrations.huggingface.compression.presses import press_key  # noqa: E402
from pc.integrations.huggingface.compression.reading import check_compressible  # noqa: E402
from pc.integrations.tested import release  # noqa: E402

needs_batching = pytest.mark.skipif(
    release(transformers.__version__)[:2] < OLDEST_BATCHING, reason="older transformers are refused by name"
)


def enabled(model: Any, **options: Any) -> Any:
    return huggingface.enable_prefix_caching(model, **{"num_blocks": 64, **options})


@pytest.fixture
def model() -> Any:
    return changed_models.build()


@pytest.fixture
def handle(model: Any) -> Iterator[Any]:
    with enabled(model) as handle:
        yield handle


# transformers#30508 (layers dropped), ggml-org/llama.cpp#4718 (layers doubled), steering-vectors#21, IBM/vLLM-Hook#16,
# pytorch/executorch#22432: a model that is changed after caching was enabled.
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", changed_models.CHANGES)
@pytest.mark.filterwarnings("ignore:prefix caching")
def test_a_model_that_is_changed_is_probed_anew(name: str, deterministic: bool) -> None:
    make, change = changed_models.CHANGES[name]
    model = make()
    with enabled(model, deterministic=deterministic) as handle:
        model.generate(prompt(60), max_new_tokens=8)
        change(model)
        assert changed_models.differing(model) == []
        handle.manager is None or handle.manager.check()


# The same kind: a change that makes a model unserved, and one that makes it served again.
@pytest.mark.filterwarnings("ignore:prefix caching")
def test_a_model_is_served_again_once_what_hindered_it_is_gone(model: Any) -> None:
    hook = model.model.layers[0].register_forward_hook(changed_models.steer_last)
    with enabled(model) as handle:
        assert "continues from a cached prefix" in handle.unsupported
        hook.remove()
        assert changed_models.differing(model) == []
        assert handle.unsupported is None
        assert handle.last_requests[0].cached_tokens > 0


# PyTorch: torch.compile of a model, or a process's first compilation, changes attributes but no forward pass.
@pytest.mark.slow
def test_compiling_a_model_elsewhere_empties_no_cache() -> None:
    script = """
import torch, changed_models, pc.integrations.huggingface as hf
from generate_cases import prompt
model = changed_models.build()
handle = hf.enable_prefix_caching(model, num_blocks=64)
document, name = handle.compress(prompt(50)), handle._identity.fingerprint(model)
model.generate(prompt(60), max_new_tokens=2)
for _ in range(2):
    with torch.no_grad():
        torch.compile(model, backend="eager")(prompt(60))
    model.generate(prompt(60), max_new_tokens=2)
    assert handle.last_requests[0].cached_tokens == 48, handle.last_requests
assert handle._identity.fingerprint(model) == name
with document:
    model.generate(prompt(60), max_new_tokens=2)
"""
    paths = os.pathsep.join([str(Path(__file__).parent / "support"), *sys.path])
    python("-c", script, PYTHONPATH=paths)


# The same kind in continuous batching.
@needs_batching
@pytest.mark.parametrize("name", ["layer dropped", "other KV heads", "window narrowed", "window to none"])
def test_generate_batch_probes_a_changed_model_anew(name: str) -> None:
    make, change = changed_models.CHANGES[name]
    model, asked = make(), prompt(40).tolist()
    with huggingface.enable_continuous_batching(model, num_blocks=64):
        batching_cases.batched(model, asked, 6)
        change(model)
        want = batching_cases.alone(model, asked, 6)
        for _ in range(2):
            assert batching_cases.batched(model, asked, 6) == want


# transformers#34240: self-speculative decoding changes the number of layers temporarily, within a call.
@pytest.mark.parametrize(
    "options", [{}, {"deterministic": True, "chunk": 32}, {"num_blocks": 1}, {"reuse": "gap"}], ids=str
)
@pytest.mark.filterwarnings("ignore:prefix caching")
def test_early_exit(options: dict[str, Any]) -> None:
    model = changed_models.build(num_hidden_layers=4)
    asked: dict[str, Any] = {"input_ids": prompt(60), "max_new_tokens": 12, "assistant_early_exit": 2}
    want = plain(model, **asked)
    with enabled(model, **options) as handle:
        for _ in range(2):
            assert torch.equal(model.generate(**asked), want)
            assert model.config.num_hidden_layers == 4
        assert changed_models.differing(model) == []
        assert handle.stats().cached_blocks or options.get("num_blocks") == 1


class At(transformers.LogitsProcessor):  # type: ignore[misc]
    """A processor that runs functions before the fifth and the eighth token of a call."""

    def __init__(self, *work: Callable[[], Any]) -> None:
        self.work, self.calls = dict(zip((5, 8), work, strict=False)), 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.calls += 1
        self.work.get(self.calls, lambda: None)()
        return scores


def change_hook(model: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    hooks: list[Any] = []
    layer = model.model.layers[0]
    return lambda: hooks.append(layer.register_forward_hook(changed_models.steer)), lambda: hooks.pop().remove()


def change_setting(model: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    attention = model.model.layers[0].self_attn
    own, other = attention.scaling, attention.scaling * 2
    return lambda: setattr(attention, "scaling", other), lambda: setattr(attention, "scaling", own)


def change_weight(model: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    weight = model.model.layers[0].mlp.up_proj.weight
    return lambda: weight.data.mul_(2), lambda: weight.data.div_(2)


def change_class(model: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    kind = type(model.model.layers[0].mlp)
    own = kind.forward
    return lambda: setattr(kind, "forward", lambda self, x: own(self, x) * 3), lambda: setattr(kind, "forward", own)


def change_held_value(model: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    held = {"factor": 1.5}
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output * held["factor"])
    return lambda: held.update(factor=3.0), lambda: held.update(factor=1.5)


# NVIDIA/NeMo-RL#4018, radixark/miles#2783, peft#2523: a change during a call, which ends before the next call.
@pytest.mark.parametrize("back_within", [False, True])
@pytest.mark.parametrize("change", [change_hook, change_setting, change_weight, change_class, change_held_value])
def test_what_is_computed_by_a_model_changed_in_a_call_is_not_published(
    model: Any, handle: Any, change: Any, back_within: bool
) -> None:
    on, off = change(model)
    at = At(on, off) if back_within else At(on)
    asked: dict[str, Any] = {"max_new_tokens": 40, "output_hidden_states": True, "return_dict_in_generate": True}
    first = model.generate(prompt(40), logits_processor=[at], **asked).sequences
    if not back_within:
        off()
    assert handle.stats().cached_blocks <= 3  # the prompt's 40 tokens and 8 of the answer
    ids = torch.cat([first, prompt(4, 2)], 1)
    want = plain(model, input_ids=ids, max_new_tokens=8)
    for _ in range(2):
        assert torch.equal(model.generate(ids, max_new_tokens=8), want)


# The same kind in continuous batching, where another thread reads the stream of tokens.
@needs_batching
@pytest.mark.parametrize("change", [change_hook, change_setting, change_class])
def test_what_a_batching_session_computes_by_a_changed_model_is_not_published(change: Any) -> None:
    model = batching_cases.LLAMA.build()
    on, off = change(model)
    ids = prompt(40)[0].tolist()
    with huggingface.enable_continuous_batching(model, num_blocks=64):
        with model.continuous_batching_context_manager(generation_config=batching_cases.config(40)) as manager:
            manager.add_request(ids, streaming=True)
            changed = False
            while not (result := manager.get_result(timeout=30)).is_finished():
                if len(result.generated_tokens) > 4 and not changed:
                    on()
                    changed = True
        off()
        assert changed
        assert result.error is None
        asked = [[*ids, *result.generated_tokens, *prompt(4, 2)[0].tolist()]]
        assert batching_cases.batched(model, asked) == batching_cases.alone(model, asked)


# ModelTC (LongLM), MHA2MLA#10: methods of a class, or functions of its file, are replaced after keys were cached.
OWNERS: dict[str, tuple[Any, str]] = {
    "class": (modeling_llama.LlamaAttention, "forward"),
    "file": (modeling_llama, "rotate_half"),
    "torch": (torch.nn.functional, "scaled_dot_product_attention"),
    "registry": (transformers.AttentionInterface._global_mapping, "sdpa"),
    "linear": (torch.nn.functional, "linear"),
    "base": (torch.nn.Linear, "forward"),
}


def patch(monkeypatch: pytest.MonkeyPatch, name: str, factor: float) -> None:
    """Scale what a function returns, or replace the code of a method, as autoreload in a notebook does."""
    if name == "code":

        def forward(self: Any, x: Any) -> Any:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 0.5

        monkeypatch.setattr(modeling_llama.LlamaMLP.forward, "__code__", forward.__code__)
        return
    owner, attribute = OWNERS[name]
    own = owner[attribute] if isinstance(owner, dict) else getattr(owner, attribute)

    def scaled(*args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        return (out[0] * factor, *out[1:]) if isinstance(out, tuple) else out * factor

    (monkeypatch.setitem if isinstance(owner, dict) else monkeypatch.setattr)(owner, attribute, scaled)


@pytest.mark.quick
@pytest.mark.parametrize("name", [*OWNERS, "code"])
def test_replaced_functions_are_noticed(model: Any, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with enabled(model, disk=tmp_path):
        model.generate(prompt(60), max_new_tokens=12)
        patch(monkeypatch, name, 0.5)
        assert changed_models.differing(model) == []
    monkeypatch.undo()
    with enabled(model, disk=tmp_path / "other"):  # a new process: only the unpatched model's blocks are on disk
        model.generate(prompt(60), max_new_tokens=12)
    patch(monkeypatch, name, 0.5)
    with enabled(model, disk=tmp_path / "other") as handle:
        assert changed_models.differing(model) == []
    with enabled(model, disk=tmp_path / "other") as handle:  # its own blocks are found again
        model.generate(prompt(60), max_new_tokens=12)
        assert handle.last_requests[0].cached_tokens > 0


def test_a_patch_with_another_constant_is_another_model_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    model = changed_models.build()
    for factor in (0.5, 0.25):
        patch(monkeypatch, "class", factor)
        with enabled(model, disk=tmp_path):
            assert changed_models.differing(model) == []
        monkeypatch.undo()


# peft#2638, vllm#51198: each call empties the cache, without a message.
def test_a_cache_that_never_hits_says_why(model: Any) -> None:
    layer = model.model.layers[0].mlp

    def turn() -> None:  # between calls, so no forward pass shows it
        layer.act_fn = copy.deepcopy(layer.act_fn)

    with enabled(model) as handle, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            turn()
            model.generate(prompt(60), max_new_tokens=4)
            assert handle.last_requests[0].cached_tokens == 0
        turn()
        found = handle.explain(prompt(60))
        assert (found.reason, found.there) == ("changed", "model.layers.0.mlp.act_fn")
        assert "because model.layers.0.mlp.act_fn changed" in str(found)
    assert len([w for w in told if "nothing is read from the cache" in str(w.message)]) == 1
    assert "model.layers.0.mlp.act_fn" in str(told[0].message)


# The same kind: a hook that counts, registered later, is no reason to read nothing.
@pytest.mark.parametrize("where", ["attribute", "dict", "list"])
def test_a_hook_that_counts_is_served(model: Any, where: str) -> None:
    model.model.layers[0].counts, model.model.layers[0].seen_lengths = {"passes": 1000}, []

    def count(module: Any, inputs: Any, output: Any) -> None:
        if where == "attribute":
            module.seen = getattr(module, "seen", 1000) + 1
        elif where == "dict":
            module.counts["passes"] += 1
        else:
            module.seen_lengths.append(inputs[0].shape[1])

    with enabled(model) as handle:
        model.model.layers[0].register_forward_hook(count)
        for _ in range(2):
            model.generate(prompt(60), max_new_tokens=8)
        assert handle.last_requests[0].cached_tokens > 0
        assert changed_models.differing(model) == []


# The same kind: a buffer that each pass changes may matter, so nothing is read, and a warning says so.
def test_a_buffer_that_counts_passes_is_named(model: Any) -> None:
    layer = model.model.layers[0]
    layer.register_buffer("passes", torch.zeros(1))

    def count(module: Any, *_: Any) -> None:
        module.passes += 1

    layer.register_forward_hook(count)
    with enabled(model) as handle:
        with pytest.warns(UserWarning, match=r"because model\.layers\.0\.passes"):
            assert changed_models.differing(model) == []
        assert handle.last_requests[0].cached_tokens == 0
        assert handle.explain(prompt(60)).reason == "changed"


# The same kind: PEFT swaps parameters in each forward pass where LoRA targets them, which raises their versions.
def test_lora_of_expert_parameters_hits() -> None:
    model = changed_models.build("Mixtral", num_local_experts=4)
    layer = model.model.layers[0].mlp
    weight = next(p for p in layer.parameters() if p.dim() == 3).requires_grad_(False)

    def put_aside(*_: Any) -> None:
        weight.copy_(weight.clone())

    layer.register_forward_pre_hook(put_aside)
    with enabled(model) as handle:
        assert changed_models.differing(model) == []
        assert handle.last_requests[0].cached_tokens > 0
        weight[2, 5].mul_(1.5)  # one row of one expert: its version does not change, the sample does
        assert changed_models.differing(model) == []


# llama.cpp, kvpress and StreamingLLM reports: code evicts from the cache, only for long prompts, or while answering.
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("most", [50, 66], ids=["prompts", "answers"])
@pytest.mark.filterwarnings("ignore:prefix caching")
def test_a_hook_that_evicts_from_long_caches(most: int, deterministic: bool) -> None:
    def evict(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        cache = kwargs.get("past_key_values", kwargs.get("cache"))
        layer = cache.layers[module.layer_idx]
        if layer.keys.shape[2] > most:
            for side in ("keys", "values"):
                whole = getattr(layer, side)
                setattr(layer, side, torch.cat([whole[:, :, :4], whole[:, :, -30:]], 2))

    model = changed_models.build()
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(evict, with_kwargs=True)
    with enabled(model, deterministic=deterministic, chunk=16) as handle:
        model.generate(prompt(30, 1), max_new_tokens=4)
        assert changed_models.differing(model, max_new_tokens=20) == []
        assert handle.stats().held_blocks == 0
        assert any("removes tokens from its cache" in reason for reason in handle.stats().calls_handed_back)


# transformers: users keep `[(l.keys, l.values) ...]` of a returned cache as a snapshot, and continue with the cache.
@pytest.mark.parametrize("counted", [True, False])  # whether torch says how many hold a tensor's memory
@pytest.mark.parametrize("kept", ["returned", "by a hook"])
def test_tensors_of_a_cache_that_were_kept_stay_what_they_were(
    kept: str, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not counted:
        monkeypatch.setattr(huggingface.api, "_STORAGE_USERS", None)
    model = changed_models.build()
    seen: list[Any] = []

    def look(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        seen[:] = [kwargs.get("past_key_values", kwargs.get("cache"))]

    model.model.layers[-1].self_attn.register_forward_hook(look, with_kwargs=True)
    with enabled(model):
        result = model.generate(prompt(40), max_new_tokens=16, return_dict_in_generate=kept == "returned")
        cache = seen[0]
        snapshot = [side for layer in cache.layers for side in (layer.keys, layer.values)]
        copies = [side.clone() for side in snapshot]
        if kept == "returned":
            cache.crop(-9)
            ids = torch.cat([result.sequences[:, : cache.get_seq_length()], prompt(6, 7)], 1)
            name = next(n for n in ("past_key_values", "cache") if n in result)
            got = model.generate(ids, max_new_tokens=5, **{name: cache})
        else:
            ids = torch.cat([prompt(40), prompt(6, 7)], 1)
            got = model.generate(ids, max_new_tokens=5)
        assert torch.equal(got, plain(model, input_ids=ids, max_new_tokens=5))
        assert all(map(torch.equal, snapshot, copies))


# huggingface/transformers, Gemma 3: images without text between them are one block in which tokens attend both ways.
BESIDE = [case for case in CASES if not case.name.startswith("qwen")]  # whose own generate fails for such prompts


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=[pytest.mark.slow] * (c.name != "gemma3")) for c in BESIDE]
)
def test_images_side_by_side(case: VisionCase) -> None:
    model, ask = case.build(), text(9, 1)
    free: dict[str, Any] = {"eos_token_id": None, "max_new_tokens": 3, "suppress_tokens": [IMAGE]}
    free |= {"output_logits": True, "return_dict_in_generate": True}

    def check(call: dict[str, Any]) -> None:
        want, got = plain(model, **call, **free), model.generate(**call, **free)
        assert torch.equal(got.sequences, want.sequences)
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=1e-3, atol=1e-3)

    with enabled(model, num_blocks=200) as handle:
        for start in (text(20, 0), text(16, 0)):  # an image ends within a block, or with one
            for images in ([1], [1, 2], [1, 3], [1, 2, 3], [2, 1], [1], [1, 2], [3, 3], [3, 3]):
                check(case.call([start, *images, ask]))
            check(case.call([start, 1, 2, ask], [text(5, 4), 1, 3, ask]))
        assert handle.stats().calls_handed_back == {}


# transformers, candidate generators that read hidden states of the whole prompt: multi-token-prediction heads.
@pytest.mark.parametrize("layers", [1, 2])
def test_drafts_from_hidden_states_of_the_whole_prompt(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    modeling_layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(modeling_layers, "MtpModel"):
        pytest.skip("this transformers has no heads that predict several tokens")
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    model = changed_models.build("Glm4Moe", head_dim=16, n_group=1, topk_group=1, num_mtp_layers=layers, **sizes)

    def heads(main: Any, **_: Any) -> Any:
        torch.manual_seed(1)
        return modeling_layers.MtpModel(main, layers).eval()

    monkeypatch.setattr(modeling_layers.MtpModel, "from_pretrained", heads)
    with enabled(model) as handle:
        for options in ({}, {"use_mtp": True}, {"use_mtp": True, "prompt_lookup_num_tokens": 3}):
            for ids in (prompt(60), prompt(60), torch.cat([prompt(60), prompt(7, 9)], 1)):
                asked: dict[str, Any] = {"input_ids": ids, "max_new_tokens": 6, **options}
                assert torch.equal(model.generate(**asked), plain(model, **asked)), options
        assert handle.stats().calls_handed_back == {}
        assert changed_models.differing(model, use_mtp=True) == []


# Compressed documents. kvpress and LMCache report answers that silently come from another cache than the one named.


def document_of(handle: Any, budget: float = 0.2, **options: Any) -> CompressedDocument:
    return handle.compress(CONTEXT, budget=budget, **options)


# The same kind: deterministic caching, and models whose attention weights the caller asks for.
def test_attention_weights_of_an_eager_model_are_refused(model: Any) -> None:
    model.set_attn_implementation("eager")
    with enabled(model) as handle, pytest.raises(UnsupportedError, match="output_attentions"):
        ask(model, document_of(handle), output_attentions=True)


# transformers registers hooks on a model when hidden states are first asked for.
def test_hidden_states_leave_a_document_as_it_is(model: Any, handle: Any) -> None:
    document = document_of(handle)
    for _ in range(2):
        states = ask(model, document, output_hidden_states=True).hidden_states[0]
        assert {layer.shape[1] for layer in states} == {9}  # of the question's tokens
        model(QUESTION, output_hidden_states=True)


def test_a_float64_model_is_refused_by_name() -> None:
    model = changed_models.build().double()
    with enabled(model) as handle, pytest.raises(ValueError, match="its weights are"):
        document_of(handle)


# LMCache: a process that only loads, in which our attention was never installed before the model's.
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("disk", [False, True])
def test_a_document_that_was_loaded_is_read(
    disk: bool, tokens: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = changed_models.build(), QUESTION[:, : 200 + tokens]
    options = {"disk": tmp_path / "tier"} if disk else {}
    with enabled(model, **options) as handle:
        document = document_of(handle)
        document.save(tmp_path / "document")
        expected = ask(model, document, ids)
    original = modeling_llama.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", getattr(original, "original", original))
    model = changed_models.build()
    with enabled(model, **options) as handle:
        found = document_of(handle) if disk else CompressedDocument.load(handle, tmp_path / "document")
        for one, other in zip(ask(model, found, ids).logits, expected.logits, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


# vLLM: a batch for which the pool has blocks for only some rows.
@pytest.mark.parametrize(("rows", "blocks"), [(1, 2), (2, 3), (4, 8)])
def test_a_batch_that_the_pool_has_no_blocks_for(model: Any, rows: int, blocks: int) -> None:
    ids = torch.cat([CONTEXT.expand(rows, -1), torch.cat([prompt(40, seed) for seed in range(rows)])], 1)
    with enabled(model) as handle:
        expected = ask(model, document_of(handle), ids).sequences
    with huggingface.enable_prefix_caching(model, num_blocks=blocks) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(ask(model, document_of(handle), ids).sequences, expected)
        assert handle.stats().held_blocks == 0


# transformers: Qwen-VL keeps `rope_deltas` of the latest call.
def test_positions_that_an_earlier_call_has_left() -> None:
    model = next(case for case in CASES if case.name == "qwen2.5-vl").build()
    context, ids = CONTEXT % 50 + 10, QUESTION % 50 + 10
    with enabled(model) as handle:
        expected = ask(model, handle.compress(context, budget=0.3), ids)
        handle.reset()
        model.model.rope_deltas = torch.tensor([[31]])
        document = handle.compress(context, budget=0.3)
        model.model.rope_deltas = torch.tensor([[57]])
        for one, other in zip(ask(model, document, ids).logits, expected.logits, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


# LMCache: one tenant's cache answers another.
def test_a_document_of_another_salt_is_refused(model: Any, handle: Any, tmp_path: Any) -> None:
    with handle.salt("mine"):
        document = document_of(handle)
        document.save(tmp_path / "document")
        ask(model, document)
    for salt in (None, "theirs"):
        with handle.salt(salt) if salt else contextlib.nullcontext():
            with pytest.raises(ValueError, match="document: got a document of another salt"):
                ask(model, document)
            with pytest.raises(ValueError, match="path: got a document of another salt"):
                CompressedDocument.load(handle, tmp_path / "document")


# transformers: right padding without a mask.
def test_questions_padded_on_the_right_are_refused(model: Any) -> None:
    ids = torch.cat([QUESTION, torch.cat([QUESTION[:, :205], torch.zeros(1, 4, dtype=torch.long)], 1)])
    with enabled(model) as handle, pytest.raises(UnsupportedError, match="attention_mask: got padded rows"):
        ask(model, document_of(handle), ids)


# kvpress, vLLM: a document whose handle was closed.
def test_a_document_of_a_handle_that_serves_no_more_is_refused(model: Any) -> None:
    handle = enabled(model)
    document = document_of(handle)
    with document:
        handle.disable()
        with pytest.raises(ValueError, match="document: cannot be served, caching is disabled"):
            model.generate(QUESTION)
        with enabled(model), pytest.raises(ValueError, match="document: its handle was disabled"):
            model.generate(QUESTION)
    assert "generate" not in vars(model)
    with pytest.raises(ValueError, match="needs a model that was not deleted, with caching enabled"):
        document.__enter__()
    with enabled(model), pytest.raises(ValueError, match="needs a model that was not deleted, with caching enabled"):
        document.__enter__()


# transformers: TextIteratorStreamer's recipe runs generate in a thread; servers run it in pools, and in tasks.
def test_threads_pools_and_tasks_read_the_document_that_they_were_started_in(model: Any, handle: Any) -> None:
    document = document_of(handle, 0.1)
    expected, exact = ask(model, document).sequences, plain(model, input_ids=QUESTION, **ASKED).sequences
    assert not torch.equal(expected, exact)
    found: list[torch.Tensor] = []

    def generate() -> torch.Tensor:
        found.append(model.generate(QUESTION, **ASKED).sequences)
        return found[-1]

    with ThreadPoolExecutor(1) as pool:
        with document:
            thread = threading.Thread(target=generate)
            thread.start()
            future = pool.submit(generate)
        thread.join()
        assert torch.equal(future.result(), expected)
        assert torch.equal(pool.submit(generate).result(), exact)

    async def serve() -> None:
        async def task() -> torch.Tensor:
            return generate()

        with document:
            assert torch.equal(await asyncio.to_thread(generate), expected)
            later = asyncio.create_task(task())
        assert torch.equal(await later, expected)

    asyncio.run(serve())
    assert torch.equal(found[0], expected)
    assert torch.equal(generate(), exact)


# The same kind: all else that runs the model within a document would answer without the document.
def few_blocks() -> Any:
    return transformers.ContinuousBatchingConfig(num_blocks=64)


def through_a_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def assisted(model: Any) -> Any:
    return changed_models.build().generate(QUESTION, assistant_model=model, max_new_tokens=3)


def classified(model: Any) -> Any:
    other = transformers.LlamaForSequenceClassification(model.config).eval()
    other.model = model.model
    return other(QUESTION, use_cache=False)


ENTRIES: dict[str, Callable[[Any], Any]] = {
    "forward": lambda model: model(QUESTION),
    "forward of a question": lambda model: model(QUESTION[:, 200:], use_cache=False),
    "forward with a cache": lambda model: model(QUESTION, **{CACHE_NAMES[0]: transformers.DynamicCache()}),
    "forward in a thread": lambda model: through_a_thread(lambda: model(QUESTION)),
    "forward by a functional call": lambda model: torch.func.functional_call(model, {}, (QUESTION,)),
    "compiled forward": lambda model: torch.compile(model, backend="eager")(QUESTION),
    "forward below the head": lambda model: model.model(QUESTION),
    "another head": classified,
    "the class's generate": lambda model: type(model).generate(model, QUESTION, max_new_tokens=3),
    "generate of a model that this one assists": assisted,
    "generate_batch": lambda model: batching_cases.batched(model, [QUESTION[0].tolist()], 3, num_blocks=64),
    "a manager": lambda model: model.init_continuous_batching(batching_cases.config(3), few_blocks()),
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ENTRIES)
def test_no_other_entry_of_a_model_leaves_a_document_out_in_silence(name: str, attention: str) -> None:
    if ("batch" in name or "manager" in name) and release(transformers.__version__)[:2] < OLDEST_BATCHING:
        pytest.skip("older transformers are refused by name")
    model = changed_models.build()
    model.set_attn_implementation(attention)
    with enabled(model) as handle, torch.no_grad():
        document = document_of(handle)
        expected = ask(model, document).sequences
        with document, pytest.raises(UnsupportedError, match="document"):
            ENTRIES[name](model)
        assert model.config._attn_implementation == attention
        assert torch.equal(ask(model, document).sequences, expected)
        ENTRIES[name](model)  # outside of a document all work as before
        model.set_attn_implementation(attention)  # a manager that is never started leaves its attention
        assert torch.equal(ask(model, document).sequences, expected)


# The same kind: forward passes compiled before, and managers made or kept before.
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["layer", "model"])
def test_what_was_made_before_a_document_was_entered_does_not_leave_it_out(whole: bool) -> None:
    model = changed_models.build(num_hidden_layers=1)
    compiled = torch.compile(model if whole else model.model.layers[0], backend="eager")

    def forward() -> Any:
        if whole:
            return compiled(QUESTION).logits
        hidden = model.model.embed_tokens(QUESTION)
        places = model.model.rotary_emb(hidden, torch.arange(QUESTION.shape[1])[None])
        return compiled(hidden, position_embeddings=places)

    with enabled(model) as handle, torch.no_grad():
        document = document_of(handle)
        want = forward()
        with document, pytest.raises(UnsupportedError, match="document"):
            forward()
        assert torch.equal(forward(), want)
        assert document_of(handle).content is document.content  # the model counts as the same


@needs_batching
@pytest.mark.parametrize("ours", [False, True])
def test_managers_that_were_made_before_a_document_take_no_request_within_it(ours: bool) -> None:
    model, ids = changed_models.build(), QUESTION[0].tolist()
    with enabled(model) as handle, contextlib.ExitStack() as stack:
        if ours:
            stack.enter_context(huggingface.enable_continuous_batching(model, num_blocks=64))
        document = document_of(handle)
        manager = model.init_continuous_batching(batching_cases.config(3), few_blocks())
        with document, pytest.raises(UnsupportedError, match="document"):
            manager.start()
        manager.start()
        try:
            with document:
                for add in (manager.add_request, lambda prompt: manager.add_requests([prompt])):
                    with pytest.raises(UnsupportedError, match="document"):
                        add(ids)
            manager.add_request(ids, request_id="one")
            found = manager.get_result("one", timeout=60)
        finally:
            manager.stop()
            manager.destroy()
        assert found.error is None
        assert found.generated_tokens == plain(model, input_ids=QUESTION, max_new_tokens=3)[0, 209:].tolist()


# The same kind, for what must not change: guidance runs the model within a call, and probes run it unchanged.
def test_passes_within_a_call_over_a_document_are_as_ever(model: Any, handle: Any) -> None:
    whole = handle.compress(CONTEXT, budget=1.0)
    asked = {"max_new_tokens": 6, "guidance_scale": 1.5}
    with whole:
        found = model.generate(QUESTION, **asked)
        other = handle.compress(CONTEXT, "streaming", budget=0.1)
        with other:
            pass
        with torch.no_grad():
            vision = changed_models.build()(QUESTION)  # another model
    assert torch.equal(found, plain(model, input_ids=QUESTION, **asked))
    assert torch.equal(vision.logits, model(QUESTION).logits)


def words(count: int) -> Any:
    """Return a tokenizer whose words are the numbers of tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(token): token for token in range(count)}, "0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


def test_pipelines_read_a_document(model: Any, handle: Any) -> None:
    document = document_of(handle)
    expected = ask(model, document).sequences
    tokenizer = words(model.config.vocab_size)
    pipe = transformers.TextGenerationPipeline(model, tokenizer)
    asked = " ".join(map(str, QUESTION[0].tolist()))
    with document:
        (found,) = pipe(asked, return_tensors=True, max_new_tokens=6, do_sample=False)
        with pytest.raises(UnsupportedError, match="document"):
            transformers.FeatureExtractionPipeline(model, tokenizer)(asked)
    assert found["generated_token_ids"] == expected[0].tolist()


# asyncio: an async generator runs in the context of the caller that asks for its next item.
def test_a_document_that_another_task_has_entered(model: Any, handle: Any) -> None:
    document = document_of(handle)

    async def stream() -> AsyncIterator[Any]:
        with document:
            yield None
            yield model.generate(QUESTION, max_new_tokens=2)

    async def serve() -> None:
        items = stream()
        await asyncio.create_task(items.__anext__())
        with pytest.raises(ValueError, match="document: was entered in another asyncio task"):
            await asyncio.create_task(items.__anext__())
        items = stream()
        await asyncio.create_task(items.__anext__())
        with pytest.raises(KeyError, match="the caller's own"):
            await asyncio.create_task(items.athrow(KeyError("the caller's own")))

    asyncio.run(serve())
    assert torch.equal(model.generate(QUESTION, **ASKED).sequences, plain(model, input_ids=QUESTION, **ASKED).sequences)


class Shortening:
    """A press that shortens layers, and measures the memory that they hold."""

    most = 0

    @contextlib.contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        def shorten(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            cache = next(kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None)
            held = [
                side.untyped_storage().nbytes()
                for x in cache.layers
                if x.keys is not None
                for side in (x.keys, x.values)
            ]
            self.most = max(self.most, sum(held))
            layer = cache.layers[module.layer_idx]
            layer.keys, layer.values = layer.keys[:, :, 150:], layer.values[:, :, 150:]

        hooks = [x.self_attn.register_forward_hook(shorten, with_kwargs=True) for x in model.model.layers]
        yield
        for hook in hooks:
            hook.remove()


# kvpress: views hold the memory that a press should release.
def test_peak_memory_of_a_press_counts_what_is_held() -> None:
    model, press = changed_models.build(num_hidden_layers=4), Shortening()
    with enabled(model) as handle:
        document = handle.compress(CONTEXT, press)
        layer = 2 * CONTEXT.shape[1] * 2 * 16 * 4
        assert press.most == layer  # no layer holds memory of dropped tokens
        assert layer <= document.peak_nbytes < 2.5 * layer
        assert document.kept_tokens == [None] * 4


# PyTorch, vLLM: memory that `close` must free.
def test_closing_a_document_frees_it_at_once(model: Any, handle: Any) -> None:
    document, twin = document_of(handle), document_of(handle)
    kept = weakref.ref(document.content.layers[0].keys)
    document.close()
    assert repr(document) == "<CompressedDocument, closed>"
    assert kept() is not None
    twin.close()
    assert kept() is None


PRESS = """
import contextlib, dataclasses
FIRST = {first}
def shorten(layer): layer.keys, layer.values = layer.keys[:, :, FIRST:], layer.values[:, :, {second}:]
@dataclasses.dataclass
class Press:
    ratio: float = 0.5
    @contextlib.contextmanager
    def __call__(self, model): yield shorten
"""


# Jupyter: a cell that defines a press runs again.
def test_a_press_whose_code_changed_is_another_press() -> None:
    def key(first: int, second: int) -> str | None:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(PRESS.format(first=first, second=second), names)
        return press_key(names["Press"](), 0.5)

    assert key(1, 1) == key(1, 1) is not None
    assert len({key(1, 1), key(2, 1), key(1, 2)}) == 3


# kvpress: a budget smaller than SnapKV's window.
@pytest.mark.parametrize(("tokens", "budget"), [(60, 0.5), (200, 0.15), (200, 0.02)])
def test_snapkv_chooses_by_votes_whatever_the_budget(handle: Any, tokens: int, budget: float) -> None:
    document = handle.compress(CONTEXT[:, :tokens], budget=budget)
    share = round(tokens * budget)
    for heads in document.kept_tokens:
        assert heads is not None
        assert sum(len(head) for head in heads) == share * len(heads)
        voted = [int((head < tokens - 32).sum()) for head in heads]
        assert sum(voted) >= share * len(heads) // 3


# transformers: BatchEncoding has no shape.
def test_what_a_tokenizer_gives_can_be_compressed(handle: Any) -> None:
    ids = CONTEXT[:, :60]
    document = handle.compress(ids)
    for given in (
        {"input_ids": ids},
        transformers.BatchEncoding({"input_ids": ids, "attention_mask": ids * 0 + 1}),
    ):
        assert handle.compress(given).content is document.content
    for wrong in ("a text", ids.bool(), {"input_ids": ids, "attention_mask": ids * 0}, {"pixel_values": ids}, None):
        with pytest.raises(ValueError, match="context_ids: got"):
            handle.compress(wrong)


# PyTorch: models, or calls of them, that a press cannot support.
def test_images_and_compiled_models_are_refused_over_a_document() -> None:
    case = next(case for case in CASES if case.name == "gemma3")
    model = case.build()
    with enabled(model) as handle:
        document = handle.compress(CONTEXT[0] % 50 + 10)
        call = case.call([document.content.tokens, 1, text(5, 1)])
        with document, pytest.raises(ValueError, match="images"):
            model.generate(**call, max_new_tokens=2)
    model = changed_models.build()
    model.compile()
    with pytest.raises(UnsupportedError, match=r"torch\.compile"):
        check_compressible(model)


def test_a_model_that_changes_values_behind_its_cache_is_refused(handle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    update = transformers.Cache.update

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        keys, values = update(self, *args, **kwargs)
        return keys, values * 2

    monkeypatch.setattr(transformers.Cache, "update", doubled)
    with pytest.raises(ValueError, match="attends to values other than those it has cached"):
        document_of(handle)


# vLLM, batch invariance: the bits of an answer depend on cached tokens and on other rows.
def test_questions_over_a_document_are_deterministic(model: Any) -> None:
    rows = torch.cat([torch.cat([CONTEXT, prompt(70, seed)], 1) for seed in (4, 5)])
    with enabled(model, deterministic=True, chunk=32) as handle:
        document = document_of(handle, 0.5)
        cold, warm, both = ask(model, document, rows[:1]), ask(model, document, rows[:1]), ask(model, document, rows)
        twice = ask(model, document, rows, num_return_sequences=2, do_sample=True, top_k=1)
        for other, row in ((warm, 0), (both, 0), (twice, 0), (twice, 1)):
            assert all(torch.equal(a[0], b[row]) for a, b in zip(cold.logits, other.logits, strict=True))
        assert handle.stats().document_calls == 4


# PyTorch 2.9: newer settings of precision make the older getter raise.
@pytest.mark.parametrize("place", ["mkldnn.matmul", "cuda.matmul", "cudnn.conv", ""])
def test_newer_settings_of_precision(place: str) -> None:
    backend = operator.attrgetter(place)(torch.backends) if place else torch.backends
    before, model = backend.fp32_precision, changed_models.build()
    with enabled(model, deterministic=True, chunk=32) as handle:
        model.generate(prompt(70), max_new_tokens=2)
        try:
            backend.fp32_precision = "ieee" if before == "tf32" else "tf32"
            model.generate(prompt(70), max_new_tokens=2)
            assert handle.last_requests[0].cached_tokens == 0  # the cached ones have another precision
        finally:
            backend.fp32_precision = before
        assert handle.stats().calls_handed_back == {}


# PyTorch: the bits of a matrix product depend on addresses.
@pytest.mark.parametrize("head_dim", [6, 10, 50])
def test_warm_bits_are_cold_bits_whatever_the_head_dim(head_dim: int) -> None:
    model = changed_models.build(head_dim=head_dim)
    with enabled(model, deterministic=True, chunk=32) as handle:
        for length in (40, 77, 150):
            ids = torch.cat([prompt(200)[:, :length], prompt(11, length)], 1)
            handle.reset()
            cold = model.generate(ids, **ASKED)
            handle.reset()
            model.generate(prompt(200), max_new_tokens=1)
            warm = model.generate(ids, **ASKED)
            assert handle.last_requests[0].cached_tokens > 0
            assert all(map(torch.equal, cold.logits, warm.logits))


# Requests in those reports: where a context differs, and which tokens were kept.
def test_an_error_says_where_a_context_differs(model: Any, handle: Any) -> None:
    ids = torch.cat([QUESTION, QUESTION])
    ids[1, 17] += 1
    there, got = int(QUESTION[0, 17]), int(ids[1, 17])
    document = handle.compress(CONTEXT, "streaming", budget=0.05)
    assert [head.tolist() for head in document.kept_tokens[0] or ()] == [[0, 1, 2, 3, *range(194, 200)]] * 2
    with pytest.raises(ValueError, match=f"row 1 differs at token 17: got {got}, which is {there} in the document"):
        ask(model, document, ids)


# vLLM, SGLang: an explanation gives what the next call reads, with fixed chunks and with lower tiers.
@pytest.mark.parametrize("lengths", [(128, 128), (100, 128), (200, 201), (70, 64), (33, 200), (64, 31)])
def test_explanations_count_whole_chunks(lengths: tuple[int, int]) -> None:
    model, (stored, asked) = changed_models.build(), lengths
    with enabled(model, deterministic=True, chunk=32) as handle:
        model.generate(prompt(200)[:, :stored], max_new_tokens=2)
        ids = torch.cat([prompt(200), prompt(9, 1)], 1)[:, :asked]
        found = handle.explain(ids)
        model.generate(ids, max_new_tokens=2)
        assert found.matched == handle.last_requests[0].cached_tokens
        assert (found.reason is None) == (found.matched == (asked - 1) // 32 * 32)


@pytest.mark.parametrize("options", [{"host_blocks": 30}, {"disk": True}, {"host_blocks": 3}], ids=str)
def test_explanations_count_what_lower_tiers_have(options: dict[str, Any], tmp_path: Any) -> None:
    model, options = changed_models.build(), options | ({"disk": tmp_path} if "disk" in options else {})
    with huggingface.enable_prefix_caching(model, num_blocks=12, **options) as handle:
        for seed in (0, 1, 2):
            model.generate(prompt(150, seed), max_new_tokens=2)
        for ids in (prompt(150), torch.cat([prompt(150)[:, :100], prompt(40, 8)], 1), prompt(150, 1)[:, :97]):
            found = handle.explain(ids)
            model.generate(ids, max_new_tokens=2)
            assert found.matched == handle.last_requests[0].cached_tokens
        assert handle.explain(prompt(150, 9)).reason == "never"
