"""`python -m benchmarks families`: small models of each class, run with and without the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks.harness.tables import read_rows
from benchmarks.models import families


@pytest.mark.slow
def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "families.csv"
    families.main(["LlamaForCausalLM", "XLNetLMHeadModel", "--output", str(output)])
    printed = capsys.readouterr().out
    assert "1 served" in printed
    assert "0 different" in printed
    first, second = read_rows(output)
    assert [first[name] for name in ("class", "outcome", "reused")] == ["LlamaForCausalLM", "served", "69"]
    assert [second[name] for name in ("class", "outcome")] == ["XLNetLMHeadModel", "falls back"]
    assert second["why"]


def test_an_unknown_class_is_named_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="got NoSuchClass, needs"):
        families.main(["NoSuchClass", "--output", str(tmp_path / "families.csv")])


def test_other_tokens_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pc.integrations.huggingface.store.storage import KVStorage

    read = KVStorage.read

    def wrong(self: KVStorage, index: int, blocks: object, keys: object, values: object) -> None:
        read(self, index, blocks, keys, values)  # type: ignore[arg-type]
        values.neg_()  # type: ignore[attr-defined]

    monkeypatch.setattr(KVStorage, "read", wrong)
    output = tmp_path / "families.csv"
    with pytest.raises(SystemExit) as ended:
        families.main(["LlamaForCausalLM", "--output", str(output)])
    assert ended.value.code == 1
    assert [row["outcome"] for row in read_rows(output)] == ["different"]
