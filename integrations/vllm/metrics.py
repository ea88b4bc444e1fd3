"""What a policy does, as counters in vLLM's /metrics.

A scheduler's statistics travel to the process that serves /metrics in a struct without room for others' numbers, but
for one table of counts by name: ours ride in it under names of their own, and are taken out before vLLM reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..plugin import wrap_once

PREFIX = "pc:"
COUNTERS = {
    "evicted_blocks": "Blocks with content that the eviction policy gave up",
    "returned_blocks": "Blocks that were found again after the policy had chosen them, before they were given up",
    "jumped_tokens": "Tokens that were found cached behind a gap, and not computed",
    "moved_tokens": "Tokens that were found cached at another position, brought to theirs, and not computed",
    "compressed_requests": "Prompts that were compressed",
    "recompressed_requests": "Prompts among them that were compressed again, after a preemption",
    "compression_freed_blocks": "Blocks that were freed when prompts were compressed",
    "hints": "Requests whose kv_hints the policy was told",
    "unreadable_hints": "Requests whose kv_hints could not be read",
}
"""Name and meaning; in /metrics `pc:` is in front, and `_total` behind."""
GAUGES = {"kept_blocks": "Blocks that the policy chose and that stay because a waiting request will find them"}


_exported = False


def add_counts(stats: Any, counts: dict[str, int]) -> None:
    """Sends counts since the last time, and gauges as they are, with a scheduler's statistics.

    Nothing where `export_counts` was not called: vLLM's own logger would take them for counts of its own.
    """
    if _exported:
        stats.num_kv_fetch_reqs_by_stage.update({PREFIX + name: count for name, count in counts.items() if count})


def take_counts(stats: Any) -> dict[str, int]:
    """The counts that came with them, which are gone from there then."""
    table = stats.num_kv_fetch_reqs_by_stage
    return {name.removeprefix(PREFIX): table.pop(name) for name in list(table) if name.startswith(PREFIX)}


@functools.cache
def _metric(name: str) -> Any:
    from prometheus_client import Counter, Gauge

    labels = ["model_name", "engine"]
    if name in GAUGES:
        return Gauge(PREFIX + name, GAUGES[name], labels, multiprocess_mode="mostrecent")
    return Counter(PREFIX + name, COUNTERS[name], labels)


def export_counts() -> None:
    """Has vLLM's statistics, wherever they are recorded in this process, bring ours to /metrics; once is enough."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager

    global _exported

    def wrap(vllms: Callable[..., None]) -> Callable[..., None]:
        def record(self: Any, scheduler_stats: Any, *args: Any, engine_idx: int | None = None, **kwargs: Any) -> None:
            counts = {} if scheduler_stats is None else take_counts(scheduler_stats)
            for logger in self.stat_loggers if scheduler_stats is not None else ():
                if isinstance(logger, PrometheusStatLogger):
                    labels = [str(each) for each in logger.per_engine_labelvalues[engine_idx or 0]]
                    for name in COUNTERS:
                        _metric(name).labels(*labels).inc(counts.get(name, 0))
                    for name in GAUGES:
                        _metric(name).labels(*labels).set(counts.get(name, 0))
            vllms(self, scheduler_stats, *args, engine_idx=engine_idx, **kwargs)

        return record

    wrap_once(StatLoggerManager, "record", wrap)
    _exported = True
