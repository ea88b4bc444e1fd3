"""SGLang's engine, scheduler and pools with our attention and eviction give the same tokens as with SGLang's."""

from __future__ import annotations

import json
import urllib.request

import pytest

pytest.importorskip("sglang", reason="sglang is not installed: make sglang")

import sglang
import sglang_engine
from vllm_models import save_model

import pc
from benchmarks.engines.vllm_server import started

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model("llama64", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def found(model, tmp_path_factory):
    """Return the engine's answers with its own parts, with ours, and counts of our code's calls."""
    folder = tmp_path_factory.mktemp("answers")
    own, _ = sglang_engine.answers(model, folder, ours=False)
    ours, counts = sglang_engine.answers(model, folder, ours=True)
    return own, ours, counts


@pytest.mark.parametrize("case", ["prefix_hits", "chunks", "together", "full_cache", "evicted", "aborts", "streams"])
def test_answers_are_those_of_torch_native(found, case):
    own, ours, _ = found
    assert own[case] == ours[case]


def test_cases_are_what_they_say(found):
    """The cases include prefix hits, chunks, mixed steps, retractions and evictions, all in our forward."""
    _, ours, counts = found
    assert [each[0][1] for each in ours["prefix_hits"]] == [0, 48, 32]
    assert ours["chunks"][1][0][1] == 288
    assert ours["aborts"][0] == "abort"
    assert ours["streams"][0], "the answer came in one piece"
    steps = counts["step EXTEND"] + counts["step DECODE"]
    assert counts["layer"] == 2 * steps > 0
    assert counts["step EXTEND"] > 0
    assert counts["mixed step"] > 0
    assert counts["step DECODE"] > 0
    assert counts["retraction"] > 0
    assert counts["eviction"] > 0


def test_without_names_that_ours_build_on_sglangs_own_code_answers(model, found, tmp_path, monkeypatch):
    lacking = (
        "sglang.srt.layers.attention.base_attn_backend:AttentionBackend.forward_extend",
        "sglang.srt.mem_cache.unified_cache.unified_tree_core:UnifiedTreeCore._split_node",
    )
    monkeypatch.setenv("SGLANG_LACKS", ",".join(lacking))
    cases = ["prefix_hits", "chunks", "evicted"]
    ours, counts = sglang_engine.answers(model, tmp_path, ours=True, cases=cases)
    assert ours == {case: found[0][case] for case in cases}
    assert counts["layer"] == counts["eviction"] == 0
    log = (tmp_path / "ours.log").read_text()
    for feature, name in zip(("attention", "eviction"), lacking, strict=True):
        assert f"{feature} is off, and SGLang's own code runs in its place: {name}: not there" in log


def test_two_ranks(model, found, tmp_path, monkeypatch):
    """Each rank keeps its own tree and evicts for itself, and all must choose the same pages."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")  # a core for each rank
    cases = ["prefix_hits", "full_cache", "evicted"]
    ours, counts = sglang_engine.answers(model, tmp_path, ours=True, tp_size=2, cases=cases)
    assert ours == {case: found[0][case] for case in cases}
    assert counts["eviction"] > 0
    assert counts["retraction"] > 0


def test_a_model_with_windows(tmp_path):
    """Gemma-3 has windowed layers beside full ones, whose keys SGLang keeps in separate pools."""
    gemma = save_model("gemma3", tmp_path)
    only = {"radix_eviction_policy": "lru", "cases": ["prefix_hits", "chunks", "together", "evicted"]}
    own, _ = sglang_engine.answers(gemma, tmp_path, ours=False, **only)
    ours, counts = sglang_engine.answers(gemma, tmp_path, ours=True, **only)
    assert own == ours
    assert [each[0][1] for each in ours["prefix_hits"]] == [0, 48, 32]
    assert counts["layer"] == 6 * (counts["step EXTEND"] + counts["step DECODE"]) > 0


def test_kernels_in_the_interpreter(model, found, tmp_path, monkeypatch):
    """Our Triton kernels run in the engine, in Triton's interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    ours, counts = sglang_engine.answers(model, tmp_path, ours=True, cases=["prefix_hits"])
    assert ours["prefix_hits"] == found[0]["prefix_hits"]
    assert counts["layer"] > 0


def test_a_trained_model(tmp_path):
    """SmolLM2, which writes meaningful text, gives the tokens of torch_native."""
    from pc.demo import NoTrainedModelError, trained_model_folder

    try:
        folder = str(trained_model_folder())
    except NoTrainedModelError as error:
        pytest.skip(str(error))
    own, _ = sglang_engine.answers(folder, tmp_path, ours=False, cases=["text"])
    ours, counts = sglang_engine.answers(folder, tmp_path, ours=True, cases=["text"])
    assert own == ours
    assert [each[0][1] for each in ours["text"]][1:] == [32, 32]
    assert counts["layer"] == 30 * (counts["step EXTEND"] + counts["step DECODE"]) > 0


def test_streaming_through_the_server(model, found, tmp_path):
    """`sglang serve` runs with the plugin chosen by SGLang's options, and logs what is active."""
    options = {name: value for name, value in sglang_engine.OPTIONS.items() if name != "max_total_tokens"}
    options |= {"model_path": model, "attention_backend": "pc", "radix_eviction_policy": "pc_default"}
    options |= {"log_level": "info", "max_total_tokens": 1024}
    arguments = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        arguments += [flag] if value is True else [flag, str(value)]
    with started("sglang.launch_server", arguments, sglang_engine.environment(None, True)) as server:
        body = {"input_ids": sglang_engine.prompt(90, 30), "stream": True}
        body["sampling_params"] = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
        request = urllib.request.Request(
            f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            lines = [line.decode().strip().removeprefix("data: ") for line in answer if line.strip()]
        assert lines[-1] == "[DONE]"
        assert len(lines) > 2, "the answer came in one piece"
        assert json.loads(lines[-2])["output_ids"] == found[0]["streams"][1]
        said = server.log.read_text()
        assert f"pc {pc.__version__}, sglang {sglang.__version__}: attention by PagedAttnBackend" in said
        assert f"sglang {sglang.__version__}: eviction by pc_default (Hazard)" in said
