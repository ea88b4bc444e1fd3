"""The manager's counters for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .pool import RESIDENCY_BOUNDS

if TYPE_CHECKING:
    from .manager import CacheManager

GAUGES = {
    "free_blocks": "Blocks without content",
    "cached_blocks": "Findable blocks that nobody holds",
    "held_blocks": "Blocks that requests hold",
    "num_requests": "Running requests",
    "host_blocks": "Host slots in use",
}
COUNTERS = {
    "total_requests": "Requests allocated",
    "queried_tokens": "Prompt tokens looked up",
    "evictions": "Blocks evicted",
    "merged_blocks": "Blocks another request had completed first",
    "preemptions": "Requests preempted",
}


class CacheCollector:
    """A collector for `prometheus_client` (extra `metrics`) that reads `CacheManager.stats()` when it is scraped.

    Args:
        manager: The manager to report.
        registry: Where to register; None: the default registry.
        prefix: Begins every metric's name.
    """

    def __init__(self, manager: CacheManager, registry: Any = None, prefix: str = "pc_cache") -> None:
        try:
            from prometheus_client import REGISTRY, core
        except ImportError:
            raise ImportError("CacheCollector needs prometheus_client: pip install 'pc-kernels[metrics]'") from None
        self._core = core
        self._manager = manager
        self._prefix = prefix
        (REGISTRY if registry is None else registry).register(self)

    def collect(self) -> Iterable[Any]:
        """Called by the registry."""
        stats = self._manager.stats()
        for name, text in GAUGES.items():
            yield self._core.GaugeMetricFamily(f"{self._prefix}_{name}", text, value=getattr(stats, name))
        for name, text in COUNTERS.items():
            yield self._core.CounterMetricFamily(f"{self._prefix}_{name}", text, value=getattr(stats, name))
        hits = self._core.CounterMetricFamily(
            f"{self._prefix}_hit_tokens", "Prompt tokens that need not be computed", labels=["cause"]
        )
        for cause, tokens in stats.hit_tokens_by_cause.items():
            hits.add_metric([cause], tokens)
        yield hits
        buckets, below = [], 0
        for bound, count in zip((*RESIDENCY_BOUNDS.tolist(), None), stats.residency, strict=True):
            below += count
            buckets.append(("+Inf" if bound is None else str(float(bound)), below))
        yield self._core.HistogramMetricFamily(
            f"{self._prefix}_residency_ticks",
            "Accesses and releases between a block's filling and its eviction",
            buckets=buckets,
            sum_value=stats.residency_sum,
        )
