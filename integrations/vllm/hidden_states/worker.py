"""vLLM's worker with the hidden states of prompts (`worker_cls`), and what takes them out of an engine."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform

from .prompts import PromptHiddenStates

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Base
else:
    from vllm.v1.worker.gpu_worker import Worker as Base

ASKED = "pc_hidden_states"
"""`SamplingParams(extra_args={"pc_hidden_states": True})` asks for the rows of a prompt."""


class HiddenStatesWorker(Base):
    """vLLM's worker of this platform; the last pipeline rank and the first tensor-parallel rank keep rows.

    `additional_config` of the engine may say where: `pc_hidden_states_device` ("cpu", which is pinned beside a GPU, or
    "cuda") and `pc_hidden_states_bytes`.

    Raises:
        ValueError: At start-up: asynchronous speculation, whose positions the host does not know; a KV connector
            without `pc`'s scheduler, which tells of blocks that the connector fills, or with a pooling model; pooling
            without chunked prefill; a model without full attention.
    """

    pc_hidden_states: PromptHiddenStates | None = None

    def initialize_from_config(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Remembers the cache, after what vLLM does with it."""
        check_hidden_states(self.vllm_config)
        super().initialize_from_config(kv_cache_config, *args, **kwargs)
        self._pc_config = kv_cache_config

    def compile_or_warm_up_model(self) -> Any:
        """Begins to follow steps behind the warm-up, whose requests are made up."""
        times = super().compile_or_warm_up_model()
        parallel = self.vllm_config.parallel_config
        if self.rank % parallel.tensor_parallel_size == 0:
            given = self.vllm_config.additional_config
            options = given if isinstance(given, dict) else {}
            self.pc_hidden_states = PromptHiddenStates(
                self.model_runner,
                self._pc_config,
                ASKED,
                options.get("pc_hidden_states_device", "cpu"),
                options.get("pc_hidden_states_bytes"),
            )
        return times

    def pc_take_hidden_states(self) -> dict[str, dict[str, torch.Tensor] | None]:
        """Rows of the prompts completed since the last call, by vLLM's own request id; {} in other ranks."""
        return {} if self.pc_hidden_states is None else self.pc_hidden_states.take()

    def pc_prompt_logprobs(self) -> dict[str, torch.Tensor | None]:
        """Log-probabilities of those prompts, whose rows stay.

        Raises:
            RuntimeError: Tensor parallelism, in which no rank has all logits.
        """
        if self.vllm_config.parallel_config.tensor_parallel_size > 1:
            raise RuntimeError("prompt_logprobs: got tensor parallelism, needs tensor_parallel_size 1")
        return {} if self.pc_hidden_states is None else self.pc_hidden_states.prompt_logprobs()


def check_hidden_states(vllm_config: Any) -> None:
    """Refuses configurations in which rows would be stored in wrong slots.

    Raises:
        ValueError: See `HiddenStatesWorker`.
    """
    scheduler = vllm_config.scheduler_config
    if vllm_config.speculative_config is not None and scheduler.async_scheduling:
        raise ValueError("async_scheduling: got True with speculation, needs False for hidden states")
    connector, cls = vllm_config.kv_transfer_config, scheduler.scheduler_cls
    name = cls if isinstance(cls, str) else getattr(cls, "__qualname__", "")
    if connector is not None and not name.endswith("PolicyScheduler"):
        raise ValueError("kv_transfer_config: a connector fills blocks unseen, needs PC_VLLM=eviction,hidden_states")
    if getattr(vllm_config.model_config, "runner_type", "") == "pooling":
        if connector is not None:
            raise ValueError("kv_transfer_config: got a connector, whose blocks have no rows to pool, needs None")
        if not scheduler.enable_chunked_prefill:
            raise ValueError("enable_chunked_prefill: got False, needs True for poolers to put rows together")


def take_hidden_states(llm: Any) -> dict[str, dict[str, torch.Tensor] | None]:
    """The hidden states of prompts that asked for them and were completed since the last call.

    Args:
        llm: vLLM's `LLM`.

    Returns:
        By request id, as in vLLM's outputs, and name ("hidden_states", "aux.0" and on) `[num_prompt_tokens, *]`; None
        for a prompt of which a KV connector brought a part: ask again with `skip_reading_prefix_cache=True`.
    """
    return _gather(llm, "pc_take_hidden_states")


def take_prompt_logprobs(llm: Any) -> dict[str, torch.Tensor | None]:
    """Log-probabilities of the prompts' tokens, prefix hits or not; call before `take_hidden_states`.

    Args:
        llm: vLLM's `LLM`.

    Returns:
        By request id `[num_prompt_tokens - 1]` float32; None as in `take_hidden_states`.
    """
    return _gather(llm, "pc_prompt_logprobs")


def _gather(llm: Any, method: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for taken in llm.collective_rpc(method):
        # vLLM appends random characters to the ids that its callers know.
        found.update({request.rsplit("-", 1)[0]: rows for request, rows in taken.items()})
    return found
