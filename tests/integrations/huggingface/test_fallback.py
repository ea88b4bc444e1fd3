"""If this library fails before the first token, the model's own generate answers, and a warning says why."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from generate_cases import (
    BY_NAME,
    CACHE,
    NEW_TOKENS,
    REFUSED,
    VOCAB,
    assert_nothing_held,
    assert_same,
    both,
    build_model,
    cache_of,
    cached,
    cached_each,
    enabled,
    left_padded,
    plain,
    prompt,
    refused,
)
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from pc.integrations.huggingface import (
    UnsupportedError,
    enable_prefix_caching,
    layers,
    prompts,
    serving,
)
from pc.integrations.huggingface import admit as requests
from pc.integrations.huggingface.engine import Engine
from pc.integrations.huggingface.hooks import REASON
from pc.integrations.huggingface.identity import Identity
from pc.integrations.huggingface.runners import batch, layout
from pc.integrations.huggingface.runners import contiguous as call
from pc.integrations.huggingface.store import blocks

FAILED = "it failed before the first token with KeyError"
BEFORE = {
    "arguments": (serving, "check_arguments"),
    "mode": (serving, "check_mode"),
    "images": (serving, "take_images"),
    "loop": (serving, "loop_of"),
    "checks": (serving, "check_loop"),
    "rope": (serving, "rope_keys"),
    "identity": (Identity, "changed"),
    "engine": (Engine, "check"),
    "prompts": (batch, "prompts_of"),
    "requests": (requests.PromptRequests, "admit"),
    "look": (blocks.RequestBlocks, "look"),
    "computed behind": (prompts.Prompt, "computable"),
    "layout": (batch, "lay_out"),
    "reading": (layout, "fill"),
    "layers": (layers.GrowingLayer, "update"),
    "inputs": (call.WatchedModel, "prepare_inputs_for_generation"),
    "hidden": (call.WatchedModel, "add_hidden"),
}
BEHIND = {
    "publishing": (batch.Batch, "publish"),
    "blocks": (blocks.RequestBlocks, "publish"),
    "answers": (call.WatchedModel, "keep_answers"),
    "hidden states": (call.WatchedModel, "keep_hidden"),
    "content": (call, "record_of"),
}


def fail(*_: Any, **__: Any) -> Any:
    raise KeyError("on purpose")


def draw_and_fail(*_: Any, **__: Any) -> Any:
    torch.rand(5)
    fail()


def sampled(generate: Callable[..., Any], **kwargs: Any) -> tuple[Any, torch.Tensor]:
    """Return a sampled answer, and the next numbers of the random generator."""
    torch.manual_seed(7)
    return generate(**{"max_new_tokens": 4, "do_sample": True, "eos_token_id": None, **kwargs}), torch.rand(3)


def told_of(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return the result of a call, and this library's warnings during the call."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = call()
    return result, [str(w.message) for w in told if str(w.message).startswith("prefix caching")]


@pytest.mark.quick
@pytest.mark.parametrize("where", BEFORE)
def test_what_fails_before_the_first_token(model: Any, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    given = left_padded(prompt(62), prompt(45, 1))  # answers fill a block
    want, then = sampled(lambda **kwargs: type(model).generate(model, **kwargs), **given)
    with enable_prefix_caching(model, num_blocks=64) as handle:
        assert torch.equal(sampled(model.generate, **given)[0], want)
        texts: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(*BEFORE[where], draw_and_fail)
            for again in range(4):
                if again >= 2:
                    handle.reset()  # uncached prompts take another path
                (got, behind), told = told_of(lambda: sampled(model.generate, **given))
                texts += told
                assert torch.equal(got, want)
                assert torch.equal(behind, then)
                assert_nothing_held(handle)
        handed_back = handle.stats().calls_handed_back
        assert set(handed_back) == {FAILED}
        assert handed_back[FAILED] >= 2
        assert [FAILED in text and "on purpose" in text for text in texts] == [True]
        for hit in (0, 44):  # the cache still works
            if not hit:
                handle.reset()
            assert torch.equal(sampled(model.generate, **given)[0], want)
            assert handle.last_requests[1].cached_tokens == hit
        assert handle.stats().calls_handed_back == handed_back


@pytest.mark.quick
@pytest.mark.parametrize("where", BEHIND)
def test_what_fails_behind_the_first_token_only_keeps_less(
    model: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_hidden_states": where == "hidden states"}
    want, then = sampled(lambda **kwargs: type(model).generate(model, **kwargs), input_ids=prompt(60), **options)
    with enable_prefix_caching(model, num_blocks=64) as handle:
        with monkeypatch.context() as patch:
            patch.setattr(*BEHIND[where], fail)
            (got, behind), told = told_of(lambda: sampled(model.generate, input_ids=prompt(60), **options))
        assert torch.equal(got.sequences, want.sequences)
        assert torch.equal(behind, then)
        assert handle.stats().calls_handed_back == {}
        assert [text.partition(": ")[2] for text in told] == [
            "an answer is not cached for later calls: KeyError: 'on purpose'"
        ]
        assert cache_of(got).get_seq_length() == cache_of(want).get_seq_length()
        assert_nothing_held(handle)
        assert_same(model, input_ids=prompt(60))


def test_decoding_that_fails_to_keep_goes_on(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishing fails after the first token, so the call continues and only a warning follows."""
    want = plain(model, input_ids=prompt(60), max_new_tokens=40, eos_token_id=None)
    with enabled(model, num_blocks=64) as handle:
        monkeypatch.setattr(blocks, "_write", fail)
        got, told = told_of(lambda: model.generate(prompt(60), max_new_tokens=40, eos_token_id=None))
        assert torch.equal(got, want)
        assert len(told) == 1
        assert handle.stats().cached_blocks == 0


def test_a_cache_that_is_gone_on_with_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a pass fails in its last layer, the first layer has new tokens, which the fallback must not read."""

    def failing_once(update: Any) -> Any:
        calls: list[int] = []

        def updated(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise KeyError("on purpose")
            return update(*args, **kwargs)

        return updated

    for name, kind in (("llama", layers.GrowingLayer), ("mistral-window", layers.GrowingWindowLayer)):
        model = BY_NAME[name].build()
        options: dict[str, Any] = {"return_dict_in_generate": True, "max_new_tokens": 12, "eos_token_id": None}
        with enabled(model, num_blocks=64):
            first = model.generate(prompt(40), **options)
            ids = torch.cat([first.sequences, prompt(5, 1)], 1)
            want = plain(model, input_ids=ids, eos_token_id=None)
            monkeypatch.setattr(kind, "update", failing_once(kind.update))
            again = {**options, "input_ids": ids, CACHE: cache_of(first), "return_dict_in_generate": False}
            got, told = told_of(lambda: model.generate(**{**again, "max_new_tokens": NEW_TOKENS}))  # noqa: B023
            monkeypatch.undo()
            assert torch.equal(got, want)
            assert len(told) == 1


class Failing:
    """A logits processor, stopping criterion or streamer that raises an error."""

    def __init__(self, after: int = 0) -> None:
        self.after = after

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.after -= 1
        if self.after < 0:
            raise ZeroDivisionError("of the caller")
        return _[-1] if isinstance(_[-1], torch.Tensor) and _[-1].dim() == 2 else torch.zeros(1, dtype=torch.bool)

    put = __call__

    def end(self) -> None:
        pass


OF_THE_CALLER: dict[str, dict[str, Any]] = {
    "argument": {"no_such_option": 1},
    "length": {"max_new_tokens": 0},
    "type": {"max_new_tokens": "many"},
    "prompt": {"input_ids": "text"},
    "ids": {"input_ids": prompt(40) + VOCAB},
    "both": {"generation_config": 3},
    "beams": {"num_beams": 0},
    "processor": {"logits_processor": [Failing()]},
    "late processor": {"logits_processor": [Failing(3)]},
    "streamer": {"streamer": Failing(1)},
    "streamed prompt": {"streamer": Failing()},
    "criterion": {"stopping_criteria": [Failing()]},
    "stop string": {"stop_strings": ["x"]},
    "assistant": {"assistant_model": 5},
}


@pytest.mark.quick
@pytest.mark.parametrize("fallback", ["warn", "raise"])
@pytest.mark.parametrize("case", OF_THE_CALLER)
def test_errors_of_the_caller_come_out_as_they_are(model: Any, case: str, fallback: str) -> None:
    def error_of(generate: Any) -> BaseException:
        options = {"input_ids": prompt(40), "max_new_tokens": 4, **copy.deepcopy(OF_THE_CALLER[case])}
        with pytest.raises(Exception) as caught:  # noqa: PT011
            generate(**options)
        return caught.value

    want = error_of(lambda **kwargs: type(model).generate(model, **kwargs))
    with enable_prefix_caching(model, num_blocks=64, fallback=fallback) as handle:
        got, told = told_of(lambda: error_of(model.generate))
        assert (type(got), str(got)) == (type(want), str(want))
        assert got.__cause__ is None
        assert told == []
        assert handle.stats().calls_handed_back == {}
        assert_nothing_held(handle)
        assert_same(model, input_ids=prompt(40), max_new_tokens=4)


@pytest.mark.filterwarnings("ignore:prefix caching")
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_a_replaced_update_of_cache_layers_is_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, name: str, before: bool
) -> None:
    """Quantized caches are tried out so. Layers that grow have an update of their own."""
    model, kind = BY_NAME[name].build(), transformers.cache_utils.DynamicLayer
    if name == "mistral-window":
        kind = transformers.cache_utils.DynamicSlidingWindowLayer
    own = kind.update
    options: dict[str, Any] = {"max_new_tokens": 2, "return_dict_in_generate": True, "output_logits": True}
    with contextlib.ExitStack() as stack:
        if not before:
            handle = stack.enter_context(enable_prefix_caching(model, num_blocks=64))
            model.generate(prompt(40), **options)
        monkeypatch.setattr(
            kind, "update", lambda self, keys, *rest, **options: own(self, keys.round(), *rest, **options)
        )
        if before:
            handle = stack.enter_context(enable_prefix_caching(model, num_blocks=64))
        got, want = model.generate(prompt(40), **options), plain(model, input_ids=prompt(40), **options)
        torch.testing.assert_close(got.logits, want.logits)
        assert f"update of {kind.__name__} was replaced" in str(handle.unsupported)
        monkeypatch.undo()
        assert_same(model, input_ids=prompt(40))
        assert handle.unsupported is None


@pytest.mark.filterwarnings("ignore:prefix caching")
def test_an_empty_name_of_a_decoding_loop_is_looked_up(model: Any) -> None:
    with enable_prefix_caching(model, num_blocks=64):
        for generate in (type(model).generate.__get__(model), model.generate):
            with pytest.raises(ValueError, match="Repo id must use"):
                generate(prompt(40), custom_generate="")


class Recorder:
    """A streamer that records what it gets, and may fail once."""

    def __init__(self, fails: bool = False) -> None:
        self.got: list[Any] = []
        self.fails = fails

    def put(self, tokens: torch.Tensor) -> None:
        self.got.append(tokens.tolist())
        if self.fails:
            self.fails = False
            raise ZeroDivisionError("of the caller")

    def end(self) -> None:
        self.got.append("end")

    def __repr__(self) -> str:  # in an error of generate
        return "Recorder"


STREAMED: dict[str, dict[str, Any]] = {
    "served": {},
    "an error of the streamer": {"streamer": Recorder(fails=True)},
    "a failure before the loop": {"num_beams": 2},  # an error of the caller
    "a loop that does not stream": {"num_beams": 2, "do_sample": True},
    "a call that falls back": {"use_cache": False},
    "a loop of the hub": {"penalty_alpha": 0.6, "top_k": 4},
    "paged": {"cache_implementation": "paged"},
    "a failure of ours": {},
}


@pytest.mark.quick
@pytest.mark.parametrize("case", STREAMED)
def test_streamers_get_the_same(model: Any, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def streamed(generate: Any) -> tuple[list[Any], str]:
        given = {"streamer": Recorder(), **copy.deepcopy(STREAMED[case])}
        try:
            generate(input_ids=prompt(40), max_new_tokens=4, **given)
        except Exception as error:
            return given["streamer"].got, f"{type(error).__name__}: {error}"
        return given["streamer"].got, ""

    want = streamed(lambda **kwargs: type(model).generate(model, **kwargs))
    with enable_prefix_caching(model, num_blocks=64):
        if case == "a failure of ours":
            monkeypatch.setattr(serving, "loop_of", fail)
        got, _ = told_of(lambda: streamed(model.generate))
        assert got == want


def test_too_many_positional_arguments(model: Any) -> None:
    arguments = (prompt(40), *[None] * 20)
    with pytest.raises(TypeError) as want:
        type(model).generate(model, *arguments)
    with enable_prefix_caching(model, num_blocks=64), pytest.raises(TypeError) as got:
        model.generate(*arguments)
    assert str(got.value) == str(want.value)


def test_memory_of_what_failed_is_given_back_first(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt's tensors must be freed before the fallback, which may then have enough memory."""
    import gc
    import weakref

    held: list[Any] = []
    made = batch.Batch.__init__

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        held.append(weakref.ref(self.cache))
        raise MemoryError("on purpose")

    alive: list[Any] = []
    with enable_prefix_caching(model, num_blocks=64), monkeypatch.context() as patch:
        patch.setattr(batch.Batch, "__init__", make)
        gc.disable()
        try:
            with model.register_forward_pre_hook(lambda *_: alive.append(bool(held) and held[-1]() is not None)):
                told_of(lambda: model.generate(prompt(40), max_new_tokens=2))
        finally:
            gc.enable()
    assert held
    assert not alive[-1]


def test_the_log_says_where_it_failed(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with enable_prefix_caching(model, num_blocks=64), monkeypatch.context() as patch:
        patch.setattr(batch, "prompts_of", fail)
        with caplog.at_level(logging.DEBUG, "pc.integrations.huggingface"):
            told_of(lambda: model.generate(prompt(40), max_new_tokens=2))
    assert "in fail" in caplog.text


NAMED: dict[str, tuple[dict[str, Any], str]] = {
    "blocks": ({"input_ids": prompt(100)}, "the prompt needs more blocks than there are"),
    "max_length": ({"max_length": 60.0, "max_new_tokens": None}, "max_length is a float"),
}


@pytest.mark.quick
@pytest.mark.parametrize("case", [*REFUSED, *NAMED])
def test_raise_names_the_reason(model: Any, case: str) -> None:
    options, reason = NAMED[case] if case in NAMED else refused(case)
    computed: list[int] = []
    model.register_forward_pre_hook(lambda *_: computed.append(1))
    with enable_prefix_caching(model, num_blocks=4, fallback="raise") as handle:
        computed.clear()
        with pytest.raises(UnsupportedError) as caught:
            model.generate(**{"input_ids": prompt(40), "max_new_tokens": 4, **options})
        assert str(caught.value).startswith(reason)
        assert computed == []
        assert_nothing_held(handle)
        assert handle.stats().calls_handed_back == {}
        assert_same(model, input_ids=prompt(40))
        assert handle.stats().calls_served == 1


def test_raise_for_a_model_and_for_a_failure(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    config.decoder_start_token_id = 0
    t5 = transformers.T5ForConditionalGeneration(config).eval()
    handle, told = told_of(lambda: enable_prefix_caching(t5, fallback="raise"))
    assert told == [
        "prefix caching: a call raises UnsupportedError: T5ForConditionalGeneration: it is an encoder-decoder model"
    ]
    with pytest.raises(UnsupportedError, match="it is an encoder-decoder model"):
        t5.generate(prompt(8), max_new_tokens=2)
    handle.disable()
    assert t5.generate(prompt(8), max_new_tokens=2).shape[1]
    with enable_prefix_caching(model, num_blocks=64, fallback="raise"), monkeypatch.context() as patch:
        patch.setattr(batch, "prompts_of", fail)
        with pytest.raises(UnsupportedError, match=FAILED):
            model.generate(prompt(40), max_new_tokens=2)


def test_weights_that_are_offloaded_after_caching_was_enabled(model: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    with enable_prefix_caching(model, num_blocks=64) as handle:
        assert_same(model, input_ids=prompt(40))
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        with pytest.warns(UserWarning, match="meta device"):
            assert_same(model, input_ids=prompt(40))
        assert handle.stats().calls_handed_back == {"some of its weights are on the meta device": 1}


def test_a_model_that_always_fails(model: Any) -> None:
    """As Llama 4 with images in transformers 5.24; the reason once blamed a restored cache."""
    model.forward = fail
    handle, told = told_of(lambda: enable_prefix_caching(model))
    with handle, pytest.raises(KeyError, match="on purpose"):
        model.generate(prompt(40))
    assert handle.unsupported == "LlamaForCausalLM: its forward pass fails (KeyError: 'on purpose')"
    assert len(told) == 1


def test_a_decoder_with_cross_attention() -> None:
    """Its forward pass puts our cache into another one, and a decode step once computed all tokens again behind it."""
    model = build_model("GPT2Config", "GPT2LMHeadModel", n_embd=64, n_layer=2, n_head=4, add_cross_attention=True)
    options = {"input_ids": prompt(40), "return_dict_in_generate": True, "output_logits": True, "eos_token_id": None}
    with enable_prefix_caching(model, num_blocks=64) as handle:
        want, got = both(model, **options)
        torch.testing.assert_close(got.logits, want.logits)
        assert set(handle.stats().calls_handed_back) == {
            "GPT2LMHeadModel: it keeps its state in a cache for cross-attention"
        }


def test_positions_that_leave_out_padding_tokens() -> None:
    """In a pass over a cache such positions count the padding tokens before it, so a prompt with some cannot be cut."""
    sizes = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
    model = build_model("TrOCRConfig", "TrOCRForCausalLM", use_learned_position_embeddings=False, **sizes)
    inside = prompt(60)
    inside[0, 20] = model.config.pad_token_id
    with enabled(model, num_blocks=64) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for given in (left_padded(prompt(60), prompt(45, 1)), {"input_ids": inside, "attention_mask": inside * 0 + 1}):
            for _ in range(2):
                want, got = both(model, **given, return_dict_in_generate=True, output_logits=True)
                torch.testing.assert_close(got.logits, want.logits)
        reason = "it computes other values when it continues from a cached prefix after padding"
        assert handle.stats().calls_handed_back == {reason: 4}
        assert cached_each(model, handle, prompt(60)) == [0, 59]


def _double(module: Any, inputs: Any, output: Any, *_: Any) -> Any:
    return output * 2 if isinstance(module, torch.nn.Embedding) else None


def _double_input(module: Any, inputs: Any) -> Any:
    return (inputs[0] * 2,) if type(module).__name__ == "LlamaMLP" else None


def _double_in_place(module: Any, inputs: Any, output: Any) -> None:
    if isinstance(module, torch.nn.Embedding):
        output.mul_(2)


def _double_input_in_place(module: Any, inputs: Any, output: Any) -> None:
    if type(module).__name__ == "LlamaMLP":
        inputs[0].mul_(2)


ON_ALL: dict[str, Callable[[], Any]] = {
    "after": lambda: register_module_forward_hook(_double),
    "with keywords": lambda: register_module_forward_hook(
        lambda module, inputs, keywords, output: _double(module, inputs, output), with_kwargs=True
    ),
    "before": lambda: register_module_forward_pre_hook(_double_input),
    "in place": lambda: register_module_forward_hook(_double_in_place),
    "input in place": lambda: register_module_forward_hook(_double_input_in_place),
}


@pytest.mark.quick
@pytest.mark.parametrize("case", ON_ALL)
def test_a_hook_on_all_modules(model: Any, case: str) -> None:
    """It belongs to no model, and other KV than without it must neither be read nor cached."""
    with enable_prefix_caching(model, num_blocks=64) as handle:
        without = assert_same(model, input_ids=prompt(40))
        with warnings.catch_warnings(), ON_ALL[case]():
            warnings.simplefilter("ignore")
            for ids in (prompt(40), prompt(40, 1)):
                got = assert_same(model, input_ids=ids)
                assert handle.last_requests == []
            with pytest.raises(ValueError, match=REASON):
                handle.compress(prompt(40))
        assert not torch.equal(got, without)
        assert handle.stats().calls_handed_back == {REASON: 2}
        for ids, hit in ((prompt(40), 39), (prompt(40, 1), 0)):
            assert cached(model, handle, ids) == hit


class _DoublesSilu(TorchDispatchMode):
    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operator(*args, **(kwargs or {}))
        return found * 2 if operator is torch.ops.aten.silu.default else found


@contextlib.contextmanager
def _in_bfloat16() -> Iterator[None]:
    places: list[Any] = [torch.backends.mkldnn.matmul, torch.backends.cuda.matmul]
    if not all(hasattr(place, "fp32_precision") for place in places):
        pytest.skip("this torch names no precision for single backends")
    before = [place.fp32_precision for place in places]
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision


DURING_A_CALL: dict[str, Callable[[], Any]] = {
    "hook on all modules": lambda: register_module_forward_hook(_double),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "mode": _DoublesSilu,
    "precision": _in_bfloat16,
}


@pytest.mark.quick
@pytest.mark.parametrize("case", DURING_A_CALL)
def test_what_changes_values_from_the_middle_of_a_call_on(model: Any, case: str) -> None:
    """What is computed from then on is not cached."""
    with enable_prefix_caching(model, num_blocks=64) as handle, contextlib.ExitStack() as entered:

        def enter(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if ids.shape[1] == 41:
                entered.enter_context(DURING_A_CALL[case]())
            return scores

        got = model.generate(prompt(40), max_new_tokens=40, logits_processor=[enter], eos_token_id=None)
        entered.close()
        assert cached(model, handle, got) == 32


def test_a_hook_on_all_modules_that_only_looks(model: Any) -> None:
    """It is served, except in inference mode, where tensors do not show whether a hook writes to them."""
    seen: list[str] = []
    with torch.inference_mode():
        made_there = prompt(40)
    with (
        enable_prefix_caching(model, num_blocks=64) as handle,
        warnings.catch_warnings(),
        register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__)),
    ):
        warnings.simplefilter("ignore")
        for ids in (prompt(40), made_there):
            assert_same(model, input_ids=ids)
        assert "LlamaMLP" in seen
        assert handle.last_requests[0].cached_tokens == 39
        with torch.inference_mode():
            assert_same(model, input_ids=prompt(40))
        assert handle.stats().calls_handed_back == {"a hook on all modules is registered, in inference mode": 1}


def _sharded(model: Any, kind: str) -> Any:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in model.model.layers:
        if kind == "FSDP 2":
            fully_shard(layer, mesh=mesh)
        else:
            plan = {"up_proj": ColwiseParallel(), "gate_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
            parallelize_module(layer.mlp, mesh, plan)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("kind", ["FSDP 2", "tensor parallelism"])
@pytest.mark.parametrize("processes", [1, 2])
def test_weights_spread_over_processes(kind: str, processes: int, tmp_path: Any) -> None:
    """In two processes nothing is computed before the call, because one process would wait for the other."""
    store = distributed.HashStore() if processes == 1 else FakeStore()
    backend = "gloo" if processes == 1 else "fake"  # the other process is there in name only
    distributed.init_process_group(backend, store=store, rank=0, world_size=processes)
    try:
        model, whole = _sharded(BY_NAME["llama"].build(), kind), BY_NAME["llama"].build()
        if processes == 1:
            with enabled(model, num_blocks=64, disk=tmp_path) as handle:
                for factor in (1.5, 1.0):
                    for expected in (0, 39):
                        want = plain(whole, input_ids=prompt(40))
                        assert torch.equal(model.generate(prompt(40), max_new_tokens=NEW_TOKENS), want)
                        assert handle.last_requests[0].cached_tokens == expected
                    with torch.no_grad():
                        for one in (model, whole):
                            one.model.layers[0].mlp.up_proj.weight.mul_(factor)
            return
        passes: list[Any] = []
        model.model.register_forward_hook(lambda *_: passes.append(1))
        with enable_prefix_caching(model) as handle:
            assert not passes
            model.generate(prompt(40), max_new_tokens=2)
            assert handle.stats().calls_handed_back == {"several processes generate together": 1}
    finally:
        distributed.destroy_process_group()
