"""Counters of the eviction policy in the server's /metrics.

The scheduler runs in a process of its own, which writes its counters to a small file. The process that serves /metrics
reads the files of all schedulers that it started, on one machine. A server with several API processes has Prometheus'
own files for that (PROMETHEUS_MULTIPROC_DIR), and the scheduler then writes to them.
"""

from __future__ import annotations

import atexit
import functools
import json
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

PREFIX = "pc:"
COUNTERS = {
    "evicted_blocks": "Blocks with content that the eviction policy evicted",
    "returned_blocks": "Blocks that were hit after the policy had chosen them, before they were evicted",
    "jumped_tokens": "Tokens that were cached behind a gap, and not computed",
    "moved_tokens": "Tokens that were cached at another position, moved, and not computed",
    "compressed_requests": "Prompts that were compressed",
    "recompressed_requests": "Prompts among them that were compressed again, after a preemption",
    "compression_freed_blocks": "Blocks that were freed when prompts were compressed",
    "hints": "Requests whose kv_hints were passed to the policy",
    "unreadable_hints": "Requests whose kv_hints could not be read",
}
"""Names and descriptions. In /metrics a name begins with `pc:` and ends with `_total`."""
GAUGES = {"kept_blocks": "Blocks that the policy chose and that stay because a waiting request will hit them"}

NAMES = (*COUNTERS, *GAUGES)
LABELS = ("model_name", "engine")

FOLDER = "_PC_VLLM_COUNTS"
"""The environment variable that names the folder of the files. Processes that a server starts inherit it."""


class PolicyCounts:
    """The counters of one scheduler."""

    def __init__(self, vllm_config: Any) -> None:
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        name = getattr(model, "served_model_name", None) or getattr(model, "model", "")
        name = name[0] if isinstance(name, list) else name
        self._labels = [str(name), str(getattr(parallel, "data_parallel_index", 0))]
        self._values = np.zeros(len(NAMES))
        self._written = [0] * len(NAMES)
        if FOLDER in os.environ and "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            self._values = _new_file(Path(os.environ[FOLDER]), self._labels)

    def set(self, counts: Mapping[str, int]) -> None:
        """Publish the counts since the start of the scheduler, by name."""
        now = [counts.get(name, 0) for name in NAMES]
        if now == self._written:
            return
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            for name, count, before in zip(NAMES, now, self._written, strict=True):
                metric = _metric(name).labels(*self._labels)
                metric.set(count) if name in GAUGES else metric.inc(count - before)
        self._values[:] = self._written = now


def _new_file(folder: Path, labels: list[str]) -> Any:
    """Make a file with a line of JSON and a value for each of `NAMES`. Return the values as mapped memory."""
    head = json.dumps({"labels": labels, "names": NAMES}).encode()
    head += b" " * (-(len(head) + 1) % 8) + b"\n"
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{time.time_ns():020d}-{os.getpid()}.part"
    part.write_bytes(head + bytes(8 * len(NAMES)))
    with open(part, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    part.rename(part.with_suffix(".counts"))
    return np.frombuffer(memory, np.float64, offset=len(head))


def read_counts(folder: Path) -> dict[tuple[str, ...], dict[str, float]]:
    """Return the counts in a folder, by labels and name.

    Counters of schedulers with the same labels add up, so the counters of a restarted engine continue. A gauge has the
    value of the newest scheduler.
    """
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for path in sorted(folder.glob("*.counts")):
        head, _, rest = path.read_bytes().partition(b"\n")
        said = json.loads(head)
        counts = found.setdefault(tuple(said["labels"]), dict.fromkeys(said["names"], 0.0))
        for name, value in zip(said["names"], np.frombuffer(rest, np.float64).tolist(), strict=True):
            counts[name] = value if name in GAUGES else counts[name] + value
    return found


class PolicyCollector:
    """A Prometheus collector for the counters of all schedulers that this process, or its parent, started."""

    def collect(self) -> Iterator[Any]:
        """Yield each counter and gauge with its values."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        found = read_counts(Path(os.environ[FOLDER])) if FOLDER in os.environ else {}
        for name, meaning in (COUNTERS | GAUGES).items():
            kind = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            family = kind(PREFIX + name, meaning, labels=LABELS)
            for labels, counts in found.items():
                family.add_metric(labels, counts.get(name, 0))
            yield family

    def describe(self) -> list[Any]:
        """Return nothing, so that the counters are not read when this collector is registered."""
        return []


@functools.cache
def _metric(name: str) -> Any:
    """Return the metric of Prometheus' own files with this name, made once in each process."""
    from prometheus_client import Counter, Gauge

    if name in GAUGES:
        return Gauge(PREFIX + name, GAUGES[name], LABELS, multiprocess_mode="mostrecent")
    return Counter(PREFIX + name, COUNTERS[name], LABELS)


@functools.cache
def export_counts() -> None:
    """Serve the counters in /metrics from this process, and let the schedulers that it starts write them."""
    from prometheus_client import REGISTRY

    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="pc-vllm-")
        atexit.register(_remove, os.environ[FOLDER], os.getpid())
    REGISTRY.register(PolicyCollector())


def _remove(folder: str, owner: int) -> None:
    """Remove the folder when the process that made it ends, and not when a fork of it ends."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
