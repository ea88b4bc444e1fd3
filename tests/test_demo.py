"""`python -m pc demo` with a short document: what it reuses, that tokens stay the same, and its chart."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from image_cases import GEMMA

from pc.demo import _images, _models, _plot, _run, _trained, _workloads
from pc.integrations.tested import release


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a tenth of the document, three questions, two rounds, and a small untrained model."""
    text = _models.read_document()
    begin, end = text.index("Article IV\n"), text.index("Article VI\n")
    monkeypatch.setattr(_run, "read_document", lambda: text[begin - 2000 : begin + 500] + text[end - 500 : end + 200])
    monkeypatch.setattr(_workloads, "QUESTIONS", _workloads.QUESTIONS[:3])
    monkeypatch.setattr(_run, "QUESTIONS", _workloads.QUESTIONS)
    monkeypatch.setattr(_workloads, "ROUNDS", _workloads.ROUNDS[:2])
    monkeypatch.setattr(_run, "ROUNDS", _workloads.ROUNDS)

    def small(vocab_size: int) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, eos_token_id=None, **sizes))

    def absent() -> Path:
        raise _trained.NoTrainedModelError(f"not installed: {_trained.HOW_TO_GET}")

    monkeypatch.setattr(_models, "build_model", small)
    monkeypatch.setattr(_models, "trained_model_folder", absent)


def rows_of(folder: Path, **options: Any) -> list[dict[str, str]]:
    assert _run.run_demo(None, "cpu", None, 4, 16, folder, **options) == 0, "tokens differ"
    assert (folder / "demo.png").stat().st_size > 10_000
    with (folder / "demo.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.usefixtures("short")
def test_a_prefix_is_reused_and_the_rest_is_computed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(tmp_path)
    assert [row["workload"] for row in rows] == ["document"] * 3 + ["conversation"] * 2
    later = [row for row in rows if row["request"] != "1"]
    for row in later:
        ((start, end),) = _plot.spans_of(row["reused_spans"])
        assert start == 0
        assert end == int(row["reused_tokens"]) > 0.9 * int(row["prompt_tokens"]) - 32
    said = " ".join(capsys.readouterr().out.split())
    assert "untrained" in said
    assert _trained.HOW_TO_GET in said  # how to get the trained model
    for row in rows:
        assert row["model"] == "llama-25m-untrained"
        assert row["question"] in said
        assert row["answer"] == " ".join(row["answer"].split())
        assert len(row["answer"]) > 0


@pytest.mark.usefixtures("short")
def test_a_demo_that_reuses_nothing_says_so_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All calls fall back, as with an untested transformers: the tokens are the same, and nothing is reused."""
    from pc.integrations.huggingface import UnsupportedError, serving

    def refuse(loop: Any) -> None:
        raise UnsupportedError("it is of another time")

    monkeypatch.setattr(serving, "check_loop", refuse)
    with pytest.warns(UserWarning, match="it is of another time"):
        assert _run.run_demo(None, "cpu", None, 4, 16, tmp_path) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "No token was reused" in said
    assert "answers differ" not in said


@pytest.mark.usefixtures("short")
def test_behind_a_gap_the_end_is_reused_too(tmp_path: Path) -> None:
    rows = [row for row in rows_of(tmp_path, reuse="gap") if row["workload"] == "gap"]
    assert len(rows) == 3
    for row in rows[1:]:
        (first, begin), (behind, end) = _plot.spans_of(row["reused_spans"])
        assert first == 0
        assert 0 < begin < behind < end < int(row["prompt_tokens"])


def test_a_second_question_about_an_image_computes_the_question_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pc.integrations.huggingface import api

    if api.IMAGES in api.look().disabled or release(api.look().version)[:2] < GEMMA:
        pytest.skip("needs a transformers that serves images of Gemma 3")
    monkeypatch.setattr(_images, "QUESTIONS", _images.QUESTIONS[:2])
    monkeypatch.setattr(_run, "IMAGE_QUESTIONS", _images.QUESTIONS)
    few = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    monkeypatch.setattr(_images, "TEXT", _images.TEXT | few | {"layer_types": _images.TEXT["layer_types"][1:3]})
    monkeypatch.setattr(_images, "TOWER", _images.TOWER | few)
    rows = rows_of(tmp_path, image=True)
    assert [row["workload"] for row in rows] == ["picture"] * 4
    assert [int(row["reused_tokens"]) < 32 for row in rows] == [True, False, True, False]
    for row in rows[1::2]:
        ((start, end),) = _plot.spans_of(row["reused_spans"])
        assert start == 0
        assert end > _images.TOKENS
        assert int(row["prompt_tokens"]) - end < 40


def test_the_small_model_sees_which_image_it_is() -> None:
    text = _models.read_document()[:5000]
    model, _, encode = _images.load_seeing_model(None, torch.device("cpu"), torch.float32, text)
    with torch.inference_mode():
        one, other = (model(**encode(_images.draw(name), "?")).logits[0, -1] for name in _images.IMAGES)
    assert (one - other).abs().max() > 0.1 * one.std()


def test_images_differ_and_have_one_size() -> None:
    sunrise, target = (_images.draw(name) for name in _images.IMAGES)
    assert sunrise.shape == target.shape == (3, _images.SIZE, _images.SIZE)
    for image in (sunrise, target):
        assert 0 <= image.min() < image.max() <= 1
    assert (sunrise - target).abs().mean() > 0.2


def test_gaps_and_images_are_not_shown_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run.run_demo(None, "cpu", None, 4, 16, tmp_path, reuse="gap", image=True) == 2
    assert "--reuse gap: got it together with --image, needs only one of them" in capsys.readouterr().out


@pytest.mark.usefixtures("short")
def test_compressed_documents_are_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run.run_demo(None, "cpu", None, 4, 16, tmp_path, compress=True) == 0
    said = capsys.readouterr().out
    held = [float(size) for size in re.findall(r"\d+% +│ +([\d.]+) MiB", said)]
    assert len(held) == 3
    assert held[0] > held[1] > held[2] > 0
    assert _run.run_demo(None, "cpu", None, 4, 16, tmp_path, reuse="gap", compress=True) == 2
    assert "--compress: got it together with --image or --reuse gap, needs neither" in capsys.readouterr().out


@pytest.mark.usefixtures("short")
def test_an_unknown_way_of_reuse_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run.run_demo(None, "cpu", None, 4, 16, tmp_path, reuse="suffix") == 2
    assert "--reuse: got 'suffix', needs prefix or gap" in capsys.readouterr().out


def test_the_chart_marks_what_was_reused() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    row = {"workload": "document", "request": "2", "prompt_tokens": "100", "reused_spans": "0-32 64-96"}
    row |= {"ttft_plain_s": "2.0", "ttft_cached_s": "0.5", "ratio": "4.0"}
    figure = _plot.draw_requests(pyplot, [row], {"document": "Questions"})
    prompts, times = figure.axes
    drawn = [(bar.get_x(), bar.get_width()) for bar in prompts.patches]
    assert drawn == [(0, 100), (0, 32), (64, 32)]
    assert [bar.get_width() for bar in times.patches] == [2.0, 0.5]
    assert prompts.get_xlim()[0] == times.get_xlim()[0] == 0
    pyplot.close(figure)
