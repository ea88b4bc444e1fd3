"""Engines that share blocks: a process uses what another one computed; lost blocks are computed, never misread."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import mooncake_servers
import pytest
import torch
import vllm_engine
import vllm_shared

ROOT = Path(__file__).parents[4]


def prompts():
    return vllm_engine.random_prompts(1, 100, 70, 150)


def start(path, options, environment=None):
    """Start an engine in its own process."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "tests/support/vllm_shared.py"), path, json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | (environment or {}),
    )


def result(process):
    """Return the process's answer."""
    out, errors = process.communicate("", timeout=400)
    lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
    assert lines, errors[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.fixture(scope="module")
def shared(model_path, tmp_path_factory):
    """A directory that another process has filled, and its answer."""
    folder = tmp_path_factory.mktemp("tier")
    options = {"tier": {"tier": "disk", "path": str(folder)}, "prompts": prompts()}
    return folder, result(start(model_path("llama"), options))


def entries(folder):
    """Return the blocks in a tier's directory, by file name."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*/*.block"))}


def values(data):
    """Return the numbers at the end of an entry: two layers' keys and values of 32 tokens, 2 heads of 32."""
    return torch.frombuffer(bytearray(data[-4 * 2 * 2 * 32 * 2 * 32 :]), dtype=torch.float32)


def test_a_second_process_answers_without_computing(model_path, shared, tmp_path):
    folder, first = shared
    assert first["cached"] == [0, 0, 0]
    assert first["computed"] == 100 + 70 + 150 + 3 * 11
    path = model_path("llama")
    second = vllm_shared.answer(path, {"tier": {"tier": "disk", "path": str(folder)}, "prompts": prompts()})
    assert second["tokens"] == first["tokens"]
    assert second["cached"] == [96, 64, 128]
    assert second["computed"] == 4 + 6 + 22 + 3 * 11
    # This process would compute what the first one wrote, but steps of other sizes may round differently.
    vllm_shared.answer(path, {"tier": {"tier": "disk", "path": str(tmp_path)}, "prompts": prompts()})
    theirs, own = entries(folder), entries(tmp_path)
    assert theirs.keys() == own.keys()
    assert len(theirs) >= 3 + 2 + 4
    for name, data in theirs.items():
        torch.testing.assert_close(values(data), values(own[name]), rtol=1e-3, atol=1e-3)


@pytest.fixture(scope="module")
def longer(model_path, tmp_path_factory):
    """Prompts that continue those of `shared`, so that a step completes blocks after those that it loads."""
    folder = tmp_path_factory.mktemp("longer")
    asked = [prompt + prompts()[2][:60] for prompt in prompts()]
    return (
        folder,
        asked,
        vllm_shared.answer(model_path("llama"), {"tier": {"tier": "disk", "path": str(folder)}, "prompts": asked}),
    )


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("left", [0, 4])
def test_blocks_that_are_lost_between_two_questions_are_computed(
    model_path, shared, longer, tmp_path, left, asynchronous
):
    """All blocks are lost, or those from the middle of a prompt on; blocks saved after them are right too."""
    copy = shutil.copytree(shared[0], tmp_path / "copy")
    folder, asked, expected = longer
    tier = {"tier": "vllm_shared:Lossy", "path": str(copy), "left": left}
    engine = {"async_scheduling": asynchronous}
    found = vllm_shared.answer(model_path("llama"), {"tier": tier, "prompts": asked, "engine": engine})
    assert found["tokens"] == expected["tokens"]
    assert found["computed"] == expected["computed"] - 32 * left
    right, kept = entries(shared[0]) | entries(folder), entries(copy)
    assert len(kept) > left
    for name, data in kept.items():  # other batches round differently
        torch.testing.assert_close(values(data), values(right[name]), rtol=1e-3, atol=1e-3)


def test_tight_blocks_and_preemption(model_path, shared, tmp_path):
    folder = shutil.copytree(shared[0], tmp_path / "copy")
    long = {"prompts": prompts() * 2, "max_tokens": 40, "engine": {"num_gpu_blocks_override": 10}}
    with vllm_engine.engine(model_path("llama"), ["attention"], enable_prefix_caching=False) as (llm, _):
        expected, _ = vllm_engine.generate(llm, long["prompts"], max_tokens=40)
    found = vllm_shared.answer(model_path("llama"), {"tier": {"tier": "disk", "path": str(folder)}, **long})
    assert found["preemptions"] > 0
    assert found["tokens"] == expected


def test_another_model_finds_nothing(model_path, shared, tmp_path):
    folder = shutil.copytree(shared[0], tmp_path / "copy")
    options = {"tier": {"tier": "disk", "path": str(folder)}, "prompts": prompts()[:1]}
    assert vllm_shared.answer(model_path("qwen3"), options)["cached"] == [0]


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_models_with_windows(model_path, tmp_path, name):
    """Windows beside full attention, and alone. All blocks are kept and shared."""
    options = {"tier": {"tier": "disk", "path": str(tmp_path)}, "prompts": prompts()}
    first, second = (vllm_shared.answer(model_path(name), options) for _ in range(2))
    assert second["tokens"] == first["tokens"]
    assert (first["cached"], second["cached"]) == ([0, 0, 0], [96, 64, 128])
    assert second["computed"] == 4 + 6 + 22 + 3 * 11


def test_a_hybrid_model_is_refused_at_start_up(model_path, tmp_path):
    options = {"tier": {"tier": "disk", "path": str(tmp_path)}, "prompts": prompts()[:1]}
    with pytest.raises(ValueError, match="kv_transfer_config: got TierConnector for a model with recurrent layers"):
        vllm_shared.answer(model_path("granite_hybrid"), options)


@pytest.mark.skipif(not list(entry_points(group="vllm.general_plugins", name="pc")), reason="pc is not installed here")
def test_two_workers_share_blocks(model_path, shared, tmp_path):
    """With tensor_parallel_size=2 each rank has its own layout, and the tokens are those of one worker."""
    options = {
        "tier": {"tier": "disk", "path": str(tmp_path)},
        "prompts": prompts(),
        "engine": {"tensor_parallel_size": 2},
    }
    environment = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "PC_VLLM": "attention"}
    path = model_path("llama")
    first, second = (result(start(path, options, environment)) for _ in range(2))
    assert first["tokens"] == second["tokens"] == shared[1]["tokens"]
    assert (first["cached"], second["cached"]) == ([0, 0, 0], [96, 64, 128])
    ranks = [sorted(path.name for path in folder.glob("*.block")) for folder in tmp_path.glob("*/")]
    assert ranks == [sorted(entries(shared[0]))] * 2


def test_through_a_mooncake_store_that_dies(model_path, tmp_path):
    """A process keeps its blocks in the store and another reads them. Without the store, it continues alone."""
    path = model_path("llama")
    with mooncake_servers.running(tmp_path) as (metadata, master, process):
        tier = {"tier": "mooncake", "metadata_server": metadata, "master": master}
        tier |= {"segment_bytes": 64 << 20, "transfer_bytes": 16 << 20, "batch_blocks": 8}
        first = start(path, {"tier": tier, "prompts": prompts(), "stops": True})
        for _ in prompts()[1:]:
            wait_for_stop(first)
            first.stdin.write("\n")
            first.stdin.flush()
        wait_for_stop(first)  # it stays alive, since the store keeps blocks in their writer's memory
        second = start(path, {"tier": tier | {"segment_bytes": 0}, "prompts": prompts(), "stops": True})
        wait_for_stop(second)
        mooncake_servers.kill(process)
        found = result(second)
        first.kill()
        first.communicate()
    with vllm_engine.engine(path, ["attention"]) as (llm, _):
        expected, _ = vllm_engine.generate(llm, prompts())
    assert found["tokens"] == expected
    assert found["cached"] == [96, 0, 0]
    assert found["computed"] == 4 + 70 + 150 + 3 * 11


def wait_for_stop(process):
    """Read a process's output until it waits."""
    while not (line := process.stdout.readline()).startswith("STOP"):
        assert line, process.stderr.read()[-3000:]
