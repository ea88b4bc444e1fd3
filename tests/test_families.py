"""`python -m benchmarks families`: small models of each class, run with and without the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks.models import families


@pytest.mark.slow
def test_rows_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "table.md"
    assert families.main(["LlamaForCausalLM", "XLNetLMHeadModel", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "1 served" in printed
    assert "0 different" in printed
    lines = output.read_text().splitlines()
    assert lines[2] == "| LlamaForCausalLM | served | 69 |  |"
    assert lines[3].startswith("| XLNetLMHeadModel | falls back |")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["NoSuchClass"], "got NoSuchClass, needs"),
        (["LlamaForCausalLM", "--output", "/proc/none/table.md"], "/proc/none"),
    ],
)
def test_what_cannot_be_is_said_before_the_work(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        families.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_other_tokens_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from pc.integrations.huggingface.store.storage import KVStorage

    read = KVStorage.read

    def wrong(self: KVStorage, index: int, blocks: object, keys: object, values: object) -> None:
        read(self, index, blocks, keys, values)  # type: ignore[arg-type]
        values.neg_()  # type: ignore[attr-defined]

    monkeypatch.setattr(KVStorage, "read", wrong)
    assert families.main(["LlamaForCausalLM"]) == 1
