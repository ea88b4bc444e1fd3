"""Blocks saved to a file: another process with the same model finds them, and any other model raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from generate_cases import FAMILIES, LLAMA, assert_same, prompt  # noqa: E402

from pc.integrations.huggingface import enable_prefix_caching  # noqa: E402
from pc.integrations.huggingface.store import tiers  # noqa: E402
from pc.integrations.huggingface.store.tiers import pack  # noqa: E402


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = LLAMA.build()
    with enable_prefix_caching(model, num_blocks=64) as handle:
        assert_same(model, input_ids=prompt(64))
        handle.save(tmp_path / "blocks")
    return tmp_path / "blocks"


def _other_weights(model: Any) -> Any:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-3
    return model


OTHERS = {
    "weights": (lambda: _other_weights(LLAMA.build()), {}, "another model"),
    "class": (lambda: next(f for f in FAMILIES if f.name == "qwen2").build(), {}, "another model"),
    "dtype": (lambda: LLAMA.build().to(torch.bfloat16), {}, "another model"),
    "block size": (LLAMA.build, {"block_size": 8}, "another block_size"),
}


@pytest.mark.parametrize(("build", "options", "text"), OTHERS.values(), ids=OTHERS.keys())
def test_kv_of_another_is_refused(saved: Path, build: Any, options: dict[str, Any], text: str) -> None:
    model = build()
    with enable_prefix_caching(model, num_blocks=64, **options) as handle, pytest.raises(ValueError, match=text):
        handle.load(saved)


def test_blocks_that_another_call_evicts_meanwhile_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory then holds other text, which was once written under the old hash."""
    model = LLAMA.build()
    packed: list[bytes] = []

    def pack_while_others_generate(*args: Any) -> bytes:
        if not packed:
            model.generate(input_ids=prompt(100, 1), max_new_tokens=4)
        packed.append(pack(*args))
        return packed[-1]

    monkeypatch.setattr(tiers, "pack", pack_while_others_generate)
    with enable_prefix_caching(model, num_blocks=8) as handle:
        assert_same(model, input_ids=prompt(64))
        assert handle.save(tmp_path / "blocks") == len(packed) < 4
    with enable_prefix_caching(model, num_blocks=64) as handle:
        assert handle.load(tmp_path / "blocks") == len(packed)
        assert_same(model, input_ids=prompt(64))


def test_files_of_another_kind(saved: Path, tmp_path: Path) -> None:
    assert saved.stat().st_mode & 0o077 == 0
    (tmp_path / "text").write_text("nothing")
    (tmp_path / "cut").write_bytes(saved.read_bytes()[:2000])
    torch.save({"format": 2}, tmp_path / "newer")
    model = LLAMA.build()
    with enable_prefix_caching(model, num_blocks=64) as handle:
        for name in ("text", "cut", "newer"):
            with pytest.raises(ValueError, match="path: got"):
                handle.load(tmp_path / name)
        with pytest.raises(OSError, match="absent"):
            handle.load(tmp_path / "absent")
        with pytest.raises(OSError, match="absent"):
            handle.save(tmp_path / "absent" / "file")
    with pytest.raises(ValueError, match="needs one that is served"):
        handle.save(tmp_path / "late")
