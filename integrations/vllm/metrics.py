"""Counters of the eviction policy in the server's /metrics.

The scheduler runs in a separate process, which writes its counters into files of Prometheus' client library. The
process that serves /metrics reads the files of all schedulers that it started, on one machine. A server with several
API processes names a folder for the files of all of them (PROMETHEUS_MULTIPROC_DIR), and the scheduler writes there.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .api import available

PREFIX = "pc:"
COUNTERS = {
    "evicted_blocks": "Blocks with content that the eviction policy evicted",
    "returned_blocks": "Blocks that were hit after the policy had chosen them, before they were evicted",
    "jumped_tokens": "Tokens that were cached after a gap, and not computed",
    "moved_tokens": "Tokens that were cached at another position, moved, and not computed",
    "compressed_requests": "Prompts that were compressed",
    "recompressed_requests": "Prompts among them that were compressed again, after a preemption",
    "compression_freed_blocks": "Blocks that were freed when prompts were compressed",
    "hints": "Requests whose kv_hints were passed to the policy",
    "unreadable_hints": "Requests whose kv_hints could not be read",
}
"""Names and descriptions. In /metrics a name begins with `pc:` and ends with `_total`."""
GAUGES = {"kept_blocks": "Blocks that the policy chose and that stay because a waiting request will hit them"}

LABELS = ("model_name", "engine")

SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable with which vLLM names the folder of the files of several API processes."""
FOLDER = "_PC_VLLM_COUNTS"
"""The environment variable that names the folder of one API process. Processes that a server starts inherit it."""


def policy_counts(vllm_config: Any) -> Callable[[Mapping[str, int]], None]:
    """Return a function that publishes the counts of one scheduler, by name, in files that the server's process reads.

    It is called with the counts since the start of the scheduler.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    name = getattr(model, "served_model_name", None) or getattr(model, "model", "")
    name = name[0] if isinstance(name, list) else name
    labels = [str(name), str(getattr(parallel, "data_parallel_index", 0))]
    folder = (os.environ.get(SHARED_FOLDER) or os.environ.get(FOLDER)) if available("eviction.metrics") else None
    kinds = (("counter", COUNTERS, "_total"), ("gauge_mostrecent", GAUGES, ""))
    files = [_new_file(Path(folder), labels, *kind) for kind in kinds] if folder else []
    written: Mapping[str, int] = {}

    def publish(counts: Mapping[str, int]) -> None:
        nonlocal written
        if counts == written:
            return
        now, written = time.time(), dict(counts)
        for values, keys in files:
            for name, key in keys.items():
                values.write_value(key, counts.get(name, 0), now)

    return publish


def _new_file(folder: Path, labels: list[str], kind: str, known: Mapping[str, str], ending: str) -> Any:
    """Make a file for metrics of one kind, all zero. Return its values, and the key of each name in it."""
    from prometheus_client.mmap_dict import MmapedDict, mmap_key

    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{kind}_pc-{time.time_ns()}-{os.getpid()}.part"
    values = MmapedDict(str(part))
    metrics = {name: PREFIX + name for name in known}
    keys = {name: mmap_key(each, each + ending, LABELS, labels, known[name]) for name, each in metrics.items()}
    for key in keys.values():
        values.write_value(key, 0, time.time())
    part.rename(part.with_suffix(".db"))  # a reader must not find a part of a file
    return values, keys


@functools.cache
def export_counts() -> None:
    """Serve the counters in /metrics from this process, and let the schedulers that it starts write them."""
    if SHARED_FOLDER in os.environ or not available("eviction.metrics"):  # vLLM serves the shared folder
        return
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="pc-vllm-")
        atexit.register(_remove, os.environ[FOLDER], os.getpid())
    Path(os.environ[FOLDER]).mkdir(parents=True, exist_ok=True)
    from prometheus_client import REGISTRY
    from prometheus_client.multiprocess import MultiProcessCollector

    MultiProcessCollector(REGISTRY, os.environ[FOLDER])


def _remove(folder: str, owner: int) -> None:
    """Remove the folder when the process that made it ends, and not when a fork of it ends."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
