"""Faults that public bug reports of other projects describe, translated to this library: one case for each report.

The comment above a case names the report or the kind of report that it comes from. A new report is added here first,
as a case that fails.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pc

transformers = pytest.importorskip("transformers")

import batching_cases  # noqa: E402
import changed_models  # noqa: E402
from generate_cases import plain, prompt  # noqa: E402
from image_cases import CASES, IMAGE, VisionCase, text  # noqa: E402
from transformers import GenerationConfig  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402

from pc.integrations import huggingface  # noqa: E402
from pc.integrations.huggingface.api import OLDEST_BATCHING  # noqa: E402
from pc.integrations.plugin import release_of  # noqa: E402


def store(manager: pc.CacheManager, name: str, tokens: list[int], **options: object) -> None:
    manager.allocate(name, tokens, **options)
    manager.commit(name, len(tokens))
    manager.free(name)


# vLLM, SGLang: "prefix cache hit rate drops, no way to see why". A cancelled request is no text that could be found.
def test_text_of_a_cancelled_request_is_not_said_to_be_there() -> None:
    manager = pc.CacheManager(64, block_size=4)
    manager.allocate("cancelled", list(range(16)))
    manager.commit("cancelled", 8)
    manager.free("cancelled")
    found = manager.explain([*range(16), 99])
    assert (found.matched, found.reason, found.position) == (8, "never", 8)


# The same kind of report: an explanation must not blame a salt or an adapter whose text is cached nowhere.
@pytest.mark.parametrize("other", [{"salt": "tenant"}, {"extra_keys": "lora"}], ids=["salt", "keys"])
def test_evicted_text_of_others_is_not_said_to_be_cached(other: dict[str, str]) -> None:
    manager = pc.CacheManager(8, block_size=4)
    store(manager, "theirs", list(range(16)), **other)
    assert manager.explain(list(range(16))).reason == next(iter(other)).removeprefix("extra_")
    store(manager, "traffic", list(range(100, 132)))
    assert manager.explain(list(range(16))).reason == "never"


# The same kind of report, block_size=1.
def test_unlike_text_is_no_other_token_with_blocks_of_one_token() -> None:
    manager = pc.CacheManager(64, block_size=1)
    store(manager, "text", list(range(16)))
    assert manager.explain(list(range(100, 116))).reason == "never"
    assert manager.explain([99, *range(1, 16)]).reason == "token"


# The same kind of report: a speculative decoder's rollback leaves published blocks in the cache.
def test_text_that_was_rolled_back_is_known_while_its_blocks_are_cached() -> None:
    manager = pc.CacheManager(64, block_size=4)
    manager.allocate("a", list(range(16)), salt="tenant")
    manager.commit("a", 16)
    manager.rollback("a", 16)
    manager.free("a")
    assert manager.explain(list(range(16))).reason == "salt"


def enabled(model: Any, **options: Any) -> Any:
    return huggingface.enable_prefix_caching(model, **{"num_blocks": 64, **options})


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
def test_a_model_is_served_again_once_what_hindered_it_is_gone() -> None:
    model = changed_models.build()
    hook = model.model.layers[0].register_forward_hook(changed_models.steer_last)
    with enabled(model) as handle:
        assert "does not go on from a cached prefix" in handle.unsupported
        hook.remove()
        assert changed_models.differing(model) == []
        assert handle.unsupported is None
        assert handle.last_requests[0].cached_tokens > 0


# The same kind in continuous batching.
@pytest.mark.skipif(
    release_of(transformers.__version__, 2) < OLDEST_BATCHING, reason="older transformers are refused by name"
)
@pytest.mark.parametrize("name", ["layer dropped", "other KV heads", "window narrowed", "window to none"])
def test_generate_batch_probes_a_changed_model_anew(name: str) -> None:
    make, change = changed_models.CHANGES[name]
    model, ids = make(), prompt(40)
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def batched() -> Any:
        (output,) = model.generate_batch([ids[0].tolist()], generation_config=config, progress_bar=False).values()
        return output

    with huggingface.enable_continuous_batching(model, num_blocks=64):
        batched()
        change(model)
        for _ in range(2):
            output = batched()
            assert output.error is None
            assert output.generated_tokens == plain(model, input_ids=ids, max_new_tokens=6)[0, 40:].tolist()


# transformers#34240: self-speculative decoding changes the number of layers for a moment, within a call.
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
    """Does something while a call runs, before its fifth and its eighth token."""

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


# NVIDIA/NeMo-RL#4018, radixark/miles#2783, peft#2523: what is switched while a call runs, and back before the next.
@pytest.mark.parametrize("back_within", [False, True])
@pytest.mark.parametrize("change", [change_hook, change_setting, change_weight, change_class])
def test_what_is_computed_by_a_model_changed_in_a_call_is_not_published(change: Any, back_within: bool) -> None:
    model = changed_models.build()
    with enabled(model) as handle:
        on, off = change(model)
        at = At(on, off) if back_within else At(on)
        asked: dict[str, Any] = {"max_new_tokens": 40, "output_hidden_states": True, "return_dict_in_generate": True}
        first = model.generate(prompt(40), logits_processor=[at], **asked).sequences
        if not back_within:
            off()
        assert handle.stats().cached_blocks <= 3  # of the prompt's 40 tokens and the first few of the answer
        ids = torch.cat([first, prompt(4, 2)], 1)
        want = plain(model, input_ids=ids, max_new_tokens=8)
        for _ in range(2):
            assert torch.equal(model.generate(ids, max_new_tokens=8), want)


# The same kind in continuous batching, where another thread streams what is generated.
@pytest.mark.skipif(
    release_of(transformers.__version__, 2) < OLDEST_BATCHING, reason="older transformers are refused by name"
)
@pytest.mark.parametrize("change", [change_hook, change_setting, change_class])
def test_what_a_batching_session_computes_by_a_changed_model_is_not_published(change: Any) -> None:
    model = batching_cases.LLAMA.build()
    model.generation_config.eos_token_id = None
    on, off = change(model)
    ids = prompt(40)[0].tolist()

    def config(new_tokens: int) -> Any:
        return GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)

    with huggingface.enable_continuous_batching(model, num_blocks=64):
        with model.continuous_batching_context_manager(generation_config=config(40)) as manager:
            manager.add_request(ids, streaming=True)
            changed = False
            while not (result := manager.get_result(timeout=30)).is_finished():
                if len(result.generated_tokens) > 4 and not changed:
                    on()
                    changed = True
        off()
        assert changed
        assert result.error is None
        asked = [*ids, *result.generated_tokens, *prompt(4, 2)[0].tolist()]
        want = plain(model, input_ids=torch.tensor([asked]), max_new_tokens=8)[0, len(asked) :].tolist()
        (got,) = model.generate_batch([asked], generation_config=config(8), progress_bar=False).values()
        assert got.generated_tokens == want


# ModelTC (LongLM), MHA2MLA#10: methods of a class, or functions of its file, are replaced; keys from before are read.
def patch_class(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    own = modeling_llama.LlamaAttention.forward

    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, hidden_states * factor, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)


def patch_file(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    own = modeling_llama.rotate_half
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: own(x) * factor)


def patch_torch(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    own = torch.nn.functional.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs) * factor

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)


def patch_registry(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    functions = transformers.AttentionInterface._global_mapping
    own = functions["sdpa"]

    def attention(*args: Any, **kwargs: Any) -> Any:
        out, weights = own(*args, **kwargs)
        return out * factor, weights

    monkeypatch.setitem(functions, "sdpa", attention)


def patch_code(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:  # as autoreload does in a notebook
    def forward(self: Any, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 0.5

    monkeypatch.setattr(modeling_llama.LlamaMLP.forward, "__code__", forward.__code__)


def patch_linear(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    own = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args, **kwargs: own(*args, **kwargs) * factor)


def patch_base(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    own = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: own(self, x) * factor)


PATCHES = [patch_class, patch_file, patch_torch, patch_registry, patch_code, patch_linear, patch_base]


@pytest.mark.parametrize("patch", PATCHES)
def test_replaced_functions_are_noticed(patch: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    model = changed_models.build()
    with enabled(model, disk=tmp_path):
        model.generate(prompt(60), max_new_tokens=12)
        patch(monkeypatch, 0.5)
        assert changed_models.differing(model) == []
    monkeypatch.undo()
    with enabled(model, disk=tmp_path / "other"):  # another life: blocks of the unpatched model alone are on disk
        model.generate(prompt(60), max_new_tokens=12)
    patch(monkeypatch, 0.5)
    with enabled(model, disk=tmp_path / "other") as handle:
        assert changed_models.differing(model) == []
    with enabled(model, disk=tmp_path / "other") as handle:  # its own blocks are found again
        model.generate(prompt(60), max_new_tokens=12)
        assert handle.last_requests[0].cached_tokens > 0


def test_a_patch_with_another_constant_is_another_model_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    model = changed_models.build()
    for factor in (0.5, 0.25):
        patch_class(monkeypatch, factor)
        with enabled(model, disk=tmp_path):
            assert changed_models.differing(model) == []
        monkeypatch.undo()


# peft#2638, vllm#51198: the cache is emptied by each call, without a word.
def test_a_cache_that_never_hits_says_why() -> None:
    model, layer = changed_models.build(), None
    layer = model.model.layers[0].mlp

    def turn() -> None:  # between calls, so that no forward pass shows it
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


# The same kind: a hook that counts, put on later, is no reason to read nothing.
@pytest.mark.parametrize("where", ["attribute", "dict", "list"])
def test_a_hook_that_counts_is_served(where: str) -> None:
    model = changed_models.build()
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
        assert changed_models.differing(model) == []
        assert handle.last_requests[0].cached_tokens > 0


# The same kind: a buffer that each pass changes may matter, so nothing is read, and that is said.
def test_a_buffer_that_counts_passes_is_named() -> None:
    model = changed_models.build()
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


# The same kind: PEFT puts parameters aside for each forward pass where LoRA targets them, which raises their versions.
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
        weight[2, 5].mul_(1.5)  # one row of one expert: the version does not tell, the sample does
        assert changed_models.differing(model) == []


# llama.cpp, kvpress and StreamingLLM reports: what evicts from the cache, of long prompts only, or while answering.
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
        assert any("takes tokens from its cache" in reason for reason in handle.stats().calls_handed_back)


# transformers: users keep `[(l.keys, l.values) ...]` of a returned cache as a snapshot, and go on with the cache.
@pytest.mark.parametrize("kept", ["returned", "by a hook"])
def test_tensors_of_a_cache_that_were_kept_stay_what_they_were(kept: str) -> None:
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


# transformers: the evaluation of Seq2SeqTrainer gives generate the labels.
def test_labels_are_served() -> None:
    model = changed_models.build()
    with enabled(model) as handle:
        for _ in range(2):
            got = model.generate(prompt(40), max_new_tokens=5, labels=prompt(45))
            assert torch.equal(got, plain(model, input_ids=prompt(40), max_new_tokens=5))
        assert handle.stats().calls_handed_back == {}
        assert handle.last_requests[0].cached_tokens > 0


# huggingface/transformers, Gemma 3: images without text between them are one block in which tokens attend both ways.
BESIDE = [case for case in CASES if not case.name.startswith("qwen")]  # which fail by themselves for such prompts


@pytest.mark.parametrize("case", BESIDE, ids=lambda case: case.name)
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
            for images in ([1], [1, 2], [1, 3], [1, 2, 3], [2, 1], [1], [1, 2], [3, 3]):
                for _ in range(2):
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
                asked: dict[str, Any] = {"input_ids": ids, "max_new_tokens": 12, **options}
                assert torch.equal(model.generate(**asked), plain(model, **asked)), options
        assert handle.stats().calls_handed_back == {}
        assert changed_models.differing(model, use_mtp=True) == []


# The walk over options of generate (`make walk`, seed 23): assisted decoding does not cut a prompt into chunks.
@pytest.mark.parametrize("chunk", [7, 16])
def test_prompt_lookup_with_a_chunk_size(chunk: int) -> None:
    model = changed_models.build()
    text = torch.cat([prompt(30), prompt(30), prompt(4, 1)], 1)
    with enabled(model) as handle:
        for _ in range(3):
            asked = {"input_ids": text, "prompt_lookup_num_tokens": 2, "prefill_chunk_size": chunk}
            assert torch.equal(model.generate(**asked), plain(model, **asked))
        assert handle.last_requests[0].cached_tokens > 0
