"""Captured and replayed decode steps give the same tokens, and a captured step reads nothing from the host."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from generate_cases import (
    BY_NAME,
    LLAMA,
    NEW_TOKENS,
    PAGED,
    Family,
    assert_same,
    both,
    enabled,
    first_quick,
    left_padded,
    plain,
    prompt,
)
from graph_double import FailingCapturer, TapeCapturer
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from pc.integrations.huggingface import PrefixCaching, enable_prefix_caching
from pc.integrations.huggingface.admit import PromptRequests
from pc.integrations.huggingface.calls import Calls
from pc.integrations.huggingface.loop import Loop
from pc.integrations.huggingface.probe import probe
from pc.integrations.huggingface.prompts import Prompt, numbered
from pc.integrations.huggingface.runners import graphs as graphs_module
from pc.integrations.huggingface.runners import passes as batch_module
from pc.integrations.huggingface.runners.dispatch import install
from pc.integrations.huggingface.runners.graphs import DecodeSteps, Rehearsal
from pc.integrations.huggingface.runners.packed import decode, layer_windows
from pc.integrations.huggingface.runners.paged import PackedRows
from pc.integrations.huggingface.runners.passes import DecodeBatch
from pc.integrations.huggingface.settings import CacheOptions
from pc.integrations.huggingface.store.kept import PromptStore
from pc.integrations.huggingface.store.storage import model_storage


@pytest.fixture
def capturable(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let steps on the CPU be captured on a tape, and use attention plans, which PyTorch's operators check."""
    monkeypatch.setitem(graphs_module.CAPTURERS, "cpu", TapeCapturer)
    monkeypatch.setattr(batch_module, "needs_plan", lambda device: True)
    return monkeypatch


def ragged(*lengths: int) -> dict[str, torch.Tensor]:
    return left_padded(*(prompt(n, n) for n in lengths))


def replays(handle: PrefixCaching) -> int:
    assert handle.graphs.reason is None
    return handle.graphs.replays


@pytest.mark.parametrize(
    "lengths", first_quick([(16, 40, 1), (33,), (33, 5), (9, 8, 7, 6), (30, 2, 60, 31, 17)]), ids=len
)
def test_batch_sizes_and_table_widths(model: Any, capturable: pytest.MonkeyPatch, lengths: tuple[int, ...]) -> None:
    capturable.setattr(graphs_module, "MIN_WIDTH", 2)
    with enabled(model, block_size=8) as handle:
        for options in ({}, {"do_sample": True}, {"num_return_sequences": 2, "do_sample": True}):
            assert_same(model, **ragged(*lengths), **options, max_new_tokens=40, eos_token_id=None)
        assert handle.graphs.captured > 2
        assert replays(handle) > 60


def test_rows_that_finish_early_leave_smaller_batches(model: Any, capturable: pytest.MonkeyPatch) -> None:
    batch = ragged(40, 30, 20, 10, 5)
    generated = plain(model, **batch, eos_token_id=None, max_new_tokens=40)[:, 40:]
    eos = [generated[1, 8].item(), generated[3, 18].item()]
    ends = torch.isin(generated, torch.tensor(eos)).float().argmax(1)
    assert len(ends.unique()) > 2
    with enabled(model) as handle:
        assert_same(model, **batch, eos_token_id=eos, max_new_tokens=40, times=2)
        assert handle.graphs.captured > 1
        assert replays(handle) > 40


def test_logits_stay_what_they_were(model: Any, capturable: pytest.MonkeyPatch) -> None:
    given: list[tuple[torch.Tensor, torch.Tensor]] = []
    run = graphs_module.DecodeSteps.run

    def keep(*args: Any) -> torch.Tensor:
        logits = run(*args)
        given.append((logits, logits.clone()))
        return logits

    capturable.setattr(graphs_module.DecodeSteps, "run", keep)
    with enable_prefix_caching(model) as handle:
        for lengths in ((40,), (40, 7), (40,)):
            model.generate(**ragged(*lengths), max_new_tokens=8, eos_token_id=None)
        assert replays(handle) > 8
    assert all(torch.equal(a, b) for a, b in given)


def test_the_model_is_compared_before_a_step_runs_its_code_and_during_a_replay(
    model: Any, capturable: pytest.MonkeyPatch
) -> None:
    """A device waits for the host before each replay. So the comparison comes after the replay has begun."""
    told: list[str] = []

    def telling(name: str, function: Any) -> Any:
        return lambda *args: (told.append(name), function(*args))[1]

    capture = TapeCapturer.capture
    capturable.setattr(TapeCapturer, "capture", lambda self, step: telling("replay", capture(self, step)))
    capturable.setattr(graphs_module, "decode", telling("step", graphs_module.decode))
    capturable.setattr(PromptRequests, "publishes", telling("check", PromptRequests.publishes))
    with enable_prefix_caching(model, block_size=64):  # no block fills, so no commit checks
        model.generate(prompt(20), max_new_tokens=9, eos_token_id=None)
    decoding = " ".join(told[told.index("step") - 1 :])
    assert decoding == "check step " * 4 + "replay check " * 4 + "replay check"


def test_failed_capture_is_told_once_and_harmless(model: Any, capturable: pytest.MonkeyPatch) -> None:
    capturable.setitem(graphs_module.CAPTURERS, "cpu", FailingCapturer)
    capturable.setattr(FailingCapturer, "attempts", 0)
    with enabled(model) as handle:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):
                for batch in (ragged(40, 7), ragged(64)):
                    assert_same(model, **batch)
        assert ["out of luck" in str(w.message) for w in told if "prefix caching" in str(w.message)] == [True]
        assert handle.graphs.reason == "its decode step cannot be captured: RuntimeError: out of luck"
        assert (handle.graphs.captured, handle.graphs.replays, FailingCapturer.attempts) == (0, 0, 1)
        assert handle.last_requests[0].cached_tokens == 63


def test_step_that_waits_for_the_device_is_never_captured(model: Any, capturable: pytest.MonkeyPatch) -> None:
    norm = type(model.model.norm)
    forward = norm.forward
    capturable.setattr(norm, "forward", lambda self, x: forward(self, x * (1.0 if x.sum().item() else 0.0)))
    capturable.setattr(TapeCapturer, "capture", lambda self, step: pytest.fail("captured"))
    with enable_prefix_caching(model):
        with pytest.warns(UserWarning, match="_local_scalar_dense"):
            assert_same(model, input_ids=prompt(40))
        assert_same(model, input_ids=prompt(40))


def _replace_parameter(model: Any) -> None:
    weight = model.model.layers[0].self_attn.k_proj.weight
    model.model.layers[0].self_attn.k_proj.weight = torch.nn.Parameter(torch.randn_like(weight))


def _replace_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5


def _scale_logits(model: Any) -> None:
    model.config.logits_scaling = -1.0


def _change_dtype(model: Any) -> None:
    model.to(torch.bfloat16).to(torch.float32)


CHANGES: dict[str, Callable[[Any], None]] = {
    "a parameter": _replace_parameter,
    "a buffer": _replace_buffer,
    "the config": _scale_logits,
    "the dtype": _change_dtype,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_graphs_of_another_model_are_not_replayed(
    capturable: pytest.MonkeyPatch, change: Callable[[Any], None]
) -> None:
    granite = BY_NAME["granite"]
    model = replace(granite, options=granite.options | {"initializer_range": 0.3}).build()
    with enable_prefix_caching(model) as handle:
        before = assert_same(model, input_ids=prompt(40), eos_token_id=None)
        assert handle.graphs.captured == 1
        change(model)
        handle.manager.reset()  # this test is not about blocks
        after = assert_same(model, input_ids=prompt(40), eos_token_id=None)
        assert handle.graphs.captured == 1
        assert not torch.equal(before, after)


class Scaled(torch.nn.Linear):
    """A linear layer with the attributes with which PEFT's layers name their active adapters."""

    active_adapters, disable_adapters, scaling = ("a",), False, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scaling


def test_graphs_of_another_adapter_are_not_replayed(model: Any, capturable: pytest.MonkeyPatch) -> None:
    model.model.layers[0].self_attn.k_proj.__class__ = Scaled
    with enable_prefix_caching(model):
        for scaling in (1.0, 3.0, 1.0):
            model.model.layers[0].self_attn.k_proj.scaling = scaling
            assert_same(model, input_ids=prompt(40))


def test_reset_and_disable_drop_graphs(model: Any, capturable: pytest.MonkeyPatch) -> None:
    handle = enable_prefix_caching(model)
    for drop in (handle.reset, handle.disable):
        assert_same(model, input_ids=prompt(40))
        assert handle.graphs.captured == 1
        drop()
        assert handle.graphs.captured == 0


def _own_forward(model: Any) -> None:
    model.model.norm.forward = model.model.norm.forward


def _split(model: Any) -> None:
    model.model.register_buffer("elsewhere", torch.empty(1, device="meta"))


WHY_EAGER: dict[str, Callable[[Any], Any]] = {
    "model.norm has a hook or a forward of its own": _own_forward,
    "lm_head has a hook or a forward of its own": lambda model: model.lm_head.register_forward_hook(lambda *_: None),
    "a hook on all modules is registered": lambda model: register_module_forward_pre_hook(lambda *_: None),
    "some of the model is not on cpu": _split,
    "dynamic rotary embeddings": lambda model: model.config.rope_parameters.update(rope_type="dynamic"),
}


@pytest.mark.parametrize(("why", "spoil"), WHY_EAGER.items(), ids=WHY_EAGER.keys())
def test_what_cannot_be_captured_runs_eagerly_without_a_word(
    model: Any, capturable: pytest.MonkeyPatch, why: str, spoil: Callable[[Any], Any]
) -> None:
    with enable_prefix_caching(model) as handle, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(model, input_ids=prompt(40))
        assert replays(handle) > 0
        spoiler = spoil(model)
        try:
            assert_same(model, input_ids=prompt(40))
        finally:
            if hasattr(spoiler, "remove"):
                spoiler.remove()
        assert handle.graphs.reason is not None
        assert why in handle.graphs.reason
        assert handle.graphs.captured == 0


def test_a_hook_on_all_modules_that_is_gone_hinders_no_capture(model: Any, capturable: pytest.MonkeyPatch) -> None:
    """Of a hook with keywords, torch keeps an entry after its removal."""
    register_module_forward_hook(lambda *_: None, with_kwargs=True).remove()
    with enable_prefix_caching(model) as handle:
        assert_same(model, input_ids=prompt(40))
        assert handle.graphs.captured == 1


def test_what_the_keyword_says(model: Any, capturable: pytest.MonkeyPatch) -> None:
    with enable_prefix_caching(model, cuda_graphs=False) as handle:
        assert_same(model, input_ids=prompt(40))
        assert handle.graphs == graphs_module.GraphReport(0, 0, NEW_TOKENS - 1, "cuda_graphs=False")
    capturable.delitem(graphs_module.CAPTURERS, "cpu")
    with enable_prefix_caching(model) as handle:
        assert_same(model, input_ids=prompt(40))
        assert handle.graphs.reason == "the model is on cpu"


@pytest.mark.parametrize("family", PAGED, ids=lambda f: f.name)
def test_step_takes_nothing_from_the_host(family: Family) -> None:
    """Run a step on the meta device in place of a GPU, where a copy to the host or a read of a value is an error."""
    model = family.build()
    shapes, meta = probe(model).specs, torch.device("meta")
    specs = {
        layer: (keys._replace(device=meta), values._replace(device=meta)) for layer, (keys, values) in shapes.items()
    }
    model = model.to("meta")
    model.set_experts_implementation("batched_mm")  # transformers' choice for decoding on a GPU
    storage = model_storage(model, CacheOptions(8, 16), specs, layer_windows(model.config), {})
    groups, table = len(storage.groups), np.arange(3, dtype=np.int32)
    batch = DecodeBatch(4, 16, pinned=False, groups=groups)
    batch.write([[table, table]] * groups, np.array([34, 34]), [1, 2], [np.array([34, 34])] * groups)
    batch.on(model.device)
    with torch.no_grad(), Rehearsal() as rehearsal:
        install(model)
        logits = decode(model, storage, batch)
    assert rehearsal.problem is None
    assert logits.shape == (4, model.config.vocab_size)


FORBIDDEN: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "item": (lambda x: x.sum().item(), "reads a value"),
    "equal": (lambda x: torch.equal(x, x), "reads a value"),
    "nonzero": (lambda x: x.nonzero(), "shape depends on values"),
    "mask": (lambda x: x[x > 0], "shape depends on values"),
    "written mask": (lambda x: x.index_put_((x > 0,), x[:1]), "shape depends on values"),
    "to the device": (lambda x: x[:1].to("meta"), "copies between cpu, meta"),
    "a constant": (lambda x: torch.zeros(2, device="meta").copy_(x.sum()), "copies between cpu, meta"),
}


@pytest.mark.parametrize(("run", "says"), FORBIDDEN.values(), ids=FORBIDDEN.keys())
def test_rehearsal_notes_what_a_capture_cannot_take(run: Callable[[torch.Tensor], Any], says: str) -> None:
    with Rehearsal() as rehearsal:
        run(torch.arange(3.0))
    assert rehearsal.problem is not None
    assert says in rehearsal.problem


def test_rehearsal_lets_scalars_of_the_host_pass() -> None:
    with Rehearsal() as rehearsal:
        x = torch.ones(3, device="meta") * torch.tensor(2.0)
        x[torch.zeros(2, dtype=torch.int64, device="meta")].add_(1)
    assert rehearsal.problem is None


def test_merged_blocks_are_read_and_replaced_ones_given_back(model: Any, capturable: pytest.MonkeyPatch) -> None:
    install(model)
    store, ids = PromptStore(model, CacheOptions(64, 8), probe(model)), prompt(12)
    manager, admitted, config = store.manager, PromptRequests(store, ()), transformers.GenerationConfig()
    loop = Loop(model.generate, "sample", model, ids, config, {"stopping_criteria": []}, {}, False)
    rows = [Prompt(numbered(), ids[0].numpy(), 0, [0]) for _ in "ab"]
    requests = PackedRows(admitted, loop, rows, Calls(), DecodeSteps(True, pytest.fail))
    with torch.no_grad():
        requests.read_prompts()
        for token in range(10, 22):
            requests.decode([token, token])
            tables = [set(row.blocks.tables[0].tolist()) for row in requests.prompts]
            for row in requests.prompts:
                table = manager.block_table(row.request_id).tolist()
                assert row.blocks.tables[0].tolist() == table
            merged, held = len(tables[0] & tables[1]), len(tables[0] | tables[1])
            retired = sum(row.blocks.unsettled for row in requests.prompts)
            assert merged == requests.prompts[0].blocks.length // 8
            assert manager.stats().held_blocks == held + retired
    requests.close()
    manager.check()
    assert manager.stats().held_blocks == 0


def test_decode_batch_brings_what_has_changed() -> None:
    batch = DecodeBatch(4, 3, pinned=False)
    cpu = torch.device("cpu")
    device = torch.zeros_like(batch._staging)  # a copy, as on a GPU
    batch._on_device[cpu] = (device, batch._views(device))
    first, second = np.array([5, 6], np.int32), np.array([7], np.int32)
    batch.write([[first, second]], np.array([20, 3]), [11, 12], [np.array([100, 115])])
    tokens, positions = batch.inputs(cpu)
    slots, tables, seq_lens, starts = batch.on(cpu)
    assert tokens.tolist() == [[11, 12, 0, 0]]
    assert positions.tolist() == [[20, 3, 0, 0]]
    assert slots.tolist() == [100, 115, -1, -1]
    assert tables.tolist() == [[5, 6, -1], [7, -1, -1], [-1] * 3, [-1] * 3]
    assert (seq_lens.tolist(), starts.tolist()) == ([21, 4, 0, 0], [0, 1, 2, 2, 2])
    assert all(t.data_ptr() % 16 == device.data_ptr() % 16 for t in (tokens, positions, *batch.on(cpu)))
    batch._tables[0][:] = 99  # only a table that is a new array is written
    longer = np.array([5, 6, 8], np.int32)
    batch.write([[longer]], np.array([32]), [13], [np.array([128])])
    assert (slots.tolist(), tables[0].tolist(), tables[1].tolist()) == ([128, -1, -1, -1], [5, 6, 8], [99] * 3)
    assert (tokens.tolist(), seq_lens.tolist(), starts.tolist()) == ([[13, 0, 0, 0]], [33, 0, 0, 0], [0, 1, 1, 1, 1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral-window", "gpt-oss"])
def test_replays_on_a_gpu(name: str) -> None:
    model = BY_NAME[name].build().to("cuda")
    with enable_prefix_caching(model) as handle:
        for lengths in ((40,), (30, 2, 60), (40,)):
            batch = {k: v.cuda() for k, v in ragged(*lengths).items()}
            want, got = both(model, **batch, max_new_tokens=40, eos_token_id=None)
            assert torch.equal(want, got)
        assert replays(handle) > 0


@pytest.mark.gpu
def test_generate_goes_on_after_a_failed_capture_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LLAMA.build().to("cuda")
    norm = type(model.model.norm)
    forward = norm.forward

    def wait(self: Any, x: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            x.sum().item()
        return forward(self, x)

    monkeypatch.setattr(norm, "forward", wait)
    stream = torch.cuda.current_stream()
    with enable_prefix_caching(model) as handle:
        batch = {k: v.cuda() for k, v in ragged(30, 2).items()}
        with pytest.warns(UserWarning, match="cannot be captured"):
            model.generate(**batch, max_new_tokens=20, do_sample=True, eos_token_id=None)
        assert torch.cuda.current_stream() == stream
        want, got = both(model, **batch, do_sample=True, eos_token_id=None)
        assert torch.equal(want, got)
        assert handle.graphs.replays == 0
