"""A manager's counters for Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from .residency import BOUNDS

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from ..manager import CacheManager

GAUGES = {
    "free_blocks": "Blocks without content",
    "cached_blocks": "Published blocks with a reference count of 0",
    "held_blocks": "Blocks that requests hold",
    "num_requests": "Running requests",
    "host_blocks": "Host slots in use",
}
COUNTERS = {
    "total_requests": "Requests allocated",
    "queried_tokens": "Prompt tokens looked up",
    "evictions": "Blocks evicted",
    "merged_blocks": "Blocks replaced by an equal block of another request",
    "preemptions": "Requests preempted",
}


class CacheCollector:
    """A collector that reports `CacheManager.stats()` to `prometheus_client` (extra `metrics`) on every scrape.

    Every series has the label `manager`, which separates several managers in one registry. A registry accepts each
    metric only once, so the first collector with a registry and prefix reports the managers of all of them.

    Args:
        manager: The manager to report.
        registry: The registry to report to. None: the default registry.
        prefix: Start of every metric's name.
        name: Value of the label. None: the smallest number that no other manager in the registry has.

    Raises:
        ImportError: prometheus_client is missing.
        ValueError: Another collector with this registry and prefix has the name, or the registry already has the
            metrics.

    Examples:
        >>> from prometheus_client import CollectorRegistry
        >>> from pc.cache.observe.metrics import CacheCollector
        >>> manager, registry = pc.CacheManager(num_blocks=8, block_size=4), CollectorRegistry()
        >>> collector = CacheCollector(manager, registry, name="kv")
        >>> allocation = manager.allocate("a", range(9))
        >>> registry.get_sample_value("pc_cache_held_blocks", {"manager": "kv"})
        3
    """

    def __init__(
        self,
        manager: CacheManager[Any, Any, Any],
        registry: CollectorRegistry | None = None,
        prefix: str = "pc_cache",
        name: str | None = None,
    ) -> None:
        try:
            from prometheus_client import REGISTRY, core
        except ImportError:
            raise ImportError("CacheCollector needs prometheus_client: pip install prometheus_client") from None
        self._registry: CollectorRegistry = REGISTRY if registry is None else registry
        self._core, self._prefix, self._closed = core, prefix, False
        self._managers: dict[str, CacheManager] = {}  # of all collectors, in the first one; replaced, never changed
        with _lock:
            collectors = _first_collectors.setdefault(self._registry, {})
            self._first = collectors.get(prefix, self)
            taken = self._first._managers
            if name is None:
                name = next(number for number in map(str, range(len(taken) + 1)) if number not in taken)
            if name in taken:
                raise ValueError(f"name: got {name!r}, needs one that no other manager of {prefix} has")
            if not taken:
                self._registry.register(self)
                collectors[prefix] = self
            self._first._managers = {**taken, name: manager}
        self.name = name

    def close(self) -> None:
        """Stop reporting the manager. A second call does nothing."""
        with _lock:
            if self._closed:
                return
            self._closed, first = True, self._first
            first._managers = {name: manager for name, manager in first._managers.items() if name != self.name}
            if not first._managers:
                del _first_collectors[self._registry][self._prefix]
                self._registry.unregister(first)

    def collect(self) -> Iterable[Any]:
        """Yield the metrics of all managers with this registry and prefix. The registry calls this."""
        core, prefix = self._core, self._prefix
        stats = {name: manager.stats() for name, manager in self._first._managers.items()}
        for texts, kind in ((GAUGES, core.GaugeMetricFamily), (COUNTERS, core.CounterMetricFamily)):
            for metric, text in texts.items():
                family = kind(f"{prefix}_{metric}", text, labels=["manager"])
                for name, row in stats.items():
                    family.add_metric([name], getattr(row, metric))
                yield family
        text = "Prompt tokens that need not be computed"
        hits = core.CounterMetricFamily(f"{prefix}_hit_tokens", text, labels=["manager", "cause"])
        for name, row in stats.items():
            for cause, tokens in row.hit_tokens_by_cause.items():
                hits.add_metric([name, cause], tokens)
        yield hits
        text = "Accesses and releases between a block's filling and its eviction"
        residency = core.HistogramMetricFamily(f"{prefix}_residency_ticks", text, labels=["manager"])
        for name, row in stats.items():
            buckets, below = [], 0
            for bound, count in zip((*BOUNDS.tolist(), None), row.residency, strict=True):
                below += count
                buckets.append(("+Inf" if bound is None else str(float(bound)), below))
            residency.add_metric([name], buckets, row.residency_sum)
        yield residency


_lock = threading.Lock()
_first_collectors: WeakKeyDictionary[Any, dict[str, CacheCollector]] = WeakKeyDictionary()  # by registry and prefix
