"""The hidden states of prompts in one worker: stored every step, read whole in the step that completes a prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ....cache.tensors.step import Step
from ....cache.tensors.tensor_cache import TensorCache
from ..groups import full_attention_group
from .tables import RequestTables

KEPT = 1024
"""Prompts whose rows wait to be taken; the oldest are dropped beyond."""


class PromptHiddenStates:
    """Stands between vLLM's model runner and its scheduler, from after the warm-up on.

    Between the two halves of a step both runners leave the hidden states of its tokens where they can be read. A row is
    stored in the slot that its token's KV was written to, so it is found wherever the KV is found. The rows of a prompt
    are read in the step that completes it, while its blocks are held.

    Args:
        runner: vLLM's model runner.
        config: Its KV cache: one group at least has full attention, since windows give blocks of a prefix back.
        asked_for: The name under `extra_args` of sampling parameters that asks for a prompt's rows.
        device: Where rows are kept.
        max_bytes: Bound of the rows; None: half of the memory that is available.

    Raises:
        ValueError: No group with full attention.
    """

    def __init__(
        self, runner: Any, config: Any, asked_for: str, device: str = "cpu", max_bytes: int | None = None
    ) -> None:
        number = full_attention_group(config.kv_cache_groups)
        size = config.kv_cache_groups[number].kv_cache_spec.block_size
        self.rows = TensorCache(None, config.num_blocks, size, device=device, max_bytes=max_bytes)
        self.tables = RequestTables(number, size, asked_for)
        self.finished: dict[str, dict[str, torch.Tensor] | None] = {}
        self.prompts: dict[str, list[int]] = {}
        self.runner = runner
        self._execute, runner.execute_model = runner.execute_model, self.execute_model
        self._output: Any = None
        if getattr(runner, "is_pooling_model", False):
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

        They put together what the chunks of a prompt gave; what a prompt has there is made to be what lies in front of
        the tokens of this step, so that a hit, or one behind a preemption, leaves a row for each token.
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
            table = np.array(self.tables.requests[request].blocks, np.int32)
            chunks[:] = [self.rows.load(table, ["hidden_states"], num_tokens=begin)["hidden_states"].to(device)]

    def _follow(self, output: Any) -> dict[str, int]:
        """What a step does to blocks; the first position of each of its requests."""
        self.rows.forget(getattr(output, "pc_fresh_blocks", ()))
        positions = self.tables.follow(output)
        for copy in output.kv_cache_block_copies or ():
            self.rows.copy([(copy.src_block_id, copy.dst_block_id)])
        return positions

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
            followed = self.tables.requests[request]
            computed = positions[request] + counts[request]
            if not followed.complete and computed >= len(followed.prompt):
                followed.complete = True
                if followed.asked:
                    self._take(request, followed.blocks, followed.prompt, list(tensors))

    def _take(self, request: str, blocks: list[int], prompt: list[int], names: list[str]) -> None:
        """Reads the rows of a prompt; None stands for one that somebody else computed a part of."""
        table = np.array(blocks, np.int32)
        whole = self.rows.available(table, names, num_tokens=len(prompt)) == len(prompt)
        self.finished[request] = self.rows.load(table, names, num_tokens=len(prompt)) if whole else None
        self.prompts[request] = prompt
        while len(self.finished) > KEPT:
            oldest = next(iter(self.finished))
            del self.finished[oldest], self.prompts[oldest]

    def take(self) -> dict[str, dict[str, torch.Tensor] | None]:
        """The rows of the prompts that have been completed since the last call, by request."""
        taken, self.finished, self.prompts = self.finished, {}, {}
        return taken

    def prompt_logprobs(self) -> dict[str, torch.Tensor | None]:
        """Log-probabilities of the tokens of those prompts, from the second on, `[num_tokens - 1]`; keeps the rows."""
        found: dict[str, torch.Tensor | None] = {}
        for request, rows in self.finished.items():
            found[request] = None
            if rows is not None:
                hidden = rows["hidden_states"][:-1].to(self.runner.device)
                logits = self.runner.model.compute_logits(hidden).float()
                tokens = torch.tensor(self.prompts[request][1:], device=logits.device)
                found[request] = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].cpu()
        return found
