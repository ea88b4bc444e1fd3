"""Properties of an engine of vLLM, and reasons why it cannot do what a feature needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..hints import extra_args
from .api import FullAttentionManager, available, logger


def chain_reasons(scheduler: Any) -> dict[str, Any]:
    """Return the reasons why an engine's cache is not one chain of blocks for each request, each true if it applies."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return {
        "several groups of layers, windows or states": [type(each) for each in managers] != [FullAttentionManager],
        "blocks of another size than their hashes": managers[0].block_size != scheduler.hash_block_size,
        "an encoder": scheduler.is_encoder_decoder or scheduler.ec_connector is not None,
    }


def clipping_reasons(scheduler: Any) -> dict[str, Any]:
    """Return the reasons why this package cannot end a chunk of prefill in an engine, each true if it applies."""
    speculates = scheduler.vllm_config.speculative_config is not None
    return {
        "speculative decoding": speculates or scheduler.num_lookahead_tokens,
        "a KV connector": scheduler.connector is not None or scheduler.aux_output_connector is not None,
        "pipeline parallelism": scheduler.use_pp,
        "context parallelism": scheduler.dcp_world_size > 1 or scheduler.pcp_world_size > 1,
        "prefill in one piece": not scheduler.scheduler_config.enable_chunked_prefill,
    }


def replays_whole_steps(compilation_config: Any, device: str) -> bool:
    """Return whether an engine on this kind of device replays whole steps from CUDA graphs, with tensors of fixed size.

    `compilation_config` is vLLM's. Its `cudagraph_mode` is None if the platform has no graphs.
    """
    mode = compilation_config.cudagraph_mode
    return device != "cpu" and mode is not None and bool(mode.has_full_cudagraphs())


def asks(extra: Mapping[str, Any], name: str) -> bool:
    """Return whether a request's extra arguments ask for something. A value that is neither true nor false does not."""
    value = extra.get(name)
    try:
        return bool(value)
    except Exception as error:  # such as an array's: it must not end the engine
        logger.warning("%s is ignored: got %s, needs true or false (%s)", name, type(value).__name__, error)
        return False


def asks_for_rows(request: Any) -> bool:
    """Return whether a request asks for results of each token. Moved and packed tokens have no rows for them."""
    extra = extra_args(request)
    return asks(extra, "pc_hidden_states") or asks(extra, "pc_prompt_logprobs")


def refuse_diffusion(vllm_config: Any, feature: str) -> None:
    """Raise ValueError if the model of an engine is a diffusion model."""
    if vllm_config.diffusion_config is not None:
        raise ValueError(f"model: got a diffusion model, which computes tokens several times; not served by {feature}")


def first_reason(reasons: dict[str, Any]) -> str:
    """Return the first reason that applies, or ""."""
    return next((reason for reason, holds in reasons.items() if holds), "")


def can_serve(
    feature: str, scheduler: Any, why_not: Callable[[Any], str], message: str, log: Callable[..., None] | None = None
) -> bool:
    """Return whether the installed vLLM and a scheduler's engine can serve a feature. Log once why they cannot.

    Args:
        feature: The name of the feature in `api.NAMES`.
        scheduler: The scheduler.
        why_not: Returns why the engine cannot serve the feature, or "".
        message: The consequence, for the log.
        log: The function that logs the message; None: a warning.
    """
    if not available(feature, scheduler=scheduler):
        return False
    reason = why_not(scheduler)
    if reason:
        (log or logger.warning_once)("%s under %s", message, reason)
    return not reason
