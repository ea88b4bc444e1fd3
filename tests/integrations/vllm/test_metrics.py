"""Counters of the policy in vLLM's /metrics, without a change of vLLM's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm
import vllm_engine
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from pc.integrations.hints import retention_hints
from pc.integrations.vllm import metrics

DASHBOARD = Path(__file__).parents[3] / "examples" / "vllm_dashboard.json"
LABELS = {"model_name": "model", "engine": "0"}


def configuration(model="model", engine=0):
    return SimpleNamespace(
        model_config=SimpleNamespace(served_model_name=[model, "another"]),
        parallel_config=SimpleNamespace(data_parallel_index=engine),
    )


@pytest.fixture
def served(monkeypatch, tmp_path):
    """A registry as it is served, for a process whose schedulers write into a folder."""
    monkeypatch.setenv(metrics.FOLDER, str(tmp_path))
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))
    return registry


def values(registry, labels=LABELS):
    counters = {name: registry.get_sample_value(f"pc:{name}_total", labels) for name in metrics.COUNTERS}
    return counters | {name: registry.get_sample_value(f"pc:{name}", labels) for name in metrics.GAUGES}


def test_counts_are_served_with_the_labels_of_vllms_own(served):
    counts, zero = metrics.policy_counts(configuration()), dict.fromkeys((*metrics.COUNTERS, *metrics.GAUGES), 0)
    assert values(served) == zero
    for kept in (5, 0):
        counts({"evicted_blocks": 7 - kept, "hints": 1, "kept_blocks": kept})
        assert values(served) == zero | {"evicted_blocks": 7 - kept, "hints": 1, "kept_blocks": kept}
    other = metrics.policy_counts(configuration(engine=1))
    other({"evicted_blocks": 100})
    assert values(served)["evicted_blocks"] == 7
    assert values(served, LABELS | {"engine": "1"}) == zero | {"evicted_blocks": 100}


def test_an_engine_that_was_started_again_counts_on(served):
    metrics.policy_counts(configuration())({"evicted_blocks": 7, "kept_blocks": 3})
    again = metrics.policy_counts(configuration())
    assert values(served)["evicted_blocks"] == 7
    again({"evicted_blocks": 2, "kept_blocks": 1})
    found = values(served)
    assert (found["evicted_blocks"], found["kept_blocks"]) == (9, 1)
    text = generate_latest(served).decode()
    assert text.count("pc:evicted_blocks_total{") == 1


def test_a_scheduler_of_another_process_is_served(served, tmp_path):
    code = (
        "from types import SimpleNamespace as S; from pc.integrations.vllm.metrics import policy_counts; "
        "policy_counts(S(model_config=S(served_model_name='model'), parallel_config=S(data_parallel_index=0)))"
        "({'hints': 4}); import os; os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert values(served)["hints"] == 4


def test_nothing_is_written_where_nobody_reads_it(monkeypatch, tmp_path):
    monkeypatch.delenv(metrics.FOLDER, raising=False)
    metrics.policy_counts(configuration())({"evicted_blocks": 7})
    assert list(tmp_path.iterdir()) == []


def test_several_api_processes_read_prometheus_own_files(tmp_path):
    """vLLM sets this variable if it serves /metrics from several processes."""
    code = (
        "from types import SimpleNamespace as S; from pc.integrations.vllm import metrics; metrics.export_counts(); "
        "counts = metrics.policy_counts(S(model_config=S(served_model_name='model'), parallel_config=S())); "
        "counts({'hints': 4, 'kept_blocks': 2}); counts({'hints': 6, 'kept_blocks': 1})"
    )
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))
    assert registry.get_sample_value("pc:hints_total", LABELS) == 6
    assert registry.get_sample_value("pc:kept_blocks", LABELS) == 1


def test_the_folder_goes_with_the_process_that_made_it(monkeypatch):
    code = "import os; from pc.integrations.vllm import metrics as m; m.export_counts(); print(os.environ[m.FOLDER])"
    monkeypatch.delenv(metrics.FOLDER, raising=False)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "pc-vllm-" in done.stdout
    assert not Path(done.stdout.strip()).exists()


def test_the_dashboard_asks_for_metrics_that_are_there():
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    asked = {name for panel in panels for target in panel["targets"] for name in names_in(target["expr"])}
    ours = {f"pc:{name}_total" for name in metrics.COUNTERS} | {f"pc:{name}" for name in metrics.GAUGES}
    assert {name for name in asked if name.startswith("pc:")} == ours
    theirs = "".join(path.read_text(encoding="utf-8") for path in Path(vllm.__file__).parent.rglob("*.py"))
    for name in asked - ours:
        assert f'"{re.sub("_(total|bucket)$", "", name)}"' in theirs, name


def names_in(expression):
    return re.findall(r"\b((?:vllm|pc):\w+)", expression)


def test_an_engine_counts(model_path, monkeypatch):
    """In vLLM's engine, a small cache evicts, and hints are read or not."""
    monkeypatch.setenv("PC_VLLM_POLICY", "fifo")
    prompts = [list(range(first, first + 90)) for first in range(3, 400, 40)]
    hint = {"kv_hints": json.dumps(retention_hints(returns=0.5))}
    before = evicted()
    options = {"num_gpu_blocks_override": 12, "disable_log_stats": False}
    with vllm_engine.engine(model_path("llama"), ["eviction"], **options) as (llm, _):
        vllm_engine.generate(llm, prompts, max_tokens=5, extra_args=hint)
        vllm_engine.generate(llm, prompts[:1], max_tokens=5, extra_args={"kv_hints": "no JSON"})
    gained = {name: count - before[name] for name, count in evicted().items()}
    assert gained["pc:evicted_blocks_total"] > 5
    assert gained["pc:hints_total"] == len(prompts)
    assert gained["pc:unreadable_hints_total"] == 1


def evicted():
    """Return the evictions by name, summed over models."""
    found = dict.fromkeys((f"pc:{name}_total" for name in metrics.COUNTERS), 0.0)
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name in found:
                found[sample.name] += sample.value
    return found
