"""Options of `enable_prefix_caching` that are refused by name, before anything is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pc.integrations.huggingface import enable_prefix_caching

ANYWHERE = {"reuse": "anywhere"}
BITS = {"deterministic": True}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"block_size": 0}, ValueError, "block_size: got 0, needs at least 1"),
    ({"block_size": 16.0}, TypeError, "block_size: got float"),
    ({"num_blocks": 0}, ValueError, "num_blocks: got 0"),
    ({"num_blocks": "many"}, TypeError, "num_blocks: got str"),
    ({"policy": "nonsense"}, ValueError, "policy"),
    ({"reuse": "all"}, ValueError, "reuse: got 'all'"),
    ({"host_blocks": -1}, ValueError, "host_blocks: got -1"),
    ({"host_blocks": 1.5}, TypeError, "host_blocks: got float"),
    ({"window_blocks": 0}, ValueError, "window_blocks: got 0"),
    ({"window_blocks": 1.5}, TypeError, "window_blocks: got float"),
    ({"cuda_graphs": "yes"}, TypeError, "cuda_graphs: got str, needs a bool or None"),
    ({"cuda_graphs": True}, ValueError, "cuda_graphs: got True, needs .* the model is on cpu"),
    ({"fallback": "ignore"}, ValueError, "fallback: got 'ignore', needs 'warn' or 'raise'"),
    ({"disk": 3}, TypeError, "disk: got int"),
    ({"disk": ""}, ValueError, "disk: got '', needs a directory"),
    ({"disk_bytes": 1 << 20}, ValueError, "disk_bytes: got 1048576 without disk"),
    ({"disk": "x", "disk_bytes": 0}, ValueError, "disk_bytes: got 0"),
    ({"disk": "x", "disk_bytes": 1.5}, TypeError, "disk_bytes: got float"),
    ({"recompute": 0.1}, ValueError, "recompute: got 0.1 with reuse='prefix', needs reuse=\"anywhere\""),
    (ANYWHERE | {"recompute": 1.5}, ValueError, "recompute: got 1.5, needs 0 to 1"),
    (ANYWHERE | {"recompute": -0.1}, ValueError, "recompute: got -0.1, needs 0 to 1"),
    (ANYWHERE | {"recompute": float("nan")}, ValueError, "recompute: got nan, needs 0 to 1"),
    (ANYWHERE | {"recompute": "0.1"}, TypeError, "recompute: got str, needs a number from 0 to 1"),
    (ANYWHERE | {"recompute": True}, TypeError, "recompute: got bool"),
    ({"deterministic": 1}, TypeError, "deterministic: got int, needs a bool"),
    (BITS | {"chunk": 40}, ValueError, "chunk: got 40, needs a multiple of block_size=16"),
    (BITS | {"chunk": 0}, ValueError, "chunk: got 0, needs at least 1"),
    (BITS | {"chunk": 32.0}, TypeError, "chunk: got float, needs an int"),
    (BITS | ANYWHERE, ValueError, 'deterministic: got True with reuse="anywhere"'),
    (BITS | {"cuda_graphs": True}, ValueError, "deterministic: got True with cuda_graphs=True"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("options", "error", "text"), REFUSED, ids=str)
def test_refused_by_name(
    model: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    error: type[Exception],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=text):
        enable_prefix_caching(model, **options)
    assert "generate" not in vars(model)
    assert not list(tmp_path.iterdir())
