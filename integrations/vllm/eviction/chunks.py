"""Prompts in chunks at fixed places, so that what a request's bits depend on does not change with what is cached.

A product of matrices may round by how many rows it has. So a chunk of a prompt is in a step whole or not at all, hits
end where chunks do, whole chunks of prompts alone are found again, and tokens of an answer are computed one at a time,
those of a preempted request too.
"""

from __future__ import annotations

from typing import Any

from vllm import envs

from ..api import logger
from ..reasons import clipping_reasons, first_reason

CHUNK = 128
"""Tokens of a chunk, unless `pc_chunk` says it."""


class FixedChunks:
    """Clips what a scheduler computes of a prompt in a step, and what its cache finds and publishes."""

    def __init__(self, scheduler: Any, chunk: int) -> None:
        coordinator = scheduler.kv_cache_manager.coordinator
        self.chunk = chunk
        self._find, self._publish = coordinator.find_longest_cache_hit, coordinator.cache_blocks
        coordinator.find_longest_cache_hit, coordinator.cache_blocks = self.find, self.publish

    def clip(self, request: Any, num_computed: int, num_new: int) -> int:
        """A prompt's chunk or nothing of it, and one token of an answer."""
        if num_computed >= request.num_prompt_tokens:
            return min(num_new, 1)
        end = min(request.num_prompt_tokens, self._down(num_computed) + self.chunk)
        return end - num_computed if num_computed + num_new >= end else 0

    def find(self, block_hashes: Any, max_cache_hit_length: int) -> Any:
        """In place of vLLM's search: the longest hit that ends with a chunk in every group of layers."""
        found = self._find(block_hashes, max_cache_hit_length)
        while (whole := self._down(found[1])) != found[1]:
            found = self._find(block_hashes, whole)
        return found

    def publish(self, request: Any, num_computed_tokens: int) -> None:
        """In place of vLLM's: KV of other shapes, a prompt's last chunk and its answer, is not found again."""
        self._publish(request, min(num_computed_tokens, self._down(request.num_prompt_tokens)))

    def _down(self, tokens: int) -> int:
        return tokens - tokens % self.chunk


def make_chunks(scheduler: Any, asked: str) -> FixedChunks | None:
    """Chunks of `asked` tokens; for "" of `CHUNK` where vLLM is to be batch-invariant, and none elsewhere.

    Raises:
        ValueError: What was asked for is no multiple of the cache's blocks.
    """
    size: int = scheduler.block_size
    if asked and (not asked.isdecimal() or int(asked) % size):
        raise ValueError(f"pc_chunk: got {asked!r}, needs a multiple of block_size={size}, or 0 for none")
    chunk = int(asked or bool(envs.VLLM_BATCH_INVARIANT) * -(-CHUNK // size) * size)
    if not chunk:
        return None
    if reason := why_no_chunks(scheduler, chunk):
        logger.warning_once("answers may depend on what is cached: prompts are not kept to chunks under %s", reason)
        return None
    logger.info_once("prompts are computed in chunks of %d tokens, and hits end where chunks do", chunk)
    return FixedChunks(scheduler, chunk)


def why_no_chunks(scheduler: Any, chunk: int) -> str:
    """What of an engine makes fixed chunks impossible, or ""."""
    given = scheduler.scheduler_config
    budget = min(scheduler.max_num_scheduled_tokens, given.long_prefill_token_threshold or chunk)
    media = scheduler.vllm_config.model_config.is_multimodal_model
    reasons = {
        "layers with states": scheduler.has_mamba_layers,
        "images, sound or an encoder": media or scheduler.is_encoder_decoder,  # for which vLLM sets others
        f"steps of {budget} tokens, fewer than a chunk's {chunk}": budget < chunk,
    }
    return first_reason(reasons | clipping_reasons(scheduler))
