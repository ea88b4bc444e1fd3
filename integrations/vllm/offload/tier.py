"""A tier of `pc.cache` behind vLLM's offloading to host memory: a directory, or a Mooncake store."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import torch

from ....cache.tiers.tier import Layout, Tier
from ..api import (
    AsyncLookupManager,
    JobResult,
    Locality,
    LookupResult,
    Medium,
    RequestOffloadingContext,
    SecondaryTierManager,
    check_version,
    logger,
)
from ..connector.layout import open_tier


class TierLookup(AsyncLookupManager):
    """Lookups of chunks in a tier, which run in a separate thread."""

    def __init__(self, tier: Tier, tier_type: str) -> None:
        super().__init__(tier_type=tier_type)
        self._tier = tier

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> list[bool]:
        """Return whether each chunk is in the tier."""
        return self._tier.contains_many([bytes(key) for key in keys])


class TierManager(SecondaryTierManager):
    """A secondary tier for vLLM's `TieringOffloadingSpec`, which moves chunks between host memory and a tier.

    It has these options besides `type` and `module_path`:

    - `model` is a name for the weights, the adapters and the overrides of the model's config. Tokens, groups of layers,
      dtype, ranks and `max_model_len` need not be in the name.
    - `tier` and its options are those of `TierConnector`.
    - `threads` is the number of threads that read and write.

    Chunks of another `model`, layout or size are never read. If the tier has lost a chunk, vLLM computes this chunk and
    the later ones of the prompt. If the tier refuses a chunk, later lookups of the chunk miss.

    Raises:
        ValueError: At start-up, an option is unknown or missing.
    """

    medium: ClassVar[Any] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        model: str | None = None,
        threads: int = 4,
        locality: str | None = None,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        check_version("offload")
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if not isinstance(model, str) or not model:
            raise ValueError(f"model: got {model!r}, needs a name for these weights and what else decides their KV")
        if not isinstance(threads, int) or threads < 1:
            raise ValueError(f"threads: got {threads!r}, needs an integer of at least 1")
        self.locality = None if locality is None else Locality(locality)
        self._tier = open_tier(options, chunk_layout(offloading_spec.config, model, self.block_size_bytes))
        self._rows = torch.from_numpy(np.asarray(primary_kv_view)).view(torch.uint8)
        self._rows = self._rows.view(-1, self.block_size_bytes)
        self._lookup = TierLookup(self._tier, tier_type)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="pc_offload")
        self._running: list[Future[tuple[Any, list[bytes]]]] = []

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Return whether a chunk is in the tier; RETRY until the thread has looked it up."""
        found = self._lookup.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        """Start writing chunks from host memory."""
        self._submit(self._store, job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        """Start reading chunks into host memory."""
        self._submit(self._load, job_metadata)

    def get_finished_jobs(self) -> Iterable[Any]:
        """Return the jobs that have ended since the last call."""
        results = []
        for future in [future for future in self._running if future.done()]:
            self._running.remove(future)
            result, lost = future.result()
            self._lookup.mark_miss(lost)
            results.append(result)
        return results

    def has_pending_work(self) -> bool:
        """Return whether jobs are running. The engine keeps stepping until it knows that they have ended."""
        return bool(self._running)

    def on_new_request(self, req_context: Any) -> Any:
        """Return an empty context: only lookups are kept for requests."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget a request's lookups."""
        self._lookup.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        """Start this step's lookups."""
        self._lookup.flush()

    def drain_jobs(self) -> None:
        """Wait for all jobs."""
        wait(self._running)

    def shutdown(self) -> None:
        """Wait for pending writes and close the tier."""
        self._lookup.shutdown()
        self._pool.shutdown(wait=True)
        if hasattr(self._tier, "close"):
            self._tier.close()

    def _submit(self, transfer: Callable[[list[bytes], Sequence[int]], int], job: Any) -> None:
        """Start a transfer of a job's chunks in a thread of the pool."""
        keys, places = [bytes(key) for key in job.keys], [int(place) for place in job.chunk_ids]
        self._running.append(self._pool.submit(self._run, transfer, job, keys, places))

    def _run(
        self, transfer: Callable[[list[bytes], Sequence[int]], int], job: Any, keys: list[bytes], places: Any
    ) -> tuple[Any, list[bytes]]:
        """Run a transfer in a thread of the pool. Return its result, and the chunks that the tier has lost."""
        begun, done = perf_counter(), 0
        try:
            done = transfer(keys, places)
        except Exception as error:  # vLLM must learn that the job has ended, whatever the error
            logger.warning("a transfer of %d chunks failed: %s: %s", len(keys), type(error).__name__, error)
        result = JobResult(
            job_id=job.job_id,
            success=done == len(keys),
            successful_keys=tuple(job.keys)[:done] if job.is_promotion and 0 < done < len(keys) else None,
            transfer_time=perf_counter() - begun,
            transfer_bytes=done * self.block_size_bytes,
        )
        return result, keys[done:] if job.is_promotion else []

    def _store(self, keys: list[bytes], places: Sequence[int]) -> int:
        """Write the chunks that the tier lacks, and return how many of `keys` the tier has afterwards."""
        missing = [n for n, there in enumerate(self._tier.contains_many(keys)) if not there]
        taken = self._tier.put_many({keys[n]: {"kv": self._rows[places[n]]} for n in missing})
        return len(keys) - len(missing) + len(taken)

    def _load(self, keys: list[bytes], places: Sequence[int]) -> int:
        """Read chunks into host memory up to the first that the tier lacks, and return how many were read."""
        for n, tensors in enumerate(self._tier.get_many(keys)):
            if tensors is None:
                return n
            self._rows[places[n]].copy_(tensors["kv"])
        return len(keys)


def chunk_layout(config: Any, model: str, size: int) -> Layout:
    """Return the layout of chunks of `size` bytes, of all ranks. `config` is vLLM's `OffloadingConfig`."""
    parallel = config.parallel
    said = {
        "groups": [(group.tokens_per_block, list(group.layer_names)) for group in config.groups],
        "dtype": config.model.dtype,
        "longest": config.model.max_model_len,  # decides the frequencies of LongRoPE and the scores of some models
        "tokens": [config.cache.tokens_per_hash, config.cache.blocks_per_chunk],
        "ranks": [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "copies": [config.replicated_layout, config.canonical_layout, config.kv_cache_layout],
        "seed": os.environ.get("PYTHONHASHSEED"),
    }
    return Layout(f"vllm offload {model} {json.dumps(said, default=str)}", {"kv": ((size,), torch.uint8)})
