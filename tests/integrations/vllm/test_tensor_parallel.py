"""Two tensor-parallel workers with our backend and policy give the tokens of one worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "support" / "vllm_parallel.py"


def run(model, workers):
    environment = {**os.environ, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), model, str(workers)],
        capture_output=True, text=True, check=False, env=environment, timeout=560,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


@pytest.mark.skipif(not list(entry_points(group="vllm.general_plugins", name="pc")), reason="pc is not installed here")
def test_two_workers_give_the_tokens_of_one(model_path):
    path = model_path("llama")
    one, two = run(path, 1), run(path, 2)
    assert two["found"] == one["found"]
    assert sum(two["found"][1][1]) > 0
    assert two["attention"] == ["PagedAttention"] * 2
    assert two["scheduler"] == "PolicyScheduler"
    assert two["counts"] == one["counts"] == 1
    assert two["compressed"] == one["compressed"]
    assert one["compressed"] != one["found"][1][0][2:]
