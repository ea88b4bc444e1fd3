"""The table of tested versions agrees with pyproject.toml, README and the messages to users."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from pc.integrations import tested
from pc.integrations.tested import TESTED, release, requirement, say_untested, text_of, untested

ROOT = Path(__file__).parents[2]


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The installed distributions, with no message about them yet."""
    found: dict[str, str] = {}
    monkeypatch.setattr(tested, "installed", found.get)
    monkeypatch.setattr(tested, "_said", set())
    return found


@pytest.mark.quick
@pytest.mark.parametrize("package", ["transformers", "vllm", "sglang"])
def test_extras_have_the_bounds_of_the_table(package: str) -> None:
    tomllib = pytest.importorskip("tomllib")
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    found = [re.sub(r"\[\w+\]", "", each) for extra in extras.values() for each in extra if each.startswith(package)]
    assert found
    assert set(found) == {requirement(package)}


@pytest.mark.quick
@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "constraints.txt"])
@pytest.mark.parametrize("package", ["torch", "triton"])
def test_pages_name_the_range_of_the_table(package: str, page: str) -> None:
    assert f"{package} {TESTED[package]}" in (ROOT / page).read_text(encoding="utf-8")


def test_the_oldest_of_dependencies_is_the_tables() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for package in ("torch", "triton"):
        assert f'"{package}>={text_of(TESTED[package].oldest)}' in text


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("5.24.0", ""),
        ("5.24.9", ""),
        ("5.5.0", ""),
        ("5.23.0+local", ""),
        ("5.25.0", "transformers 5.25.0 is newer than 5.24, the newest that was tested"),
        ("5.25.0rc1", "transformers 5.25.0rc1 is newer than 5.24, the newest that was tested"),
        ("6.0", "transformers 6.0 is newer than 5.24, the newest that was tested"),
        ("5.4.2", "transformers 5.4.2 is older than 5.5, the oldest that was tested"),
        ("dev", "transformers dev is older than 5.5, the oldest that was tested"),
    ],
)
def test_versions_out_of_the_range_are_untested(version: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TESTED, "transformers", tested.Tested((5, 5), (5, 24)))
    assert untested("transformers", version) == said


def test_numbers_and_texts() -> None:
    assert requirement("engine", tested.Tested((0, 5, 23), (0, 5, 23))) == "engine>=0.5.23,<0.5.24"
    assert str(tested.Tested((0, 5, 23), (0, 5, 23))) == "0.5.23"
    assert str(tested.Tested((2, 11), (2, 15))) == "2.11 to 2.15"
    assert release("2.13.0+cu130") == (2, 13, 0)
    assert release("unknown") == ()


def test_what_is_untested_is_logged_once(versions: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    versions |= {"torch": "9.0", "transformers": text_of(TESTED["transformers"].newest)}
    with caplog.at_level(logging.WARNING, "pc"):
        for _ in range(2):
            found = say_untested("transformers", "torch", "sglang")
            assert found is not None
            assert found.startswith("torch 9.0 is newer than")
        assert say_untested("transformers", "sglang") is None
    assert len(caplog.records) == 1


def test_info_prints_every_framework(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    import pc.info

    versions |= {"transformers": "9.1", "vllm": "0.33.0"}
    monkeypatch.setattr(pc.info, "installed", versions.get)
    found = pc.info.collect_info()["frameworks"]
    assert set(found) == set(TESTED)
    assert found["transformers"].startswith("9.1 (UNTESTED); tested: ")
    assert found["vllm"].startswith("0.33.0; tested: ")
    assert found["sglang"].startswith("not installed; tested: ")
    assert found["torch"].startswith("2.")
    assert all(f"newest tested: {text_of(TESTED[name].newest)}" in text for name, text in found.items())


def test_a_handle_says_that_its_transformers_is_untested(versions: dict[str, str]) -> None:
    transformers = pytest.importorskip("transformers")
    from pc.integrations.huggingface import enable_prefix_caching

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=64, num_attention_heads=4, **sizes)
    ).eval()
    versions |= {"transformers": "9.1"}
    with enable_prefix_caching(model, num_blocks=8) as handle:
        assert handle.untested == f"transformers 9.1 is newer than {text_of(TESTED['transformers'].newest)}, " + (
            "the newest that was tested")  # fmt: skip
        assert handle.unsupported is None
    versions["transformers"] = text_of(TESTED["transformers"].newest)
    with enable_prefix_caching(model, num_blocks=8) as handle:
        assert handle.untested is None
