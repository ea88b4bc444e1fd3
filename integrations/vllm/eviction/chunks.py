"""Prompts in chunks at fixed places, so that results do not depend on the cached tokens, to the last bit.

A matrix product may round differently for another number of rows. So a step never computes a part of a chunk. A hit
ends at a chunk's end, and only whole chunks of prompts are published. Each token of an answer is computed alone, also
when a preempted request resumes.
"""

from __future__ import annotations

from typing import Any

from ..api import is_batch_invariant, logger
from ..reasons import can_serve, clipping_reasons, first_reason

CHUNK = 128
"""Number of tokens in a chunk, unless `pc_chunk` gives another number."""


class FixedChunks:
    """Limits on the tokens that a scheduler computes in a step, and on the blocks that it finds and publishes."""

    def __init__(self, scheduler: Any, chunk: int) -> None:
        coordinator = scheduler.kv_cache_manager.coordinator
        self.chunk = chunk
        self._find, self._publish = coordinator.find_longest_cache_hit, coordinator.cache_blocks
        coordinator.find_longest_cache_hit, coordinator.cache_blocks = self.find, self.publish

    def clip(self, request: Any, num_computed: int, num_new: int) -> int:
        """Return the number of tokens to compute.

        For a prompt this is the rest of its chunk, or 0 if the rest does not fit. For an answer it is at most 1.
        """
        if num_computed >= request.num_prompt_tokens:
            return min(num_new, 1)
        end = min(request.num_prompt_tokens, self._down(num_computed) + self.chunk)
        return end - num_computed if num_computed + num_new >= end else 0

    def find(self, block_hashes: Any, max_cache_hit_length: int) -> Any:
        """Find the longest hit that ends with a chunk in every group of layers, in place of vLLM's search."""
        found = self._find(block_hashes, max_cache_hit_length)
        while (whole := self._down(found[1])) != found[1]:
            found = self._find(block_hashes, whole)
        return found

    def publish(self, request: Any, num_computed_tokens: int) -> None:
        """Publish whole chunks of a prompt only. The bits of a shorter last chunk and of an answer may differ.

        Of a session, only the first prompt counts: later ones include answers.
        """
        if not hasattr(request, "pc_first_prompt"):
            request.pc_first_prompt = request.num_prompt_tokens
        self._publish(request, min(num_computed_tokens, self._down(request.pc_first_prompt)))

    def _down(self, tokens: int) -> int:
        return tokens - tokens % self.chunk


def make_chunks(scheduler: Any, asked: str) -> FixedChunks | None:
    """Make chunks for a scheduler. Return None if none are asked for, or if the engine cannot have them.

    Args:
        scheduler: The scheduler.
        asked: The number of tokens; "0" means none. "" means `CHUNK`, rounded up to whole blocks, if vLLM is
            batch-invariant, else none.

    Raises:
        ValueError: `asked` is no number, or no multiple of the block size.
    """
    size: int = scheduler.block_size
    if asked and (not asked.isdecimal() or int(asked) % size):
        raise ValueError(f"pc_chunk: got {asked!r}, needs a multiple of block_size={size}, or 0 for none")
    chunk = int(asked or is_batch_invariant() * -(-CHUNK // size) * size)
    message = "answers may depend on the cached tokens: prompts are not computed in fixed chunks"
    if not chunk or not can_serve("eviction.chunks", scheduler, lambda each: why_no_chunks(each, chunk), message):
        return None
    logger.info_once("prompts are computed in chunks of %d tokens, and hits end where chunks do", chunk)
    return FixedChunks(scheduler, chunk)


def why_no_chunks(scheduler: Any, chunk: int) -> str:
    """Return why fixed chunks are impossible in an engine, or ""."""
    given = scheduler.scheduler_config
    budget = min(scheduler.max_num_scheduled_tokens, given.long_prefill_token_threshold or chunk)
    media = scheduler.vllm_config.model_config.is_multimodal_model
    reasons = {
        "layers with states": scheduler.has_mamba_layers,
        "windows that hits compute again": scheduler.prefix_replay_tokens,
        "images, sound or an encoder": media or scheduler.is_encoder_decoder,  # vLLM chooses their chunks
        f"steps of {budget} tokens, fewer than a chunk's {chunk}": budget < chunk,
    }
    return first_reason(reasons | clipping_reasons(scheduler))
