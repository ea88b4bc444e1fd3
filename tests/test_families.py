"""`python -m pc families`: classes built small and run with and without the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from pc import families


def test_rows_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "table.md"
    assert families.run_families(["LlamaForCausalLM", "XLNetLMHeadModel", "NoSuchClass"], output) == 0
    printed = capsys.readouterr().out
    assert "1 served" in printed
    assert "0 different" in printed
    lines = output.read_text().splitlines()
    assert lines[2] == "| LlamaForCausalLM | served | 69 |  |"
    assert lines[3].startswith("| XLNetLMHeadModel | falls back |")
    assert "NoSuchClass" in lines[4]


def test_other_tokens_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from pc.integrations.huggingface.contiguous.storage import KVStorage

    read = KVStorage.read

    def wrong(self: KVStorage, index: int, blocks: object, keys: object, values: object) -> None:
        read(self, index, blocks, keys, values)  # type: ignore[arg-type]
        values.neg_()  # type: ignore[attr-defined]

    monkeypatch.setattr(KVStorage, "read", wrong)
    assert families.run_families(["LlamaForCausalLM"]) == 1
