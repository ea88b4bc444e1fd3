"""Every program of examples/ runs as a user would run it, and prints what it must."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
HELPERS = {"small_model", "paged_model"}
SAYS = {
    "benchmark_kernel": r"mine \d+ us, largest error",
    "chat_server": r"bob: \d+ tokens, \d+ of them reused",
    "compressed_document": r"(?s)100% of (\d+) tokens: .* MiB.*20% of \1 tokens: .*; heads keep \d+ to \d+",
    "custom_model": r"1076 tokens, 20 computed",
    "eviction_policy": r"10% +0\.\d+",
    "evicted_middle": r"304 of \d+ tokens computed again: .* 0\.00000\d+\nwithout them: 0\.[1-9]",
    "reuse_behind_another_prefix": r"the tenth that changes most +0\.\d+\n +all of them +0\.0000",
    "documents_in_another_order": r"(?s)0 found elsewhere.*[1-9]\d\d+ found elsewhere, [1-9]\d+ of those",
    "dropped_tool_results": r"turn 6: \d+ tokens, \d\d\d? computed, [1-9]\d\d+ moved",
    "edited_in_the_middle": r" 10% again: +\d+ of \d+ tokens .* \d\.\d+\n100% again: .* -?0\.000000",
    "hidden_states": r"two: hidden states of 302 tokens, 14 computed",
    "sparse_methods": r"Quest-like pages +768 tokens a head: as computed densely",
    "tree_speculation": r"48 tokens as one at a time, in \d+ calls instead of 47",
    "serve": r"bob: (\d+) tokens, \d{4} of them found in blocks",
}
SAYS_TRAINED = {
    "chat_server": r"the Supreme Court",
    "custom_model": r"judicial power vested\? In the Supreme Court",
    "evicted_middle": r"next word: In; .* computed again: In",
    "reuse_behind_another_prefix": SAYS["reuse_behind_another_prefix"],
    "sparse_methods": SAYS["sparse_methods"],
}
"""Examples that use the trained model if it is installed. The quick tests pass `--untrained`."""
NEEDS = {"serve": ("fastapi", "uvicorn", "openai", "accelerate", "psutil")}


def test_every_example_is_listed_and_run() -> None:
    programs = {path.stem for path in EXAMPLES.glob("*.py")} - HELPERS
    assert programs == set(SAYS)
    assert programs == set(re.findall(r"\]\((\w+)\.py\)", (EXAMPLES / "README.md").read_text(encoding="utf-8")))


QUICK = {"tree_speculation"}


def run(tmp_path: Path, name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in sorted(SAYS)])
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    for package in ("transformers", *NEEDS.get(name, ())):
        pytest.importorskip(package)
    said = run(tmp_path, name, *(["--untrained"] if name in SAYS_TRAINED else []))
    assert re.search(SAYS[name], said), said


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SAYS_TRAINED))
def test_an_example_asks_the_trained_model(name: str, tmp_path: Path, trained_model: Path) -> None:
    said = run(tmp_path, name)
    assert re.search(SAYS_TRAINED[name], said), said


def test_without_the_trained_model_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import pc.demo

    def missing() -> Path:
        raise pc.demo.NoTrainedModelError("how to get it")

    pytest.importorskip("transformers")
    monkeypatch.setattr(pc.demo, "trained_model_folder", missing)
    monkeypatch.syspath_prepend(EXAMPLES)
    model, _ = importlib.import_module("small_model").load()
    assert model.config.num_hidden_layers == 4
    assert "whose words mean nothing: how to get it" in capsys.readouterr().err


NOTEBOOK = EXAMPLES / "cache_at_work.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_and_says_what_it_says_on_the_page(
    monkeypatch: pytest.MonkeyPatch, trained_model: Path
) -> None:
    pytest.importorskip("ipykernel")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("transformers")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    stored, fresh = (nbformat.read(NOTEBOOK, as_version=4) for _ in range(2))
    nbclient.NotebookClient(fresh, timeout=240, resources={"metadata": {"path": str(EXAMPLES)}}).execute()

    def results(cell):
        outputs = [output.get("data", {}) for output in cell.get("outputs", ())]
        return ["plot" if "image/png" in data else data["text/plain"] for data in outputs if data]

    assert [results(cell) for cell in fresh.cells] == [results(cell) for cell in stored.cells]
    assert sum(results(cell).count("plot") for cell in stored.cells) == 3


def test_the_notebook_holds_nothing_of_the_machine_it_ran_on() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    texts = [text for cell in cells for output in cell.get("outputs", ()) for text in _texts(output)]
    assert not [text for text in texts if re.search(r"/\w+/\w+|\.py:\d+", text)]
    assert all(output["output_type"] != "stream" for cell in cells for output in cell.get("outputs", ()))


def _texts(output: dict) -> list[str]:
    data = output.get("data", {"text": output.get("text", "")})
    return ["".join(value) for kind, value in data.items() if kind.startswith("text")]
