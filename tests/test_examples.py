"""Every program of examples/ runs as a user would run it, and says what it is there to say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
HELPERS = {"small_model"}
SAYS = {
    "benchmark_kernel": r"mine \d+ us, largest error",
    "chat_server": r"bob: 393 tokens, 384 of them reused",
    "custom_model": r"second: 204 tokens, 12 computed",
    "eviction_policy": r"10% +0\.\d+",
    "hidden_states": r"two: hidden states of 302 tokens, 14 computed",
    "serve": r"bob: (\d+) tokens, \d{3} of them found in blocks",
}
NEEDS = {"serve": ("fastapi", "uvicorn", "openai", "accelerate", "psutil")}


def test_every_example_is_listed_and_run() -> None:
    programs = {path.stem for path in EXAMPLES.glob("*.py")} - HELPERS
    assert programs == set(SAYS)
    assert programs == set(re.findall(r"\]\((\w+)\.py\)", (EXAMPLES / "README.md").read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", sorted(SAYS))
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    for package in ("transformers", *NEEDS.get(name, ())):
        pytest.importorskip(package)
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(SAYS[name], done.stdout), done.stdout
