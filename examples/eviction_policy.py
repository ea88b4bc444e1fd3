"""Replay a trace of requests through an eviction policy of your own and the built-in ones.

Run: python examples/eviction_policy.py [TRACE.jsonl or .jsonl.gz, as `python -m pc replay` takes]
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

import numpy as np

import pc
from pc.cache.replay import load_trace, replay


class Seniority(pc.EvictionPolicy):
    """Eviction by last access, where each use makes a block count as younger. The end of a prompt is evicted first."""

    BONUS = 400  # ticks of the pool's clock, which advances with every access and release

    def bind(self, pool):
        """Prepare for a pool of a certain size."""
        super().bind(pool)
        self.waiting = np.zeros(len(pool.ref_count), bool)

    def accessed(self, ids, hit):
        """Note that requests hold these blocks, so that they cannot be evicted."""
        self.waiting[ids] = False

    def released(self, ids):
        """Note that no request holds these blocks any more."""
        self.waiting[ids] = True

    def victims(self, count):
        """Return the `count` blocks to evict now."""
        ids = self.waiting.nonzero()[0].astype(np.int32)
        pool = self.pool
        age = pool.last_access[ids] + self.BONUS * np.minimum(pool.access_count[ids], 4)
        chosen = ids[np.lexsort((-pool.prefix_length[ids], age))[:count]]
        self.waiting[chosen] = False
        return chosen

    def removed(self, ids):
        """Note that these blocks left the cache without being chosen."""
        self.waiting[ids] = False

    def clear(self):
        """Forget all blocks."""
        self.waiting[:] = False


def write_trace(path: Path, requests: int = 1500) -> None:
    """Write requests like those of a service: a few shared system prompts, and documents with a few questions each."""
    random.seed(0)
    blocks = iter(range(10**9))
    systems = [[next(blocks) for _ in range(8)] for _ in range(4)]
    documents: list[list[int]] = []
    with path.open("w") as file:
        for second in range(requests):
            if not documents or random.random() < 0.4:
                documents.append(random.choice(systems) + [next(blocks) for _ in range(random.randint(4, 30))])
            popular = documents[int(len(documents) * random.random() ** 3)]
            prompt = [*random.choice((popular, documents[-1])), next(blocks)]  # the question is new
            line = {"timestamp": second * 1000, "output_length": 64, "input_length": 512 * len(prompt)}
            file.write(json.dumps(line | {"hash_ids": prompt}) + "\n")


def main(path: str | None) -> None:
    """Replay the trace at three capacities and print the share of blocks that was hit."""
    with tempfile.TemporaryDirectory() as folder:
        if path is None:
            path = f"{folder}/requests.jsonl"
            write_trace(Path(path))
        trace = load_trace(path)
    print(f"{trace.name}: {len(trace.requests)} requests, {trace.unique_blocks} different blocks")
    print(f"{'capacity':>10} {'lru':>8} {'default':>8} {'own':>8} {'best':>8}   (best: knows the future)")
    for share in (0.01, 0.03, 0.1):
        capacity = max(1, round(share * trace.unique_blocks))
        policies = ("lru", "default", Seniority(), "belady")
        rates = [replay(trace, policy, capacity).hit_rate for policy in policies]
        print(f"{share:>10.0%} " + " ".join(f"{rate:>8.4f}" for rate in rates))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
