"""The manager's counters for Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from .residency import BOUNDS

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

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
    """Reports `CacheManager.stats()` to `prometheus_client` (extra `metrics`) whenever it is scraped.

    Every series has the label `manager`, so that several managers of one registry stay apart.

    Args:
        manager: The manager to report.
        registry: Where to report; None: the default registry.
        prefix: Begins every metric's name.
        name: Value of the label; None: the smallest number that no other manager there has.

    Raises:
        ImportError: prometheus_client is missing.
        ValueError: Another collector of that registry and prefix has the name, or the registry has the metrics already.

    Examples:
        >>> from prometheus_client import CollectorRegistry
        >>> from pc.cache.metrics import CacheCollector
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
        with _lock:
            groups = _groups.setdefault(REGISTRY if registry is None else registry, {})
            group = groups.get(prefix) or _Group(core, prefix)
            taken = group.managers
            if name is None:
                name = next(number for number in map(str, range(len(taken) + 1)) if number not in taken)
            if name in taken:
                raise ValueError(f"name: got {name!r}, needs one that no other manager of {prefix} has")
            if not taken:
                (REGISTRY if registry is None else registry).register(group)
                groups[prefix] = group
            group.managers = {**taken, name: manager}
        self.name = name
        self._registry: CollectorRegistry = REGISTRY if registry is None else registry
        self._prefix = prefix
        self._closed = False

    def close(self) -> None:
        """Reports the manager no longer; without effect the second time."""
        with _lock:
            groups = _groups.get(self._registry, {})
            group = groups.get(self._prefix)
            if group is None or self.name not in group.managers or self._closed:
                return
            self._closed = True
            group.managers = {name: manager for name, manager in group.managers.items() if name != self.name}
            if not group.managers:
                del groups[self._prefix]
                self._registry.unregister(group)


class _Group:
    """The managers that one registry has under one prefix: a metric may be described only once."""

    def __init__(self, core: Any, prefix: str) -> None:
        self.managers: dict[str, CacheManager] = {}
        self._core = core
        self._prefix = prefix

    def collect(self) -> Iterable[Any]:
        """Called by the registry."""
        core, prefix = self._core, self._prefix
        stats = {name: manager.stats() for name, manager in self.managers.items()}
        for metric, text in GAUGES.items():
            gauge = core.GaugeMetricFamily(f"{prefix}_{metric}", text, labels=["manager"])
            for name, row in stats.items():
                gauge.add_metric([name], getattr(row, metric))
            yield gauge
        for metric, text in COUNTERS.items():
            counter = core.CounterMetricFamily(f"{prefix}_{metric}", text, labels=["manager"])
            for name, row in stats.items():
                counter.add_metric([name], getattr(row, metric))
            yield counter
        hits = core.CounterMetricFamily(
            f"{prefix}_hit_tokens", "Prompt tokens that need not be computed", labels=["manager", "cause"]
        )
        for name, row in stats.items():
            for cause, tokens in row.hit_tokens_by_cause.items():
                hits.add_metric([name, cause], tokens)
        yield hits
        residency = core.HistogramMetricFamily(
            f"{prefix}_residency_ticks",
            "Accesses and releases between a block's filling and its eviction",
            labels=["manager"],
        )
        for name, row in stats.items():
            buckets, below = [], 0
            for bound, count in zip((*BOUNDS.tolist(), None), row.residency, strict=True):
                below += count
                buckets.append(("+Inf" if bound is None else str(float(bound)), below))
            residency.add_metric([name], buckets, row.residency_sum)
        yield residency


_lock = threading.Lock()
_groups: WeakKeyDictionary[Any, dict[str, _Group]] = WeakKeyDictionary()
