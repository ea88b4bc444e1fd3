"""vLLM's engine in this process, one after the other, with what a test watches in it counted."""

from __future__ import annotations

import contextlib
import gc
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 256,
    "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "seed": 0,
    "enable_prefix_caching": True,
}


def prepare() -> None:
    """Settings that vLLM reads when it is imported."""
    os.environ.update(ENVIRONMENT)


def _use(features: Sequence[str]) -> None:
    """Enable these features of `pc` for engines made from now on, and no others."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from pc.integrations.vllm import enable, moves
    from pc.integrations.vllm.features import _enabled

    selector._cached_get_attn_backend.cache_clear()
    for backend in ("CPU_ATTN", "CPU_MLA", "AMX_MLA"):
        AttentionBackendEnum[backend].clear_override()
    moves.PREPARATIONS.pop("pc_cannot_compress", None)
    _enabled.clear()
    enable(*features)


_rebound = False


@contextlib.contextmanager
def _kernels_rebound_once() -> Iterator[None]:
    """vLLM looks through every object of the process for kernels to replace; once, since later some object refuses."""
    global _rebound
    from unittest import mock

    from vllm.platforms import current_platform

    rebind = (lambda *_: None) if _rebound else current_platform.register_triton_kernel_overrides
    _rebound = True
    with mock.patch.object(type(current_platform), "register_triton_kernel_overrides", rebind):
        yield


@contextlib.contextmanager
def asynchronous() -> Iterator[None]:
    """Have engines schedule asynchronously, which vLLM turns off on its CPU platform; events and streams do nothing."""
    from unittest import mock

    import torch
    from vllm.platforms import current_platform

    kind = type(current_platform)
    check = kind.check_and_update_config

    def check_and_turn_on(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    with (
        mock.patch.object(kind, "check_and_update_config", staticmethod(check_and_turn_on)),
        mock.patch.object(torch.cuda, "Event", mock.MagicMock()),
        mock.patch.object(torch.cuda, "current_stream", mock.MagicMock()),
        mock.patch.object(torch.cuda, "stream", return_value=contextlib.nullcontext()),
    ):
        yield


@contextlib.contextmanager
def engine(model: str, features: Sequence[str] = (), **options: Any) -> Iterator[tuple[Any, Counter[str]]]:
    """Yield an engine with these features of `pc`, and counts of what happens in it.

    The counts are "attention" and "latent" (our forwards), "steps", "tokens", "preemptions" and "drafts".
    """
    from unittest import mock

    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from pc.integrations.vllm.attention import PagedAttention
    from pc.integrations.vllm.attention.latent import LatentAttention

    seen: Counter[str] = Counter()
    decode = LatentAttention.forward_mqa
    forward, preempt, execute = PagedAttention.forward, Scheduler._preempt_request, GPUModelRunner.execute_model

    def counted_forward(self, layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs):
        seen["attention"] += attn_metadata is not None
        return forward(self, layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)

    def counted_decode(self, *args):
        seen["latent"] += 1
        return decode(self, *args)

    def counted_preempt(self, *args, **kwargs):
        seen["preemptions"] += 1
        return preempt(self, *args, **kwargs)

    def counted_execute(self, output, *args, **kwargs):
        seen["steps"] += output.total_num_scheduled_tokens > 0
        seen["tokens"] += output.total_num_scheduled_tokens
        seen["drafts"] += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        return execute(self, output, *args, **kwargs)

    with (
        _kernels_rebound_once(),
        mock.patch.object(PagedAttention, "forward", counted_forward),
        mock.patch.object(LatentAttention, "forward_mqa", counted_decode),
        mock.patch.object(Scheduler, "_preempt_request", counted_preempt),
        mock.patch.object(GPUModelRunner, "execute_model", counted_execute),
    ):
        _use(features)
        try:
            llm = LLM(model=model, **{**OPTIONS, **options})
            try:
                yield llm, seen
            finally:
                llm.llm_engine.engine_core.shutdown()
                del llm
                gc.collect()
                cleanup_dist_env_and_memory()
        finally:
            _use(())


def random_prompts(seed: int, *lengths: int) -> list[list[int]]:
    """Return prompts of random tokens that every test model has."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 500, (length,), generator=generator).tolist() for length in lengths]


def generate(llm: Any, prompts: list[list[int]], **params: Any) -> tuple[list[list[list[int]]], list[int]]:
    """Tokens of each sample of each prompt, and how many tokens of each prompt were cached."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        **{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "detokenize": False, **params}
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return [[list(o.token_ids) for o in output.outputs] for output in outputs], [o.num_cached_tokens for o in outputs]


def both(model: str, ask: Callable[[Any], Any], more: Mapping[str, Any] | None = None, **options: Any) -> list[Any]:
    """Return what `ask(llm)` returns with vLLM's own attention and with ours, each with the counts of its engine.

    `more` has options of the second engine alone.
    """
    found = []
    for ours in (False, True):
        features = ("attention",) if ours else ()
        with engine(model, features, **options, **(more or {}) if ours else {}) as (llm, seen):
            found.append((ask(llm), seen))
    return found


class Requests:
    """Requests to an engine in this process.

    Attributes:
        prompts: The tokens of each request, by name.
        answers: For each request's name and sample that ended by length, its tokens and their log-probabilities.
    """

    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.prompts: dict[str, list[int]] = {}
        self.answers: dict[tuple[str, int], tuple[list[int], list[float]]] = {}

    def add(self, name: str, tokens: list[int], priority: int = 0, **params: Any) -> None:
        """Add a request, with parameters of vLLM's `SamplingParams`. Schedulers may ignore its priority."""
        from vllm import SamplingParams

        given = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "detokenize": False, "logprobs": 0}
        self.prompts[name] = tokens
        sampling = SamplingParams(**given | params)
        self.engine.add_request(name, {"prompt_token_ids": tokens}, sampling, priority=priority)

    def step(self) -> None:
        """Run a step of the engine, and keep the answers that it ends."""
        for output in self.engine.step():
            for said in output.outputs:
                if said.finish_reason == "length":
                    tokens = list(said.token_ids)
                    logprobs = [each[token].logprob for each, token in zip(said.logprobs, tokens, strict=True)]
                    self.answers[output.request_id, said.index] = tokens, logprobs

    def run(self, rng: random.Random | None = None) -> Requests:
        """Run steps until no request is left, with disturbances between them if `rng` is given."""
        while self.engine.has_unfinished_requests():
            self.step()
            if rng is not None:
                self.disturb(rng)
        return self

    def disturb(self, rng: random.Random) -> None:
        """Recount the references to blocks, and at random evict blocks, preempt a request or abort one."""
        from vllm_exact import check_references, lose, preempt

        scheduler = self.scheduler
        check_references(scheduler)
        lose(scheduler, rng.randrange(2) if scheduler.requests else 7, rng)
        if rng.random() < 0.15 and scheduler.running:
            preempt(scheduler, rng.choice(scheduler.running).request_id)
        if rng.random() < 0.1 and scheduler.requests:
            self.engine.abort_request([rng.choice(list(scheduler.requests)).rpartition("-")[0]])
