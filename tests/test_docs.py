"""The snippets of README and docs run, in order, each page in its own namespace."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.quick  # each page, name and command

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPET = re.compile(r"(<!-- not run:[^>]*-->\n)?```python\n(.*?)```", re.DOTALL)


def snippets(page: Path) -> list[str]:
    """Return the Python blocks of a page, except those after a comment `<!-- not run: why -->`."""
    return [code for skipped, code in SNIPPET.findall(page.read_text(encoding="utf-8")) if not skipped]


@pytest.mark.parametrize("page", [p for p in PAGES if snippets(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    import pc.demo
    from pc.demo._models import train_tokenizer

    # No hub is reached. Any name gives a small model and its tokenizer.
    for name in ("contract.txt", "LICENSE"):
        (tmp_path / name).write_text("the party of the first part " * 40)
    monkeypatch.chdir(tmp_path)
    tokenizer = train_tokenizer((tmp_path / "contract.txt").read_text(), 300)
    config = transformers.LlamaConfig(vocab_size=300, hidden_size=64, intermediate_size=64, num_hidden_layers=2)
    model = transformers.LlamaForCausalLM(config).eval()
    for auto, result in (("AutoTokenizer", tokenizer), ("AutoModelForCausalLM", model)):
        monkeypatch.setattr(getattr(transformers, auto), "from_pretrained", lambda *_, result=result, **__: result)
    build_pipeline = transformers.pipeline  # loading it makes transformers a new module
    monkeypatch.setattr(
        sys.modules["transformers"], "pipeline", lambda task, _: build_pipeline(task, model, tokenizer=tokenizer)
    )
    monkeypatch.setattr(pc.demo, "trained_model_folder", lambda: tmp_path)
    namespace: dict[str, Any] = {"__name__": "__snippet__"}
    for number, code in enumerate(snippets(page)):
        exec(compile(code, f"{page.name}, snippet {number}", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_navigation_names_each_page_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    entries = re.findall(r"- ([\w ]+): ([\w/]+\.md)", navigation)
    assert len(entries) > 10
    for number in (0, 1):
        named = [entry[number] for entry in entries]
        assert sorted(named) == sorted(set(named))
    assert [page for _, page in entries if not (ROOT / "docs" / page).exists()] == []
