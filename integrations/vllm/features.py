"""Switches features on in this process, each once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .versions import check_version

_configure: dict[str, Callable[[Any], None]] = {}
"""By feature: what it sets in a configuration of vLLM that its user has left open."""


def _enable_attention() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    # CUSTOM is what users name elsewhere; vLLM's CPU platform takes CPU_ATTN whatever is named.
    register_backend(AttentionBackendEnum.CUSTOM, f"{__package__}.attention.PagedAttentionBackend")
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__package__}.attention.PagedAttentionBackend")

    from .attention.common_prefix import follow_common_prefixes

    follow_common_prefixes()


def _enable_eviction() -> None:
    def configure(vllm_config: Any) -> None:
        scheduler = vllm_config.scheduler_config
        if scheduler.scheduler_cls is None:
            kind = "AsyncPolicyScheduler" if scheduler.async_scheduling else "PolicyScheduler"
            scheduler.scheduler_cls = f"{__package__}.eviction.{kind}"

    _configure["eviction"] = configure
    _hook_configurations()


def _enable_hidden_states() -> None:
    def configure(vllm_config: Any) -> None:
        parallel = vllm_config.parallel_config
        if parallel.worker_cls in ("vllm.v1.worker.cpu_worker.CPUWorker", "vllm.v1.worker.gpu_worker.Worker"):
            parallel.worker_cls = f"{__package__}.hidden_states.HiddenStatesWorker"

    _configure["hidden_states"] = configure
    _hook_configurations()


def _enable_omni() -> None:
    from vllm_omni.core import prefix_cache
    from vllm_omni.core.prefix_cache import group_view, manager, runner_mixin

    from .omni import OmniPrefixCacheManager, check_groups, make_view

    # Runners take these names out of their own module when they make the cache.
    for module in (prefix_cache, manager, runner_mixin):
        module.OmniPrefixCacheManager = OmniPrefixCacheManager
    for module in (prefix_cache, group_view):
        module.check_prefix_cache_kv_groups = check_groups
    for module in (prefix_cache, group_view, runner_mixin):
        module.get_prefix_cache_group_view = make_view


def _hook_configurations() -> None:
    """Lets `_configure` see every configuration right after vLLM has completed it."""
    from vllm.config import VllmConfig

    complete = VllmConfig.__post_init__
    if getattr(complete, "completes_for_pc", False):
        return

    def complete_and_configure(self: Any) -> None:
        complete(self)
        for configure in _configure.values():
            configure(self)

    complete_and_configure.completes_for_pc = True  # type: ignore[attr-defined]
    VllmConfig.__post_init__ = complete_and_configure


FEATURES: dict[str, Callable[[], None]] = {
    "attention": _enable_attention,
    "eviction": _enable_eviction,
    "hidden_states": _enable_hidden_states,
    "omni": _enable_omni,
}
"""What `PC_VLLM` may name."""


def enable(*names: str) -> None:
    """Switches features on in this process, before vLLM makes an engine; doing it again changes nothing.

    Args:
        names: Of `FEATURES`.

    Raises:
        ValueError: A name that is no feature; nothing has been switched on.
        UnsupportedVersionError: The installed vLLM is not one that the feature was written for; likewise.

    Examples:
        >>> from pc.integrations.vllm import enable
        >>> try:
        ...     enable("attentoin")
        ... except ValueError as error:
        ...     print(str(error).partition(",")[0])
        PC_VLLM: got 'attentoin'
    """
    for name in names:
        if name not in FEATURES:
            raise ValueError(f"PC_VLLM: got {name!r}, needs some of {', '.join(FEATURES)}")
    for name in names:
        check_version(name)
    for name in names:
        FEATURES[name]()
