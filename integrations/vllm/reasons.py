"""Reasons why an engine of vLLM cannot do what a feature needs."""

from __future__ import annotations

from typing import Any


def clipping_reasons(scheduler: Any) -> dict[str, Any]:
    """Return what of an engine keeps this package from ending a chunk of prefill, and whether it is there."""
    speculates = scheduler.vllm_config.speculative_config is not None
    return {
        "speculative decoding": speculates or scheduler.num_lookahead_tokens,
        "a KV connector": scheduler.connector is not None or scheduler.aux_output_connector is not None,
        "pipeline parallelism": scheduler.use_pp,
        "context parallelism": scheduler.dcp_world_size > 1 or scheduler.pcp_world_size > 1,
        "prefill in one piece": not scheduler.scheduler_config.enable_chunked_prefill,
    }


def first_reason(reasons: dict[str, Any]) -> str:
    """Return the first reason that is there, or ""."""
    return next((reason for reason, holds in reasons.items() if holds), "")
