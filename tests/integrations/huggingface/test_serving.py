"""HuggingFace's generate with the prefix cache: the same tokens as without it for all options, and no block lost."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import threading
import warnings
from collections.abc import Iterator
from operator import methodcaller
from typing import Any

import pytest
import torch
import transformers
from generate_cases import (
    BY_NAME,
    CACHE,
    DEEPSEEK,
    EOS,
    LLAMA,
    NEW_TOKENS,
    REFUSED,
    SMALL,
    VOCAB,
    Family,
    assert_nothing_held,
    assert_same,
    both,
    cache_of,
    count_computed,
    enabled,
    first_quick,
    left_padded,
    plain,
    prompt,
    refused,
)
from processes import in_threads
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pc.integrations.huggingface import PrefixCaching, enable_prefix_caching, engine
from pc.integrations.huggingface import settings as settings_module
from pc.integrations.huggingface.probe import probe


def test_conversation_reuses_what_was_generated(model: Any, handle: PrefixCaching) -> None:
    ids = prompt(40)
    for turn in range(3):
        ids = torch.cat([assert_same(model, input_ids=ids, min_new_tokens=20), prompt(5, turn)], 1)
        if turn:
            # All but the partial last block of the round before, whose last token was never computed.
            assert handle.last_requests[0].cached_tokens >= handle.last_requests[0].prompt_tokens - 5 - 16


def test_rows_of_one_prompt_compute_it_once(model: Any, handle: PrefixCaching) -> None:
    assert count_computed(model, input_ids=prompt(50, 9), num_return_sequences=4, do_sample=True, max_new_tokens=1) == (
        49 + 4  # the last token is computed in every row
    )


@pytest.mark.quick
@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_params"])
@pytest.mark.parametrize("own", [False, True], ids=["of a result", "of the caller"])
def test_names_of_the_cache_are_those_of_the_version(model: Any, handle: PrefixCaching, name: str, own: bool) -> None:
    """Tokens, errors, and warnings with the line that calls generate, are those of plain transformers."""

    def call(generate: Any) -> tuple[Any, list[tuple[Any, ...]]]:
        first = generate(prompt(40), max_new_tokens=12, return_dict_in_generate=True, eos_token_id=None)
        ids = torch.cat([first.sequences, prompt(5, 1)], 1)
        cache = transformers.DynamicCache(config=model.config) if own else cache_of(first)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                result = generate(ids, **{name: cache}, max_new_tokens=9, eos_token_id=None).tolist()
            except ValueError as error:
                result = str(error)
        told = [w for w in told if not str(w.message).startswith("prefix caching")]
        return result, [(w.category, str(w.message), w.filename) for w in told]

    want, told = call(lambda *args, **kwargs: type(model).generate(model, *args, **kwargs))
    got, told_here = call(model.generate)
    assert got == want
    assert [w[:2] for w in told_here] == [w[:2] for w in told]
    assert all(filename == __file__ for _, _, filename in told_here)
    assert len(told) == (name != CACHE == "cache")
    served = name == CACHE or bool(told)
    assert handle.stats().calls_served == 1 + (served and not own)
    assert handle.stats().calls_handed_back == ({f"{CACHE} of your own": 1} if own else {})


def test_names_of_the_cache_of_a_result(model: Any, handle: PrefixCaching, caplog: Any) -> None:
    options: dict[str, Any] = {"return_dict_in_generate": True, "max_new_tokens": 3}
    for result, other in (both(model, input_ids=prompt(40), **options), both(model, input_ids=prompt(40), **options)):
        assert result.keys() == other.keys()
        assert {name for name in dir(result) if "cache" in name} == {name for name in dir(other) if "cache" in name}
        for name in ("cache", "past_key_values", "cache_params"):
            found = getattr(result, name, None), getattr(other, name, None)
            assert [type(cache) for cache in found] == [type(getattr(result, name, None))] * 2
            assert found[1] is (cache_of(other) if found[0] is not None else None)
    caplog.clear()  # messages that this test caused


@pytest.mark.parametrize("name", first_quick(["llama", "gemma2", "gpt2"]))
def test_cache_of_a_result_is_gone_on_with(name: str) -> None:
    model = BY_NAME[name].build()
    options: dict[str, Any] = {"eos_token_id": None, "return_dict_in_generate": True, "max_new_tokens": 12}

    def rounds(generate: Any) -> Iterator[tuple[torch.Tensor, int]]:
        given = left_padded(prompt(40), prompt(29, 1))
        for turn in range(3):
            result = generate(**given, **options)
            cache = cache_of(result)
            yield result.sequences, cache.get_seq_length()
            ids = torch.cat([result.sequences, prompt(5, turn).expand(2, -1)], 1)
            mask = torch.ones_like(ids)
            mask[1, :11] = 0
            given = {"input_ids": ids, "attention_mask": mask, CACHE: cache}

    want = list(rounds(lambda **kw: type(model).generate(model, **kw)))
    with enabled(model) as handle:
        for (a, length), (b, own) in zip(want, rounds(model.generate), strict=True):
            assert torch.equal(a, b)
            assert length == own
        assert [r.prompt_tokens - r.cached_tokens for r in handle.last_requests] == [6, 6]
        assert handle.stats().calls_handed_back == {}
        # The tokens computed after the cached ones are in blocks, so the same prompt without the cache computes few.
        assert_same(model, input_ids=want[2][0][:1], attention_mask=torch.ones(1, want[2][0].shape[1]))
        assert handle.last_requests[0].cached_tokens >= want[2][0].shape[1] // 16 * 16 - 16


def _reordered(cache: Any) -> None:
    cache.reorder_cache(torch.tensor([1, 0]))


def _written(cache: Any) -> None:
    cache.layers[0].keys[0, 0, 3] += 1


def _replaced(cache: Any) -> None:
    cache.layers[1].values = cache.layers[1].values.clone()


def _longer(cache: Any) -> None:
    for layer in cache.layers:
        layer.update(layer.keys[:, :, :1].clone(), layer.values[:, :, :1].clone())


@pytest.mark.parametrize(
    "change", [_reordered, _written, _replaced, _longer, methodcaller("reset"), copy.deepcopy, None]
)
def test_cache_that_was_changed_goes_to_the_model(model: Any, handle: PrefixCaching, change: Any) -> None:
    options: dict[str, Any] = {"eos_token_id": None, "return_dict_in_generate": True, "max_new_tokens": 12}
    ids = torch.cat([prompt(40), prompt(40, 1)])
    first = model.generate(input_ids=ids, **options)
    own = cache_of(first)
    longer = torch.cat([first.sequences, prompt(9, 2).expand(2, -1)], 1)
    if change is None:
        longer[0, 3] += 1  # other tokens than the cache has
    else:
        own = change(own) or own
    mirror = copy.deepcopy(own)
    with pytest.warns(UserWarning, match=f"{CACHE} of your own"):
        got = model.generate(input_ids=longer, **{CACHE: own}, max_new_tokens=9, eos_token_id=None)
    assert torch.equal(got, plain(model, input_ids=longer, **{CACHE: mirror}, max_new_tokens=9, eos_token_id=None))
    for row in longer:  # none of its tokens is in blocks
        assert_same(model, input_ids=row[None])


def test_cropped_cache_and_one_of_another_salt(model: Any, handle: PrefixCaching) -> None:
    options: dict[str, Any] = {"eos_token_id": None, "return_dict_in_generate": True, "max_new_tokens": 12}
    first = model.generate(input_ids=prompt(40), **options)
    cache_of(first).crop(30 - cache_of(first).get_seq_length())
    other = torch.cat([prompt(40)[:, :30], prompt(9, 2)], 1)
    want = plain(model, input_ids=other, eos_token_id=None)
    got = model.generate(input_ids=other, **{CACHE: cache_of(first)}, max_new_tokens=NEW_TOKENS, eos_token_id=None)
    assert torch.equal(got, want)
    assert handle.last_requests[0].cached_tokens == 30
    first = model.generate(input_ids=prompt(40), **options)
    longer = torch.cat([first.sequences, prompt(9, 2)], 1)
    with handle.salt("tenant"), pytest.warns(UserWarning, match=f"{CACHE} of your own"):
        model.generate(input_ids=longer, **{CACHE: cache_of(first)}, max_new_tokens=2)
    first = model.generate(input_ids=prompt(40), **options)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    assert_same(model, input_ids=prompt(40))
    model.generate(input_ids=longer, **{CACHE: cache_of(first)}, max_new_tokens=2)
    assert handle.last_requests == []


def test_stop_strings(model: Any, handle: PrefixCaching) -> None:
    from pc.demo._models import train_tokenizer

    tokenizer = train_tokenizer("the quick brown fox jumps over the lazy dog " * 20, VOCAB)
    ids = torch.tensor([tokenizer.encode("the quick brown fox")])
    answer = tokenizer.decode(plain(model, input_ids=ids)[0, ids.shape[1] :])
    stop = answer[4:7]
    assert_same(model, input_ids=ids, stop_strings=[stop], tokenizer=tokenizer)
    assert handle.last_requests


def test_positional_arguments_and_inference_mode(model: Any, handle: PrefixCaching) -> None:
    config = transformers.GenerationConfig(max_new_tokens=11, eos_token_id=EOS, pad_token_id=0)
    want = type(model).generate(model, prompt(40), config)
    with torch.inference_mode():
        assert torch.equal(model.generate(prompt(40), config), want)
    assert torch.equal(model.generate(prompt(40), config), want)  # blocks made in inference mode stay writable
    assert handle.last_requests[0].cached_tokens == 39


@pytest.mark.quick
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_goes_to_the_model_with_one_warning(model: Any, handle: PrefixCaching, case: str) -> None:
    reason = refused(case)[1]

    def call(generate: Any) -> torch.Tensor:
        result = generate(input_ids=prompt(40), max_new_tokens=12, **refused(case)[0])
        return result if isinstance(result, torch.Tensor) else result.sequences

    want = call(lambda **kw: plain(model, **kw))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(call(model.generate), want)
        assert torch.equal(call(model.generate), want)
    told = [(str(w.message), w.filename) for w in caught if str(w.message).startswith("prefix caching:")]
    assert told == [(f"prefix caching: falls back to the model's own generate: {reason}", __file__)]
    assert handle.last_requests == []
    assert handle.stats().calls_served == 0
    assert list(handle.stats().calls_handed_back.values()) == [2]
    assert_nothing_held(handle)


def test_assisted_decoding_with_either_model_cached(model: Any) -> None:
    draft = transformers.LlamaForCausalLM(model.config).eval()
    draft.load_state_dict(model.state_dict())
    with torch.no_grad():
        draft.lm_head.weight.add_(torch.randn_like(draft.lm_head.weight) * 0.01)
    want = plain(model, input_ids=prompt(40), assistant_model=draft)
    with enable_prefix_caching(model) as handle:
        for expected in (0, 39):
            assert torch.equal(model.generate(prompt(40), assistant_model=draft, max_new_tokens=NEW_TOKENS), want)
            assert handle.last_requests[0].cached_tokens == expected
    with enable_prefix_caching(draft), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            assert torch.equal(plain(model, input_ids=prompt(40), assistant_model=draft), want)


@pytest.mark.parametrize("family", first_quick(["llama", "mistral-window", "gpt2"]))
def test_rows_padded_on_the_right_and_masks_with_holes(family: str) -> None:
    model = BY_NAME[family].build()
    right = {k: v.flip(1) for k, v in left_padded(prompt(54), prompt(37, 1)).items()}
    holes = torch.ones(1, 60, dtype=torch.long)
    holes[0, 34:50] = 0
    with enable_prefix_caching(model) as handle:
        assert_same(model, **right, times=2)
        windows = family == "mistral-window"  # its rows are computed together, from the shortest row's hit on
        assert [r.cached_tokens for r in handle.last_requests] == ([32, 32] if windows else [53, 32])
        assert windows or count_computed(model, **right, max_new_tokens=1) == 5 + 2  # of the short row, and of both
        assert_same(model, input_ids=prompt(60), attention_mask=holes, times=2)
        assert handle.last_requests[0].prompt_tokens == 34
        assert handle.last_requests[0].cached_tokens == 32


def test_rows_whose_last_token_sees_nothing_are_computed_whole() -> None:
    ids = torch.cat([prompt(90), prompt(90, 1)])
    mask = torch.ones_like(ids)
    mask[1, 60:] = 0
    for name in ("gemma2", "llama"):
        model = BY_NAME[name].build()
        with enable_prefix_caching(model, num_blocks=64) as handle:
            assert_same(model, input_ids=ids, attention_mask=mask, max_new_tokens=4, times=2)
            assert (handle.last_requests[0].cached_tokens > 0) == (name == "llama")
            mask[1] = 0
            assert_same(model, input_ids=ids, attention_mask=mask, max_new_tokens=4, times=2)
            mask[1, :60] = 1


@pytest.mark.parametrize(
    "options",
    [
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "high"},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"force_words_ids": [[5]], "num_beams": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_loops_of_the_hub_are_left_to_transformers(model: Any, handle: PrefixCaching, options: dict[str, Any]) -> None:
    config = transformers.GenerationConfig(**options)
    with (
        pytest.warns(UserWarning, match="the model's own generate"),
        pytest.raises(ValueError, match="trust_remote_code"),
    ):
        model.generate(prompt(40), max_new_tokens=4, **options)
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(prompt(40), config)
    assert sum(handle.stats().calls_handed_back.values()) == 2
    if "penalty_alpha" in options:
        assert_same(model, input_ids=prompt(40), do_sample=True, **options)
        assert handle.stats().calls_served == 1


def test_inputs_that_are_made_otherwise_go_to_the_model(model: Any) -> None:
    class Shifted(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
            return inputs | {"input_ids": (inputs["input_ids"] + 1) % VOCAB}

    prepare, prefill = model.prepare_inputs_for_generation, model._prefill
    wrapped = functools.wraps(prepare)(lambda ids, **kwargs: prepare((ids + 1) % VOCAB, **kwargs))
    changes = (
        (Shifted(model.config).eval(), {}),
        (model, {"prepare_inputs_for_generation": wrapped}),
        (model, {"prepare_inputs_for_generation": lambda ids, **kwargs: prepare((ids + 1) % VOCAB, **kwargs)}),
        (model, {"_prefill": lambda ids, *args, **kwargs: prefill((ids + 1) % VOCAB, *args, **kwargs)}),
    )
    for subject, change in changes:
        vars(subject).update(change)
        with enable_prefix_caching(subject) as handle:
            with pytest.warns(UserWarning, match="is overridden"):
                assert_same(subject, input_ids=prompt(40))
            assert_same(subject, input_ids=prompt(40))
            assert list(handle.stats().calls_handed_back.values()) == [2]
        for name in change:
            delattr(subject, name)


def test_chunks_of_a_forward_pass_that_names_no_mask(model: Any) -> None:
    """Without a mask, the loop has to learn in another way that it has the cached tokens too."""
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    with enable_prefix_caching(model) as handle:
        assert_same(model, input_ids=prompt(50), prefill_chunk_size=16, times=2)
        assert handle.last_requests[0].cached_tokens == 48


def test_latent_rows_are_kept_as_they_are(storages: list[Any]) -> None:
    """With DeepSeek-V3's rows, they take less than a tenth of the keys and values of 20 heads."""
    sizes = {"num_attention_heads": 20, "num_key_value_heads": 20, "kv_lora_rank": 512, "num_hidden_layers": 1}
    sizes |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    model = Family("", DEEPSEEK.config, DEEPSEEK.model, DEEPSEEK.options | sizes).build()
    with enable_prefix_caching(model, num_blocks=8) as handle:
        assert_same(model, input_ids=prompt(40), times=2)
        assert handle.last_requests[0].cached_tokens >= 32
        ((_, part),) = storages[0].kv
        assert part.bytes_per_block == 16 * (512 + 64) * 4 < 16 * 20 * (192 + 128) * 4 / 10


NOT_SERVED_FAMILIES = [
    (
        Family("rwkv", "RwkvConfig", "RwkvForCausalLM", {"attention_hidden_size": 64}),
        "not kept in a transformers cache",
    ),
    (Family("gpt", "OpenAIGPTConfig", "OpenAIGPTLMHeadModel", {"n_embd": 64, "n_head": 4}), "no transformers cache"),
    (
        Family(
            "dory", "DoryConfig", "DoryForCausalLM", {"num_hidden_layers": 3, "n_input_layers": 1, "n_output_layers": 1}
        ),
        "its forward pass adds layers to its cache",
    ),
]


@pytest.mark.parametrize(("family", "why"), NOT_SERVED_FAMILIES, ids=lambda f: getattr(f, "name", ""))
def test_model_that_is_not_served_keeps_its_generate(family: Family, why: str) -> None:
    model = family.build()
    want = plain(model, input_ids=prompt(40))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        handle = enable_prefix_caching(model)
        assert torch.equal(model.generate(input_ids=prompt(40), max_new_tokens=NEW_TOKENS), want)
    assert [why in str(w.message) for w in told if "prefix caching" in str(w.message)] == [True]
    assert handle.unsupported
    assert handle.stats().calls_handed_back == {handle.unsupported: 1}
    assert handle.stats().hit_rate == 0
    handle.disable()


def test_cache_that_a_config_leaves_out_is_asked_for() -> None:
    model = BY_NAME["mpt"].build()
    assert model.config.use_cache is False  # as MptConfig says, and training often leaves it
    with enable_prefix_caching(model, num_blocks=64) as handle:
        for computed in (40, 8):
            assert count_computed(model, input_ids=prompt(40), max_new_tokens=1) == computed
        assert_same(model, input_ids=prompt(40))
        assert handle.stats().calls_handed_back == {}
        with pytest.warns(UserWarning, match="use_cache=False asks for no cache"):
            assert_same(model, input_ids=prompt(40), use_cache=False)  # the caller's argument
        needs = r"without a cache|requires (a cache|`use_cache=True`)"
        for name in ("assistant_early_exit", "prompt_lookup_num_tokens", "prefill_chunk_size"):
            for generate in (functools.partial(plain, model), model.generate):
                with pytest.raises((RuntimeError, ValueError), match=needs):
                    generate(input_ids=prompt(40), **{name: 1})
        assert_same(model, input_ids=prompt(40))
        assert_same(model, input_ids=prompt(40), cache_implementation="offloaded")  # which needs a GPU
        outputs = {"return_dict_in_generate": True, "output_hidden_states": True}
        for given in (outputs, {}):  # by the call, then by the model's own configuration
            if not given:
                model.generation_config.update(**outputs)
            want, got = both(model, input_ids=prompt(40), **given)  # without a cache, of all tokens in each step
            assert [[h.shape for h in step] for step in got.hidden_states] == [
                [h.shape for h in s] for s in want.hidden_states
            ]


def test_failed_forward_leaves_nothing_findable(model: Any, handle: PrefixCaching) -> None:
    failing = threading.Event()  # it is not compared before each call, other than a list

    def fail(*_: Any) -> None:
        if failing.is_set():
            raise RuntimeError("on purpose")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    assert_same(model, input_ids=prompt(16, 9))  # the hook is noticed, and the model probed
    handle.reset()
    failing.set()
    with pytest.raises(RuntimeError, match="on purpose"):
        model.generate(input_ids=prompt(40), max_new_tokens=NEW_TOKENS)
    hook.remove()
    assert_nothing_held(handle)
    assert handle.stats().cached_blocks == 0
    assert model.config._attn_implementation == "sdpa"
    assert_same(model, input_ids=prompt(40))


def test_changed_dtype_is_looked_at_anew(model: Any, handle: PrefixCaching) -> None:
    for dtype, served in ((torch.bfloat16, True), (torch.float64, True), (torch.float32, True)):
        model.to(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):
                got = model.generate(input_ids=prompt(64), max_new_tokens=NEW_TOKENS)
        assert bool(handle.last_requests) == served
        if dtype != torch.bfloat16:
            assert torch.equal(got, plain(model, input_ids=prompt(64)))


@pytest.mark.parametrize("layers", [0, 1], ids=["after the probe", "during the probe"])
def test_model_that_another_thread_moves_meanwhile_is_probed_again(
    model: Any, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    def probe_moved(model: Any) -> Any:
        model.model.layers[:layers].to(torch.float64)
        try:
            return probe(model)
        finally:
            model.to(torch.float64)

    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patched.setattr(engine, "probe", probe_moved)
        handle = enable_prefix_caching(model, num_blocks=64)
    assert_same(model, input_ids=prompt(40), times=2)
    assert handle.last_requests[0].cached_tokens >= 32
    assert handle.store.probed.specs[0][0].dtype == torch.float64


def test_training_mode_goes_to_the_model_and_survives_enabling(model: Any) -> None:
    model.train()
    model.model.layers[0].eval()
    modes = [m.training for m in model.modules()]
    with enable_prefix_caching(model):
        assert [m.training for m in model.modules()] == modes
        with pytest.warns(UserWarning, match="training mode"):
            assert_same(model, input_ids=prompt(40))


@pytest.mark.parametrize("family", first_quick(["gpt2", "deepseek-v3", "mistral-window"]))
def test_gradients_of_passes_over_the_cache_of_a_result(family: str) -> None:
    """Each pass saves its keys for the backward pass, so a later pass may not write to their buffer."""
    model = BY_NAME[family].build()
    weight, found = model.get_input_embeddings().weight, []
    with enable_prefix_caching(model, num_blocks=64):
        for generate in (functools.partial(plain, model), model.generate):
            cache = cache_of(generate(input_ids=prompt(40), max_new_tokens=4, return_dict_in_generate=True))
            logits = [model(input_ids=prompt(3, seed), **{CACHE: cache}).logits for seed in (1, 2)]
            found.append(torch.autograd.grad(torch.cat(logits).pow(2).sum(), weight)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("later_gradients", [True, False])
@pytest.mark.parametrize("trained", ["q_proj", "v_proj"])
def test_gradients_of_a_part_whose_keys_or_values_need_none(trained: str, later_gradients: bool) -> None:
    """As with adapters: in the first layer, the backward pass of a trained query still needs frozen keys."""
    model = Family("llama", "LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 4}).build()
    weights, found = [p.requires_grad_(trained in name) for name, p in model.named_parameters()], []
    weights = [weight for weight in weights if weight.requires_grad]
    with enable_prefix_caching(model, num_blocks=64):
        for generate in (functools.partial(plain, model), model.generate):
            cache = cache_of(generate(input_ids=prompt(40), max_new_tokens=4, return_dict_in_generate=True))
            logits = [model(input_ids=prompt(3, 1), **{CACHE: cache}).logits]
            with torch.set_grad_enabled(later_gradients):
                logits.append(model(input_ids=prompt(3, 2), **{CACHE: cache}).logits)
            found.append(torch.autograd.grad(torch.cat(logits).pow(2).sum(), weights))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("dropout", [0.5, 0.0])
def test_a_layer_in_training_mode_is_served_unless_it_drops(dropout: float) -> None:
    model = Family("llama", "LlamaConfig", "LlamaForCausalLM", {"attention_dropout": dropout}).build()
    with enable_prefix_caching(model, num_blocks=64) as handle:
        assert_same(model, input_ids=prompt(40))
        model.model.layers[0].train()
        with pytest.warns(UserWarning, match="falls back") if dropout else contextlib.nullcontext():
            assert_same(model, input_ids=prompt(40))
            assert_same(model, input_ids=prompt(40))
        assert handle.stats().calls_served == (1 if dropout else 3)
        model.eval()
        assert_same(model, input_ids=prompt(40))
        assert handle.stats().calls_served == (2 if dropout else 4)


def test_autocast_goes_to_the_model(model: Any, handle: PrefixCaching) -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match="autocast"):
        assert_same(model, input_ids=prompt(40))
    assert_same(model, input_ids=prompt(40))
    assert handle.last_requests[0].cached_tokens == 0


def test_weights_that_parametrize_keeps_are_not_cached(model: Any, handle: PrefixCaching) -> None:
    """Within `parametrize.cached()` a weight does not follow a change of the tensors that it is computed from."""
    projection = torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].self_attn.k_proj)
    scores = {"input_ids": prompt(40), "return_dict_in_generate": True, "output_logits": True}

    def compare() -> None:
        want, got = both(model, **scores)
        torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-5)

    with torch.nn.utils.parametrize.cached():
        with pytest.warns(UserWarning, match="keeps weights as they were"):
            compare()
        projection.parametrizations.weight.original0.data.mul_(9)
        compare()
    compare()
    assert handle.last_requests[0].cached_tokens == 0


class Louder(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        return found * 1.5 if function is torch.nn.functional.silu else found


class Doubled(TorchDispatchMode):
    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operator(*args, **(kwargs or {}))
        return found * 2 if operator is torch.ops.aten.silu.default else found


@pytest.mark.parametrize("mode", [Louder, Doubled])
def test_a_mode_that_changes_operations_goes_to_the_model(model: Any, handle: PrefixCaching, mode: Any) -> None:
    scores = {"input_ids": prompt(40), "return_dict_in_generate": True, "output_logits": True}
    usual = plain(model, **scores)
    for context in (contextlib.nullcontext(), mode(), mode(), torch.device("cpu")):
        with context, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            want, got = both(model, **scores)
        torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-5)
        if isinstance(context, mode):
            assert not torch.allclose(want.logits[0], usual.logits[0], rtol=1e-4, atol=1e-4)
    assert handle.stats().calls_handed_back == {"a mode of torch intercepts operations and may change them": 2}
    assert handle.last_requests[0].cached_tokens == 39


@pytest.mark.filterwarnings("ignore")  # `torch.jit.trace` is deprecated, and warns of each value that it reads
@pytest.mark.parametrize("cached", [False, True])
def test_a_trace_of_generate_fails_as_without_the_cache(model: Any, handle: PrefixCaching, cached: bool) -> None:
    """The whole process crashed when the trace recorded this library's operations."""
    generate = model.generate if cached else functools.partial(plain, model)

    def call(ids: torch.Tensor) -> torch.Tensor:
        tokens: torch.Tensor = generate(input_ids=ids, max_new_tokens=2)
        return tokens

    with pytest.raises(RuntimeError, match="Cannot insert a Tensor that requires grad"):
        torch.jit.trace(call, (prompt(40),), check_trace=False)
    reason = "a mode of torch intercepts operations and may change them"
    assert handle.stats().calls_handed_back == ({reason: 1} if cached else {})


def test_disable_restores_the_model(model: Any) -> None:
    before, config = dict(vars(model)), copy.deepcopy(model.config.to_dict())
    implementation = model.config._attn_implementation
    handle = enable_prefix_caching(model)
    assert_same(model, input_ids=prompt(40))
    handle.disable()
    handle.disable()
    assert vars(model) == before
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == implementation
    again = enable_prefix_caching(model)
    assert_same(model, input_ids=prompt(40))
    again.disable()


def test_storages_of_a_user_stay_resizable(model: Any, tmp_path: Any) -> None:
    """`Tensor.numpy` would fix their sizes. FSDP, for one, frees the storages of weights and allocates them again."""
    inputs, one, document = left_padded(prompt(40), prompt(20)), prompt(40), prompt(40)
    with enable_prefix_caching(model, num_blocks=64, disk=tmp_path) as handle:
        results = [model.generate(**inputs, max_new_tokens=4), model.generate(one, max_new_tokens=4)]
        handle.compress(document)
    tensors = [*inputs.values(), one, document, *results, *model.state_dict().values()]
    assert all(tensor.untyped_storage().resizable() for tensor in tensors)


@pytest.mark.parametrize("name", first_quick(["llama", "mistral-window", "qwen3-next"]))
@pytest.mark.parametrize(("first", "end"), [(3, 40), (40, 49)], ids=["in the prompt", "in the answer"])
def test_processor_that_writes_to_the_tokens(name: str, first: int, end: int) -> None:
    """The cache was computed from the tokens before the write, so calls with the tokens after it must not read it."""
    model = BY_NAME[name].build()

    def write(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == end:
            input_ids[:, first:end] = (input_ids[:, first:end] + 100) % 500
        return scores

    given: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": None, "logits_processor": [write]}
    with enable_prefix_caching(model, num_blocks=64, block_size=8) as handle:
        written = model.generate(prompt(40), **given)
        assert torch.equal(written, plain(model, input_ids=prompt(40), **given))
        for ids in (written, written[:, :49], prompt(40)):
            want, got = both(model, input_ids=ids, return_dict_in_generate=True, output_logits=True)
            torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits))
        assert handle.last_requests[0].cached_tokens >= 32  # the prompt itself is cached


def test_document_keeps_its_tokens(model: Any, handle: PrefixCaching) -> None:
    ids = prompt(40)[0]
    document = handle.compress(ids)
    ids.zero_()
    with document:
        model.generate(torch.cat([prompt(40), prompt(5, 1)], 1), max_new_tokens=2)


def test_global_random_state_is_left_alone(model: Any) -> None:
    state = torch.random.get_rng_state()
    with enable_prefix_caching(model):
        assert torch.equal(torch.random.get_rng_state(), state)


def test_enabling_twice_and_what_is_no_model(model: Any, handle: PrefixCaching) -> None:
    with pytest.raises(
        ValueError, match=r"already enabled; call disable\(\) on its handle, model\.generate\.handle, first"
    ):
        enable_prefix_caching(model)
    assert model.generate.handle is handle
    with pytest.raises(TypeError, match="model: got Linear"):
        enable_prefix_caching(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="model: got str"):
        enable_prefix_caching("gpt2")


@pytest.mark.parametrize(("length", "served"), [(40, True), (58, False), (90, True)])
def test_longrope_is_served_on_either_side_of_its_switch(length: int, served: bool) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0 + 0.5 * i for i in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    options = {"rope_parameters": rope, "original_max_position_embeddings": 64, "max_position_embeddings": 512}
    model = Family("phi3", "Phi3Config", "Phi3ForCausalLM", options).build()
    ids = prompt(length)
    with enable_prefix_caching(model) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.generate(input_ids=ids[:, :32], max_new_tokens=2)  # short factors, the same first blocks
        for _ in range(2):
            assert_same(model, input_ids=ids)
            assert bool(handle.last_requests) == served


LONG, OTHER = prompt(130), prompt(130, 1)
TWO_ROWS = {"input_ids": torch.cat([LONG[:, :65], OTHER[:, :65]])}  # the first is cached, so rows are computed apart
IN_PIECES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "prefill_chunk_size": ({}, [{"input_ids": LONG[:, :96], "prefill_chunk_size": 16}, {"input_ids": LONG}]),
    "rows": ({}, [{"input_ids": LONG[:, :80]}, TWO_ROWS, {"input_ids": OTHER}]),
    "chunks": ({"deterministic": True, "chunk": 32}, [{"input_ids": LONG}]),
}


@pytest.mark.quick
@pytest.mark.parametrize(("options", "calls"), IN_PIECES.values(), ids=IN_PIECES.keys())
def test_longrope_is_not_computed_in_pieces_beyond_its_switch(options: Any, calls: list[dict[str, Any]]) -> None:
    """A pass that ends before the switch has the short factors, also for a prompt that reaches beyond it."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0 + i for i in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, "factor": 8.0}
    model = Family("llama", "LlamaConfig", "LlamaForCausalLM", {"rope_parameters": rope | factors}).build()
    with enable_prefix_caching(model, **options), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in calls:
            want, got = both(model, **call, output_logits=True, return_dict_in_generate=True, eos_token_id=None)
            for ours, own in zip(got.logits, want.logits, strict=True):
                torch.testing.assert_close(ours, own, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_block_sizes(model: Any) -> None:
    for block_size in (1, 12, 64, 256):
        with enable_prefix_caching(model, block_size=block_size) as handle:
            assert_same(model, input_ids=prompt(300), times=2)
            assert handle.last_requests[0].cached_tokens == min(300 // block_size * block_size, 299)


def test_models_of_one_config_take_turns() -> None:
    config = transformers.LlamaConfig(**SMALL | {"eos_token_id": None})
    models = [transformers.LlamaForCausalLM(config).eval() for _ in range(2)]
    want = [plain(m, input_ids=prompt(30), max_new_tokens=12) for m in models]
    same: list[bool] = []

    def work(index: int) -> None:
        for _ in range(3):
            got = models[index].generate(input_ids=prompt(30), max_new_tokens=12)
            same.append(torch.equal(got, want[index]))

    interval = sys.getswitchinterval()
    with enable_prefix_caching(models[0]), enable_prefix_caching(models[1]):
        sys.setswitchinterval(1e-5)
        try:
            in_threads(work, 0, 1, 0, 1)
        finally:
            sys.setswitchinterval(interval)
    assert same == [True] * 12
    assert torch.equal(plain(models[0], input_ids=prompt(30), max_new_tokens=12), want[0])


def test_default_size_of_the_cache(model: Any) -> None:
    bytes_per_block = 2 * 2 * 2 * 16 * 16 * 4  # key and value, layers, heads, head_dim, tokens, float32
    assert settings_module.default_num_blocks(model, bytes_per_block, 16) == 32 * 512 // 16
    assert settings_module.default_num_blocks(model, 1 << 40, 16) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_same_tokens_on_a_gpu(dtype: torch.dtype) -> None:
    from pc.demo._measure import compare_tokens

    model = LLAMA.build().to("cuda", dtype)
    with enable_prefix_caching(model) as handle:
        for _ in range(2):
            ids = prompt(300).cuda()
            want = plain(model, input_ids=ids, return_dict_in_generate=True, output_logits=True)
            got = model.generate(input_ids=ids, max_new_tokens=NEW_TOKENS)
            answers = (want.sequences[0, 300:].tolist(), got[0, 300:].tolist())
            _, ok = compare_tokens(*answers, lambda i: want.logits[i][0].to(dtype))  # noqa: B023
            assert ok
        assert handle.last_requests[0].cached_tokens >= 288  # whole blocks; one store also keeps part of a block
