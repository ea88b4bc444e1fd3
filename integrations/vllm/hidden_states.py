"""Hidden states of whole prompts from vLLM, also where a prefix is cached: rows along the blocks of the KV cache.

A worker for vLLM (`worker_cls`), what it does in each step, and what takes the rows out of an engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm import envs
from vllm.model_executor.layers.pooler.tokwise.methods import AllPool
from vllm.platforms import current_platform

from ...cache.tensors.step import Step
from ...cache.tensors.tensor_cache import TensorCache
from ..hints import extra_args
from .api import logger
from .features import HIDDEN_STATES_OPTIONS, additional_config, announce, has_policy
from .hidden_files import MAX_BYTES, MAX_SECONDS, RowsFolder
from .scheduler_output import BlockTables, full_attention_group

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Base
else:
    from vllm.v1.worker.gpu_worker import Worker as Base

ASKED = "pc_hidden_states"
"""`SamplingParams(extra_args={"pc_hidden_states": True})` asks for the rows of a prompt."""

ASKED_LOGPROBS = "pc_prompt_logprobs"
"""The same for the log-probabilities of a prompt's tokens, for a server that writes into a folder."""

LOGITS = 1 << 26
"""Logits that are made at once for log-probabilities: 256 MiB in float32."""

WAITING_BYTES = 1 << 30
"""Bound of the rows that wait to be taken, unless `pc_hidden_states_waiting_bytes` is given."""

_OVERHEAD = 1024
"""Bytes counted for a completed prompt besides its tensors, or prompts without rows would have no bound."""


@dataclass
class FollowedPrompt:
    """A request's prompt, without tokens where it came as embeddings, what is wanted of it, and if all is computed."""

    tokens: list[int]
    length: int
    asked: bool
    asked_logprobs: bool
    complete: bool = False


class WaitingRows(NamedTuple):
    """A completed prompt and its rows by name, None where some are missing."""

    prompt: torch.Tensor
    rows: dict[str, torch.Tensor] | None

    @property
    def nbytes(self) -> int:
        """What it is counted as."""
        return _OVERHEAD + self.prompt.nbytes + sum(tensor.nbytes for tensor in (self.rows or {}).values())


class PromptHiddenStates:
    """The hidden states of prompts in one worker: stored every step, read whole in the step that completes a prompt.

    Stands between vLLM's model runner and its scheduler, from after the warm-up on. Between the two halves of a step
    both runners leave the hidden states of its tokens where they can be read. A row is stored in the slot that its
    token's KV was written to, so it is found wherever the KV is found, and read while the prompt's blocks are held.

    `config` has a group with full attention, else ValueError: windows release blocks of a prefix. `asked_for` is what
    asks for a prompt's rows under `extra_args`. Rows are bounded by `max_bytes` (None: half of the memory available),
    those that wait for `take` by `waiting_bytes`: beyond it the prompts completed first are dropped, and a warning says
    so once, but not the last, whatever its size. With a `folder` they are written to it instead of waiting.
    """

    def __init__(
        self,
        runner: Any,
        config: Any,
        asked_for: str,
        device: str = "cpu",
        max_bytes: int | None = None,
        waiting_bytes: int = WAITING_BYTES,
        folder: RowsFolder | None = None,
    ) -> None:
        number = full_attention_group(config.kv_cache_groups)
        size = config.kv_cache_groups[number].kv_cache_spec.block_size
        self.rows = TensorCache(None, config.num_blocks, size, device=device, max_bytes=max_bytes)
        self.tables = BlockTables(number, size)
        self._asked_for = asked_for
        self._followed: dict[str, FollowedPrompt] = {}
        self.waiting_bytes = waiting_bytes
        self.waiting: dict[str, WaitingRows] = {}
        self._nbytes = 0  # of these
        self.folder = folder
        self._warned = False
        self.runner = runner
        self._execute, runner.execute_model = runner.execute_model, self.execute_model
        self._output: Any = None
        if pools(runner):
            self._pool, runner._pool = runner._pool, self.pool

    def execute_model(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of the runner's; made-up requests pass through."""
        self._output = None if kwargs.get("dummy_run") else output
        result = self._execute(output, *args, **kwargs)
        output, self._output = self._output, None
        if output is not None:
            positions = self._follow(output)
            state = self.runner.execute_model_state
            if state is not None and state.hidden_states is not None:  # None: no tokens, or not the last pipeline rank
                self._store(output, positions, state)
        return result

    def pool(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """In place of the runner's, which pools and keeps nothing: token-wise poolers get the rows of hits first.

        They join what the chunks of a prompt gave; that is made to be all rows in front of this step's tokens, so that
        a hit, also one after a preemption, has a row for each token.
        """
        output, self._output = self._output, None
        if output is not None:
            positions = self._follow(output)
            self._store(output, positions, SimpleNamespace(hidden_states=hidden_states))
            for request, begin in positions.items():
                self._complete(request, begin, hidden_states.device)
        return self._pool(hidden_states, *args, **kwargs)

    def _complete(self, request: str, begin: int, device: torch.device) -> None:
        """Puts the rows in front of a step's tokens where a token-wise pooler looks for them."""
        batch = self.runner.input_batch
        if not (batch.pooling_params[request].task or "").startswith("token_"):
            return
        chunks = batch.pooling_states[request].hidden_states_cache
        if sum(map(len, chunks)) != begin:
            table = np.array(self.tables.blocks[request], np.int32)
            chunks[:] = [self.rows.load(table, ["hidden_states"], num_tokens=begin)["hidden_states"].to(device)]

    def _follow(self, output: Any) -> dict[str, int]:
        """What a step does to blocks; the first position of each of its requests."""
        self.rows.forget(getattr(output, "pc_fresh_blocks", ()))
        for request in output.finished_req_ids:
            self._followed.pop(request, None)
        positions: dict[str, int] = {}
        for each in self.tables.follow(output):
            positions[each.request_id] = each.begin
            if each.data is not None and each.request_id not in self._followed:
                extra = extra_args(each.data)
                asked = bool(extra.get(self._asked_for)), self._gives_logprobs(extra.get(ASKED_LOGPROBS))
                tokens = list(each.data.prompt_token_ids or ())
                self._followed[each.request_id] = FollowedPrompt(tokens, each.data.prompt_len, *asked)
        for copy in output.kv_cache_block_copies or ():
            self.rows.copy([(copy.src_block_id, copy.dst_block_id)])
        return positions

    def _gives_logprobs(self, wanted: Any) -> bool:
        """Whether log-probabilities are written for a request, which a server is told once where they cannot be."""
        if not wanted or self.folder is None:
            return False
        if reason := why_no_logprobs(self.runner):
            logger.warning_once("%s: not written under %s", ASKED_LOGPROBS, reason)
        return not reason

    def _store(self, output: Any, positions: dict[str, int], state: Any) -> None:
        batch = state.input_batch if hasattr(state, "input_batch") else self.runner.input_batch
        counts = output.num_scheduled_tokens
        requests = [request for request in batch.req_ids if request in counts]
        slots = [self.tables.slots(request, positions[request], counts[request]) for request in requests]
        mapping = np.concatenate(slots) if slots else np.empty(0, np.int64)
        tensors = {"hidden_states": state.hidden_states[: mapping.size]}
        for number, aux in enumerate(getattr(state, "aux_hidden_states", None) or ()):
            tensors[f"aux.{number}"] = aux[: mapping.size]
        for name, tensor in tensors.items():
            self.rows.register(name, tensor.shape[1:], tensor.dtype)
        self.rows.store(Step(tensors, mapping))
        for request in requests:
            prompt = self._followed[request]
            if not prompt.complete and positions[request] + counts[request] >= prompt.length:
                prompt.complete = True
                if prompt.asked or prompt.asked_logprobs:
                    self._take(request, self.tables.blocks[request], prompt, list(tensors))

    def _take(self, request: str, blocks: list[int], prompt: FollowedPrompt, names: list[str]) -> None:
        """Reads the rows of a prompt; None stands for one whose KV a connector brought in part."""
        table, length = np.array(blocks, np.int32), prompt.length
        tokens = torch.tensor(prompt.tokens, dtype=torch.int64)
        whole = self.rows.available(table, names, num_tokens=length) == length
        rows = self.rows.load(table, names, num_tokens=length) if whole else None
        if self.folder is not None:
            tensors = {"token_ids": tokens}
            if rows is not None and prompt.asked:
                tensors |= rows
            if rows is not None and prompt.asked_logprobs:
                tensors["prompt_logprobs"] = self._logprobs(tokens, rows["hidden_states"])
            self.folder.put(known_id(request), tensors, {"complete": str(whole).lower()})
            return
        if request in self.waiting:
            self._nbytes -= self.waiting.pop(request).nbytes
        self.waiting[request] = found = WaitingRows(tokens, rows)
        self._nbytes += found.nbytes
        while self._nbytes > self.waiting_bytes and len(self.waiting) > 1:
            self._nbytes -= self.waiting.pop(next(iter(self.waiting))).nbytes
            if not self._warned:
                self._warned = True
                logger.warning(
                    "more than %d bytes of hidden states wait to be taken: those of the prompts completed first are "
                    "dropped; take them sooner, or set pc_hidden_states_waiting_bytes",
                    self.waiting_bytes,
                )

    def take(self) -> dict[str, dict[str, torch.Tensor] | None]:
        """The rows of the prompts that have been completed since the last call, by request."""
        taken, self.waiting, self._nbytes = self.waiting, {}, 0
        return {request: each.rows for request, each in taken.items()}

    def prompt_logprobs(self) -> dict[str, torch.Tensor | None]:
        """Log-probabilities of the tokens of those prompts, from the second on, `[num_tokens - 1]`; keeps the rows."""
        return {
            request: None if each.rows is None else self._logprobs(each.prompt, each.rows["hidden_states"])
            for request, each in self.waiting.items()
        }

    def _logprobs(self, prompt: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Of each token of a prompt but the first; a piece at a time, since logits are many times the rows."""
        if len(prompt) < 2:
            return torch.empty(0)
        device, piece = self.runner.device, max(1, LOGITS // self.runner.model_config.get_vocab_size())
        parts = []
        for rows, tokens in zip(hidden[:-1].split(piece), prompt[1:].split(piece), strict=True):
            logits = self.runner.model.compute_logits(rows.to(device)).float()
            parts.append(logits.log_softmax(-1).gather(1, tokens.to(device)[:, None])[:, 0].cpu())
        return torch.cat(parts)


class HiddenStatesWorker(Base):
    """vLLM's worker; the last pipeline rank and, unless it pools, only the first tensor-parallel rank keep rows.

    `additional_config` of the engine may say: `pc_hidden_states_device`, where rows are kept ("cpu", which is pinned
    beside a GPU, or "cuda"); `pc_hidden_states_bytes`, the bound of rows beside the KV cache (half of the memory that
    is available); `pc_hidden_states_waiting_bytes`, the bound of rows that wait until they are taken or written
    (1 GiB); `pc_hidden_states_dir`, a folder in which the rows of each prompt that asked become a file, as a client of
    a server can read them; `pc_hidden_states_dir_bytes` (10 GiB) and `pc_hidden_states_dir_seconds` (an hour), its
    bounds.

    Raises:
        ValueError: At start-up: an option out of range; asynchronous speculation, whose positions the host does not
            know; a KV connector without `pc`'s scheduler, which names the blocks that the connector fills, or with a
            pooling model; pooling without chunked prefill, under runner V2 or by a model's own way to join chunks; a
            model without full attention.
    """

    pc_hidden_states: PromptHiddenStates | None = None

    def initialize_from_config(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Remembers the cache, after what vLLM does with it."""
        check_hidden_states(self.vllm_config)
        if pools(self.model_runner):
            check_pooler(self.model_runner.get_model().pooler)
        super().initialize_from_config(kv_cache_config, *args, **kwargs)
        self._pc_config = kv_cache_config

    def compile_or_warm_up_model(self) -> Any:
        """Begins to follow steps behind the warm-up, whose requests are made up."""
        times = super().compile_or_warm_up_model()
        # Every rank pools: without the rows of a hit one would look for tokens of the prompt that it does not have.
        if pools(self.model_runner) or self.rank % self.vllm_config.parallel_config.tensor_parallel_size == 0:
            given = additional_config(self.vllm_config)
            options = {name.removeprefix(f"{ASKED}_"): given[name] for name in HIDDEN_STATES_OPTIONS if name in given}
            waiting, folder = options.get("waiting_bytes", WAITING_BYTES), None
            if "dir" in options:
                bounds = options.get("dir_bytes", MAX_BYTES), options.get("dir_seconds", MAX_SECONDS)
                folder = RowsFolder(options["dir"], *bounds, waiting)
            device, nbytes = options.get("device", "cpu"), options.get("bytes")
            self.pc_hidden_states = PromptHiddenStates(
                self.model_runner, self._pc_config, ASKED, device, nbytes, waiting, folder
            )
            announce(self.vllm_config)
        return times

    def shutdown(self) -> None:
        """Has what waits written, then as vLLM."""
        if self.pc_hidden_states is not None and self.pc_hidden_states.folder is not None:
            self.pc_hidden_states.folder.close()
        super().shutdown()

    def pc_take_hidden_states(self) -> dict[str, dict[str, torch.Tensor] | None]:
        """Rows of the prompts completed since the last call, by vLLM's own request id; {} in other ranks."""
        return {} if self.pc_hidden_states is None else self.pc_hidden_states.take()

    def pc_prompt_logprobs(self) -> dict[str, torch.Tensor | None]:
        """Log-probabilities of those prompts, whose rows stay; RuntimeError where this engine cannot make them."""
        if reason := why_no_logprobs(self.vllm_config):
            raise RuntimeError(f"prompt_logprobs: got {reason}")
        return {} if self.pc_hidden_states is None else self.pc_hidden_states.prompt_logprobs()


def pools(runner: Any) -> bool:
    """Whether it pools hidden states in place of sampling from them; runner V2, which has no such flag, is refused."""
    return bool(getattr(runner, "is_pooling_model", False))


def why_no_logprobs(config: Any) -> str:
    """What of an engine's configuration, which vLLM's runner has too, makes log-probabilities impossible, or ""."""
    if getattr(getattr(config, "parallel_config", None), "tensor_parallel_size", 1) > 1:
        return "tensor parallelism: no rank has all logits"
    if getattr(config, "lora_config", None) is not None:
        return "LoRA: vLLM makes logits for the requests of a step alone"
    return ""


def check_hidden_states(vllm_config: Any) -> None:
    """Refuses configurations in which rows would be stored in wrong slots; raises as `HiddenStatesWorker`."""
    given = additional_config(vllm_config)
    for name, value in given.items():
        if name == "pc_hidden_states_dir" and (not isinstance(value, str) or not value):
            raise ValueError(f"{name}: got {value!r}, needs the path of a folder")
        if name.startswith("pc_hidden_states_dir_") and "pc_hidden_states_dir" not in given:
            raise ValueError(f"{name}: got one without pc_hidden_states_dir, needs the folder that it bounds")
        if name.endswith("_dir_seconds") and (type(value) not in (int, float) or not value > 0):
            raise ValueError(f"{name}: got {value!r}, needs a number above 0")
        if name == "pc_hidden_states_device" and value not in ("cpu", "cuda"):
            raise ValueError(f"{name}: got {value!r}, needs 'cpu' or 'cuda'")
        if name.startswith("pc_hidden_states_") and name.endswith("bytes") and (type(value) is not int or value < 1):
            raise ValueError(f"{name}: got {value!r}, needs an integer of at least 1")
    scheduler = vllm_config.scheduler_config
    if vllm_config.speculative_config is not None and scheduler.async_scheduling:
        raise ValueError("async_scheduling: got True with speculation, needs False for hidden states")
    connector = vllm_config.kv_transfer_config
    if connector is not None and not has_policy(vllm_config):
        raise ValueError("kv_transfer_config: a connector fills blocks unseen, needs PC_VLLM=eviction,hidden_states")
    if getattr(vllm_config.model_config, "runner_type", "") == "pooling":
        if connector is not None:
            raise ValueError("kv_transfer_config: got a connector, whose blocks have no rows to pool, needs None")
        if not scheduler.enable_chunked_prefill:
            raise ValueError("enable_chunked_prefill: got False, needs True for poolers to put rows together")
        if getattr(vllm_config, "use_v2_model_runner", False):
            raise ValueError("VLLM_USE_V2_MODEL_RUNNER: got runner V2 with a pooling model, needs 0 for hidden states")


def check_pooler(pooler: Any) -> None:
    """Refuses, by ValueError, poolers of each token that do not join the chunks of a prompt, where hits are put in."""
    for task in pooler.get_supported_tasks():
        own = (getattr(pooler, "poolers_by_task", None) or {}).get(task, pooler)  # not among a dispatcher's modules
        if task.startswith("token_") and not any(isinstance(module, AllPool) for module in own.modules()):
            raise ValueError(f"model: got the pooler {type(own).__name__}, needs one on vLLM's AllPool for {task}")


def take_hidden_states(llm: Any) -> dict[str, dict[str, torch.Tensor] | None]:
    """The hidden states of prompts that asked vLLM's `LLM` for them and were completed since the last call.

    By request id, as in vLLM's outputs, and name ("hidden_states", "aux.0" and on) `[num_prompt_tokens, *]`; None for a
    prompt of which a KV connector brought a part: ask again with `skip_reading_prefix_cache=True`.
    """
    return _gather(llm, "pc_take_hidden_states")


def take_prompt_logprobs(llm: Any) -> dict[str, torch.Tensor | None]:
    """Log-probabilities of the prompts' tokens, prefix hits or not; call before `take_hidden_states`.

    By request id `[num_prompt_tokens - 1]` float32; None as in `take_hidden_states`.
    """
    return _gather(llm, "pc_prompt_logprobs")


def _gather(llm: Any, method: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for taken in llm.collective_rpc(method):
        found.update({known_id(request): rows for request, rows in taken.items()})
    return found


def known_id(request: str) -> str:
    """The id of a request as vLLM's callers know it, without the random characters that vLLM appends."""
    return request if getattr(envs, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", False) else request.rpartition("-")[0]
