"""Counters of the policy in vLLM's /metrics, and nothing of them in vLLM's own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make vllm")

import msgspec
import vllm
import vllm_engine
from prometheus_client import REGISTRY
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager
from vllm.v1.metrics.stats import SchedulerStats

from pc.integrations.hints import retention_hints
from pc.integrations.vllm import metrics

DASHBOARD = Path(__file__).parents[3] / "examples" / "vllm_dashboard.json"
LABELS = {"model_name": "model", "engine": "0"}


@pytest.fixture
def exported(monkeypatch):
    """What vLLM's own loggers are given, with ours switched on."""
    given = []
    monkeypatch.setattr(metrics, "_exported", False)
    monkeypatch.setattr(StatLoggerManager, "record", lambda self, stats, *_, **given_by_name: given.append(stats))
    metrics.export_counts()
    metrics.export_counts()
    return given


def value(name):
    return REGISTRY.get_sample_value(f"pc:{name}", LABELS) or 0


def test_counts_arrive_and_vllm_sees_none_of_them(exported):
    logger = object.__new__(PrometheusStatLogger)
    logger.per_engine_labelvalues = {0: ["model", 0]}
    manager = SimpleNamespace(stat_loggers=[object(), logger])
    before = {name: value(f"{name}_total") for name in metrics.COUNTERS}
    for kept in (5, 0):
        stats = SchedulerStats(num_kv_fetch_reqs_by_stage={"waiting": 2})
        metrics.add_counts(stats, {"evicted_blocks": 7, "hints": 1, "unreadable_hints": 0, "kept_blocks": kept})
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=SchedulerStats)
        StatLoggerManager.record(manager, scheduler_stats=sent, iteration_stats=None, engine_idx=0)
        assert value("kept_blocks") == kept
    StatLoggerManager.record(manager, scheduler_stats=None, iteration_stats=None)
    gained = {name: value(f"{name}_total") - before[name] for name in metrics.COUNTERS}
    assert gained == dict.fromkeys(metrics.COUNTERS, 0) | {"evicted_blocks": 14, "hints": 2}
    assert [stats and stats.num_kv_fetch_reqs_by_stage for stats in exported] == [{"waiting": 2}, {"waiting": 2}, None]


def test_nothing_is_sent_where_nobody_takes_it_out(monkeypatch):
    monkeypatch.setattr(metrics, "_exported", False)
    stats = SchedulerStats()
    metrics.add_counts(stats, {"evicted_blocks": 7})
    assert stats.num_kv_fetch_reqs_by_stage == {}


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
    """The whole way in vLLM's engine: a small cache evicts, hints are read or not."""
    monkeypatch.setenv("PC_VLLM_POLICY", "fifo")
    vllm_engine.use_attention(False)
    vllm_engine.use_eviction(True)
    prompts = [list(range(first, first + 90)) for first in range(3, 400, 40)]
    hint = {"kv_hints": json.dumps(retention_hints(returns=0.5))}
    before = evicted()
    with vllm_engine.engine(model_path("llama"), num_gpu_blocks_override=12, disable_log_stats=False) as (llm, _):
        vllm_engine.generate(llm, prompts, max_tokens=5, extra_args=hint)
        vllm_engine.generate(llm, prompts[:1], max_tokens=5, extra_args={"kv_hints": "no JSON"})
    vllm_engine.use_eviction(False)
    gained = {name: count - before[name] for name, count in evicted().items()}
    assert gained["pc:evicted_blocks_total"] > 5
    assert gained["pc:hints_total"] == len(prompts)
    assert gained["pc:unreadable_hints_total"] == 1


def evicted():
    """By name, over all models."""
    found = dict.fromkeys((f"pc:{name}_total" for name in metrics.COUNTERS), 0.0)
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name in found:
                found[sample.name] += sample.value
    return found
