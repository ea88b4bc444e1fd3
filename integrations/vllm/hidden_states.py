"""Hidden states of whole prompts from vLLM, prefix hits included. Their rows are stored by slot of the KV cache.

This file has a worker for vLLM (`worker_cls`), its work in each step, and functions that get the rows from an engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ...cache.tensors.step import Step
from ...cache.tensors.tensor_cache import TensorCache
from ..hints import extra_args
from .api import AllPool, available, callers_request_id, check_version, logger, replace_pooling
from .api import PlatformWorker as Base
from .features import HIDDEN_STATES_OPTIONS, additional_config, announce, has_policy
from .hidden_files import MAX_BYTES, MAX_SECONDS, RowsFolder
from .reasons import asks, first_reason, refuse_diffusion
from .scheduler_output import follow_tables, full_attention_group, slots_of

ASKED = "pc_hidden_states"
"""The key in `extra_args` of `SamplingParams` that asks for the rows of a prompt."""

ASKED_LOGPROBS = "pc_prompt_logprobs"
"""The key that asks for the log-probabilities of a prompt's tokens, in a server that writes into a folder."""

LOGITS = 1 << 26
"""Maximum number of logits computed at once for log-probabilities: 256 MiB in float32."""

WAITING_BYTES = 1 << 30
"""Maximum bytes of rows that wait for `take`, unless `pc_hidden_states_waiting_bytes` gives another number."""

_OVERHEAD = 1024
"""Bytes counted for a completed prompt besides its tensors. They also limit the number of prompts without rows."""


@dataclass
class FollowedPrompt:
    """The prompt of a request, and the results that the request asks for.

    Attributes:
        tokens: The tokens of the prompt, int64. Without tokens if some are given as embeddings or if nothing is asked.
        length: The number of its positions.
        asked: Whether the request asks for hidden states.
        asked_logprobs: Whether the request asks for log-probabilities.
        complete: Whether all of the prompt has been computed.
        rows: The rows of a complete prompt by name, while they wait for `take`. None if some are missing.
    """

    tokens: torch.Tensor
    length: int
    asked: bool
    asked_logprobs: bool
    complete: bool = False
    rows: dict[str, torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that count toward `waiting_bytes`."""
        return _OVERHEAD + self.tokens.nbytes + sum(tensor.nbytes for tensor in (self.rows or {}).values())


class PromptHiddenStates:
    """The hidden states of prompts in one worker. Each step stores rows; the step that completes a prompt reads them.

    This class replaces the runner's `execute_model` after the warm-up. vLLM runs a step in two calls, and this is the
    first. Between the calls, its model runners (V1 and V2) keep the hidden states of the step's tokens in an attribute.
    A row is stored in the slot of its token's KV, so a prefix hit finds the row with the KV. Rows are read while the
    request still references the prompt's blocks.

    Args:
        runner: vLLM's model runner.
        config: vLLM's KV cache configuration.
        asked_for: The key in a request's `extra_args` that asks for its rows.
        device: The device of the rows.
        max_bytes: The most bytes of rows; None: half of the memory available.
        waiting_bytes: The most bytes of rows that wait for `take`. Beyond this limit, the rows of the prompts that
            were completed first are dropped, with one warning. Those of the last prompt always stay.
        folder: A folder. Rows are written there and do not wait for `take`.

    Raises:
        ValueError: No group of layers has full attention. Layers with a window free the blocks of a prefix. Or a step
            does not compute all layers of its tokens, as with DeepSeek-V4.1's `swa_bounded_replay`.
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
        self._group = full_attention_group(config.kv_cache_groups)
        if any(group.kv_cache_spec.prefix_replay_tokens for group in config.kv_cache_groups):
            raise ValueError(
                "swa_bounded_replay: got a model that computes the window of a hit again, and some layers only for a "
                "prompt's last window; needs --no-swa-bounded-replay for hidden states"
            )
        size = config.kv_cache_groups[self._group].kv_cache_spec.block_size
        self.rows = TensorCache(None, config.num_blocks, size, device=device, max_bytes=max_bytes)
        self._tables: dict[str, list[int]] = {}
        self._has_connector = getattr(getattr(runner, "vllm_config", None), "kv_transfer_config", None) is not None
        self._asked_for = asked_for
        self._followed: dict[str, FollowedPrompt] = {}
        self.waiting_bytes = waiting_bytes
        self.waiting: dict[str, FollowedPrompt] = {}
        self._nbytes = 0  # bytes of the waiting rows
        self.folder = folder
        self._warned = False
        self.runner = runner
        self._execute, runner.execute_model = runner.execute_model, self.execute_model
        self._output: Any = None
        if pools(runner):
            self._pool = replace_pooling(runner, self.pool)

    def execute_model(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the first half of a step, then store its rows. A dummy run stores none."""
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
        """Pool a step's hidden states, after token-wise poolers have got the rows of prefix hits.

        A token-wise pooler keeps the chunks of a prompt and joins them at its end. If the chunks lack
        tokens of earlier steps, this method replaces all chunks with the stored rows of all earlier tokens. The result
        then has a row for each token, also after a preemption.
        """
        output, self._output = self._output, None
        if output is not None:
            positions = self._follow(output)
            self._store(output, positions, SimpleNamespace(hidden_states=hidden_states))
            for request, begin in positions.items():
                self._complete(request, begin, hidden_states.device)
        return self._pool(hidden_states, *args, **kwargs)

    def _complete(self, request: str, begin: int, device: torch.device) -> None:
        """Write the rows before a step's tokens into the list that a token-wise pooler reads."""
        batch = self.runner.input_batch
        if not (batch.pooling_params[request].task or "").startswith("token_"):
            return
        chunks = batch.pooling_states[request].hidden_states_cache
        if sum(map(len, chunks)) != begin:
            table = np.array(self._tables[request], np.int32)
            chunks[:] = [self.rows.load(table, ["hidden_states"], num_tokens=begin)["hidden_states"].to(device)]

    def _follow(self, output: Any) -> dict[str, int]:
        """Update the tables and rows for a step, and return the first position of each of its requests."""
        fresh = getattr(output, "pc_fresh_blocks", None)
        if fresh is None:  # from vLLM's own scheduler: a connector may have filled any block
            fresh = range(self.rows.num_blocks) if self._has_connector else ()
        self.rows.forget(fresh)
        for request in output.finished_req_ids:
            self._followed.pop(request, None)
        positions: dict[str, int] = {}
        for each in follow_tables(self._tables, output, self._group):
            positions[each.request_id] = each.begin
            followed = self._followed.get(each.request_id)
            # A session's next turn comes as a new request with a longer prompt, a resumed request with the same one.
            if each.data is not None and (followed is None or followed.length != each.data.prompt_len):
                extra = extra_args(each.data)
                has_tokens = each.data.prompt_embeds is None
                asked_logprobs = self._gives_logprobs(asks(extra, ASKED_LOGPROBS), has_tokens)
                asked = asks(extra, self._asked_for), asked_logprobs
                ids = each.data.prompt_token_ids if any(asked) and has_tokens else ()
                tokens = torch.tensor(ids, dtype=torch.int64)
                self._followed[each.request_id] = FollowedPrompt(tokens, each.data.prompt_len, *asked)
        for copy in output.kv_cache_block_copies or ():
            self.rows.copy([(copy.src_block_id, copy.dst_block_id)])
        return positions

    def _gives_logprobs(self, wanted: bool, has_tokens: bool) -> bool:
        """Return whether to write log-probabilities for a request. Log once why they cannot be computed."""
        if not wanted:
            return False
        own = {"an engine without pc_hidden_states_dir": self.folder is None, "prompts of embeddings": not has_tokens}
        if reason := first_reason(own) or why_no_logprobs(self.runner):
            logger.warning_once("%s: not written under %s", ASKED_LOGPROBS, reason)
        return not reason

    def _store(self, output: Any, positions: dict[str, int], state: Any) -> None:
        """Store a step's rows by slot, and read the rows of the prompts that the step completes."""
        batch = state.input_batch if hasattr(state, "input_batch") else self.runner.input_batch
        counts = output.num_scheduled_tokens
        requests = [request for request in batch.req_ids if request in counts]
        tables, size = self._tables, self.rows.block_size
        slots = [slots_of(tables[request], size, positions[request], counts[request]) for request in requests]
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
                    self._take(request, tables[request], prompt, list(tensors))

    def _take(self, request: str, blocks: list[int], prompt: FollowedPrompt, names: list[str]) -> None:
        """Read the rows of a prompt, for the folder or `take`. They are None if a connector loaded a part of its KV."""
        table, length = np.array(blocks, np.int32), prompt.length
        whole = self.rows.available(table, names, num_tokens=length) == length
        rows = self.rows.load(table, names, num_tokens=length) if whole else None
        if self.folder is not None:
            tensors = {"token_ids": prompt.tokens}
            if rows is not None and prompt.asked:
                tensors |= rows
            if rows is not None and prompt.asked_logprobs:
                tensors["prompt_logprobs"] = self._logprobs(prompt.tokens, rows["hidden_states"])
            self.folder.put(callers_request_id(request), tensors, {"complete": str(whole).lower()})
            return
        if request in self.waiting:
            self._nbytes -= self.waiting.pop(request).nbytes
        self.waiting[request] = found = replace(prompt, rows=rows)  # a copy: rows must not stay when they are taken
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
        """Return the rows of the prompts that were completed since the last call, by request."""
        taken, self.waiting, self._nbytes = self.waiting, {}, 0
        return {request: each.rows for request, each in taken.items()}

    def prompt_logprobs(self) -> dict[str, torch.Tensor | None]:
        """Return the log-probabilities `[num_tokens - 1]` of the prompts that `take` would return; keep their rows.

        They begin with the second token of a prompt. They are None for a prompt of embeddings.
        """
        return {
            request: self._logprobs(each.tokens, each.rows["hidden_states"]) if each.rows and len(each.tokens) else None
            for request, each in self.waiting.items()
        }

    def _logprobs(self, prompt: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the log-probability of each token but the first, piece by piece, since logits are large.

        It is -inf for a token without a logit: in some models, tokens of images are beyond the vocabulary.
        """
        if len(prompt) < 2:
            return torch.empty(0)
        device, piece = self.runner.device, max(1, LOGITS // self.runner.model_config.get_vocab_size())
        parts = []
        for rows, tokens in zip(hidden[:-1].split(piece), prompt[1:].split(piece), strict=True):
            found = self.runner.model.compute_logits(rows.to(device)).float().log_softmax(-1)
            of_tokens = found.gather(1, tokens.clamp(max=found.shape[1] - 1).to(device)[:, None])[:, 0].cpu()
            parts.append(of_tokens.masked_fill(tokens >= found.shape[1], -torch.inf))
        return torch.cat(parts)


class HiddenStatesWorker(Base):
    """vLLM's worker with the hidden states of prompts.

    Only the last pipeline stage stores rows: on all its tensor-parallel ranks if the model pools, else on the first.
    `additional_config` of the engine may have these options:

    - `pc_hidden_states_device`: the device of the rows, "cpu" (the default; pinned if there is a GPU) or "cuda".
    - `pc_hidden_states_bytes`: the most bytes of rows; by default half of the available memory.
    - `pc_hidden_states_waiting_bytes`: the most bytes of rows that wait to be taken or written; 1 GiB by default.
    - `pc_hidden_states_dir`: a folder with a file for each prompt whose request asks for rows, for clients of a server.
    - `pc_hidden_states_dir_bytes`, `pc_hidden_states_dir_seconds`: limits of the folder; 10 GiB and an hour by default.

    If the installed vLLM lacks what the rows need, the worker runs as vLLM's own and logs why.

    Raises:
        ValueError: At start-up. An option is out of range, or no layer has full attention. Or `async_scheduling`
            is on with speculation, so the host does not know the positions of a step's tokens. Or there is a KV
            connector with a pooling model, or without `pc`'s scheduler. Or the model pools without chunked prefill or
            under runner V2, or has a token-wise pooler without vLLM's AllPool. Or context parallelism or
            `kv_sharing_fast_prefill` is on. Or it is a diffusion model.
        UnsupportedVersionError: The model pools, and vLLM lacks the parts that are needed to add the rows of hits.
    """

    pc_hidden_states: PromptHiddenStates | None = None
    _pc_follows = True

    def initialize_from_config(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Check the configuration, initialize the caches as vLLM does, and remember the KV cache configuration."""
        self._pc_follows = available("hidden_states", worker=self, runner=self.model_runner)
        if self._pc_follows:
            check_hidden_states(self.vllm_config)
        if self._pc_follows and pools(self.model_runner):
            # `pool_prefix_hits` lets requests of token-wise poolers read hits, so the pooler needs the rows of hits.
            check_version("hidden_states.pooling", runner=self.model_runner)
            check_pooler(self.model_runner.get_model().pooler)
        super().initialize_from_config(kv_cache_config, *args, **kwargs)
        self._pc_config = kv_cache_config

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as vLLM does, then start to store rows, because the requests of the warm-up are dummies."""
        times = super().compile_or_warm_up_model()
        if not self._pc_follows:
            return times
        # Every rank pools, so every rank needs the rows of hits.
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
        """Write the rows that wait, then shut down as vLLM does."""
        if self.pc_hidden_states is not None and self.pc_hidden_states.folder is not None:
            self.pc_hidden_states.folder.close()
        super().shutdown()

    def pc_take_hidden_states(self) -> dict[str, dict[str, torch.Tensor] | None]:
        """Return the rows of the prompts completed since the last call, by vLLM's request id; {} in other ranks."""
        return {} if self.pc_hidden_states is None else self.pc_hidden_states.take()

    def pc_prompt_logprobs(self) -> dict[str, torch.Tensor | None]:
        """Return the log-probabilities of the prompts that `pc_take_hidden_states` would return; keep their rows.

        Raises:
            RuntimeError: This engine cannot compute them.
        """
        if reason := why_no_logprobs(self.vllm_config):
            raise RuntimeError(f"prompt_logprobs: got {reason}")
        return {} if self.pc_hidden_states is None else self.pc_hidden_states.prompt_logprobs()


def pools(runner: Any) -> bool:
    """Return whether a runner pools hidden states instead of sampling.

    Runner V2 has no such flag, and `check_hidden_states` refuses it for pooling models.
    """
    return bool(getattr(runner, "is_pooling_model", False))


def why_no_logprobs(config: Any) -> str:
    """Return why an engine cannot compute log-probabilities, or "". `config` may also be its model runner."""
    if getattr(getattr(config, "parallel_config", None), "tensor_parallel_size", 1) > 1:
        return "tensor parallelism: no rank has all logits"
    if getattr(config, "lora_config", None) is not None:
        return "LoRA: vLLM computes logits only for the requests of the current step"
    return ""


def check_hidden_states(vllm_config: Any) -> None:
    """Check the options, and refuse configurations in which rows would be wrong. Raises as `HiddenStatesWorker`."""
    given = additional_config(vllm_config)
    for name, value in given.items():
        if name == "pc_hidden_states_dir" and (not isinstance(value, str) or not value):
            raise ValueError(f"{name}: got {value!r}, needs the path of a folder")
        if name.startswith("pc_hidden_states_dir_") and "pc_hidden_states_dir" not in given:
            raise ValueError(f"{name}: got {value!r} without pc_hidden_states_dir, needs the folder that it limits")
        if name.endswith("_dir_seconds") and (type(value) not in (int, float) or not value > 0):
            raise ValueError(f"{name}: got {value!r}, needs a number above 0")
        if name == "pc_hidden_states_device" and value not in ("cpu", "cuda"):
            raise ValueError(f"{name}: got {value!r}, needs 'cpu' or 'cuda'")
        if name.startswith("pc_hidden_states_") and name.endswith("bytes") and (type(value) is not int or value < 1):
            raise ValueError(f"{name}: got {value!r}, needs an integer of at least 1")
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1:
            raise ValueError(f"{name}: got {getattr(parallel, name)}, needs 1 for hidden states")
    if vllm_config.cache_config.kv_sharing_fast_prefill:
        raise ValueError("kv_sharing_fast_prefill: got True, needs False: it leaves out layers of a prompt's tokens")
    refuse_diffusion(vllm_config, "hidden states")
    if vllm_config.speculative_config is not None and scheduler.async_scheduling:
        raise ValueError("async_scheduling: got True with speculation, needs False for hidden states")
    connector = vllm_config.kv_transfer_config
    if connector is not None and not has_policy(vllm_config):
        raise ValueError(
            "kv_transfer_config: got a connector without pc's scheduler, needs PC_VLLM=eviction,hidden_states"
        )
    if getattr(vllm_config.model_config, "runner_type", "") == "pooling":
        if connector is not None:
            raise ValueError("kv_transfer_config: got a connector, whose blocks have no rows to pool, needs None")
        if not scheduler.enable_chunked_prefill:
            raise ValueError("enable_chunked_prefill: got False, needs True for poolers to put rows together")
        if getattr(vllm_config, "use_v2_model_runner", False):
            raise ValueError("VLLM_USE_V2_MODEL_RUNNER: got runner V2 with a pooling model, needs 0 for hidden states")


def check_pooler(pooler: Any) -> None:
    """Check that token-wise poolers use vLLM's AllPool, because rows of hits are added to the chunks that it joins.

    Raises:
        ValueError: A token-wise pooler does not use AllPool.
    """
    for task in pooler.get_supported_tasks():
        own = (getattr(pooler, "poolers_by_task", None) or {}).get(
            task, pooler
        )  # a dispatcher does not list its poolers as modules
        if task.startswith("token_") and not any(isinstance(module, AllPool) for module in own.modules()):
            raise ValueError(f"model: got the pooler {type(own).__name__}, needs one on vLLM's AllPool for {task}")


def take_hidden_states(llm: Any) -> dict[str, dict[str, torch.Tensor] | None]:
    """Return the hidden states of the prompts that were completed since the last call and whose requests ask for them.

    Args:
        llm: vLLM's `LLM`.

    Returns:
        For each request id, as in vLLM's outputs, the rows `[num_prompt_tokens, *]` by name: "hidden_states", "aux.0"
        and so on. None for a prompt of which a KV connector loaded a part; ask again with
        `skip_reading_prefix_cache=True`.
    """
    return _gather(llm, "pc_take_hidden_states")


def take_prompt_logprobs(llm: Any) -> dict[str, torch.Tensor | None]:
    """Return the log-probabilities of the prompts' tokens, prefix hits included. Call before `take_hidden_states`.

    Returns:
        By request id `[num_prompt_tokens - 1]`, float32; -inf for a token without a logit. None as in
        `take_hidden_states`, and for embeddings.
    """
    return _gather(llm, "pc_prompt_logprobs")


def _gather(llm: Any, method: str) -> dict[str, Any]:
    """Call a method of all workers, and return their results together, by the ids that callers know."""
    found: dict[str, Any] = {}
    for taken in llm.collective_rpc(method):
        found.update({callers_request_id(request): rows for request, rows in taken.items()})
    return found
