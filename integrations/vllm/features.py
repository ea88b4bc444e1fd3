"""Switches features on in this process, each once, checks their options, and says in the log what is in use."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ...cache.policies import DEPRECATED, POLICIES
from ..plugin import check_features, features_in_environment, wrap_once
from .api import available, check_version, make_logger
from .metrics import export_counts

VARIABLE = "PC_VLLM"
"""Names the features; further variables begin like it and set options of one feature each."""

REUSE = ("prefix", "gap", "anywhere")
"""What requests may reuse: a leading run of cached blocks; later ones too, behind a gap, as they do unless it is said;
or text at another position too, which is approximate."""

SCHEDULER_OPTIONS = {"pc_policy": "PC_VLLM_POLICY", "pc_reuse": "PC_VLLM_REUSE", "pc_chunk": "PC_VLLM_CHUNK"}
"""In `additional_config`, and the variables that stand for them."""

HIDDEN_STATES_OPTIONS = (
    *("pc_hidden_states_device", "pc_hidden_states_bytes", "pc_hidden_states_waiting_bytes"),
    *("pc_hidden_states_dir", "pc_hidden_states_dir_bytes", "pc_hidden_states_dir_seconds"),
)
"""In `additional_config`: see `HiddenStatesWorker`."""

VLLMS_WORKERS = ("auto", "vllm.v1.worker.cpu_worker.CPUWorker", "vllm.v1.worker.gpu_worker.Worker")

_BACKEND = f"{__package__}.attention.PagedAttentionBackend"
_LATENT_BACKEND = f"{__package__}.attention.latent.LatentAttentionBackend"

_enabled: set[str] = set()


def _enable_attention() -> None:
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from .attention.builder import follow_common_prefixes

    # CUSTOM is what users name elsewhere; vLLM's CPU platform takes CPU_ATTN whatever is named.
    register_backend(AttentionBackendEnum.CUSTOM, _BACKEND)
    register_backend(AttentionBackendEnum.CPU_ATTN, _BACKEND)
    for name in ("CUSTOM_MLA", "CPU_MLA", "AMX_MLA"):  # the first is new to vLLM
        register_backend(AttentionBackendEnum.__members__.get(name, name), _LATENT_BACKEND)
    selector._cached_get_attn_backend.cache_clear()  # what earlier engines of this process chose
    follow_common_prefixes()


def _enable_eviction() -> None:
    from .moves import follow_engines

    export_counts()  # what else this does is set in configurations, see `_complete`
    follow_engines()


def _enable_compression() -> None:
    from .compression.options import refuse_wrong_options
    from .moves import PREPARATIONS

    PREPARATIONS["pc_cannot_compress"] = f"{__package__}.compression.worker"
    refuse_wrong_options()


def _enable_hidden_states() -> None:
    """Has requests for a row of each token read hits, which vLLM does not, where our worker puts their rows in."""
    from vllm.pooling_params import PoolingParams

    def wrap(verify: Callable[..., None]) -> Callable[..., None]:
        def verify_both(self: Any, model_config: Any) -> None:
            open_choice = self.skip_reading_prefix_cache is None and str(self.task).startswith("token_")
            if open_choice and getattr(model_config, "pc_pools_hits", False):
                self.skip_reading_prefix_cache = False
            verify(self, model_config)

        return verify_both

    wrap_once(PoolingParams, "verify", wrap)


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


FEATURES: dict[str, Callable[[], None]] = {
    "attention": _enable_attention,
    "eviction": _enable_eviction,
    "compression": _enable_compression,
    "hidden_states": _enable_hidden_states,
    "omni": _enable_omni,
}
"""What `PC_VLLM` may name."""

NEEDS = {"compression": ("attention", "eviction")}
"""By feature, the features that it needs beside it."""


def enable(*names: str, fallback: str = "warn") -> None:
    """Enable features in this process, before vLLM makes an engine. Enabling a feature again changes nothing.

    Args:
        *names: Keys of `FEATURES`.
        fallback: With "warn", a feature that the installed vLLM cannot serve stays off, and a warning in vLLM's log
            says why; vLLM runs as without it. "raise" refuses such a feature.

    Raises:
        ValueError: A name is no feature or needs one that is off, or `fallback` is unknown; nothing has been enabled.
        UnsupportedVersionError: With `fallback="raise"`, the installed vLLM lacks something that a feature needs;
            nothing has been enabled.

    Examples:
        >>> from pc.integrations.vllm import enable
        >>> try:
        ...     enable("attentoin")
        ... except ValueError as error:
        ...     print(str(error).partition(",")[0])
        PC_VLLM: got 'attentoin'
    """
    if fallback not in ("warn", "raise"):
        raise ValueError(f"fallback: got {fallback!r}, needs 'warn' or 'raise'")
    check_features(VARIABLE, FEATURES, names, check_version if fallback == "raise" else lambda name: None)
    for name in names:
        off = set(NEEDS.get(name, ())) - set(names) - _enabled
        if off:
            raise ValueError(f"{VARIABLE}: got {name} without {', '.join(sorted(off))}, which it needs")
    served = [name for name in names if all(map(available, (name, *NEEDS.get(name, ()))))]
    for name in served:
        FEATURES[name]()
        _enabled.add(name)
    if served:
        _hook_configurations()


def enable_by_environment() -> None:
    """Switches on what the environment names, once all of its variables have been looked at; raises as `register`."""
    for variable in os.environ:
        if variable.startswith(f"{VARIABLE}_") and variable not in SCHEDULER_OPTIONS.values():
            needs = ", ".join([VARIABLE, *SCHEDULER_OPTIONS.values()])
            raise ValueError(f"{variable}: got an unknown variable, needs some of {needs}")
    for name, known in (("PC_VLLM_POLICY", [*sorted(POLICIES), *DEPRECATED]), ("PC_VLLM_REUSE", REUSE)):
        value = os.environ.get(name)
        if value and value not in known:
            raise ValueError(f"{name}: got {value!r}, needs one of {', '.join(known)}")
    enable(*features_in_environment(VARIABLE))
    if any(map(os.environ.get, SCHEDULER_OPTIONS.values())):
        _hook_configurations()  # a scheduler named in vLLM's own options may ask for them


def additional_config(vllm_config: Any) -> dict[str, Any]:
    """`additional_config` of the engine, {} where it is none of options by name."""
    given = getattr(vllm_config, "additional_config", None)
    return given if isinstance(given, dict) else {}


def chosen_policy(vllm_config: Any) -> str:
    """The policy's name: `additional_config={"pc_policy": ...}`, else the variable PC_VLLM_POLICY, else default."""
    return asked_of_scheduler(vllm_config, "pc_policy") or "default"


def asked_of_scheduler(vllm_config: Any, option: str) -> str:
    """What `additional_config`, else the environment, says for one of `SCHEDULER_OPTIONS`; "" where neither does."""
    given = additional_config(vllm_config).get(option)
    return os.environ.get(SCHEDULER_OPTIONS[option], "") if given in (None, "") else str(given)


def check_options(vllm_config: Any) -> None:
    """Refuses, by ValueError, options of this package that are not known or whose feature is off."""
    scheduler = vllm_config.scheduler_config.scheduler_cls
    no_policy = scheduler is None or (isinstance(scheduler, str) and scheduler.startswith("vllm."))
    no_rows = vllm_config.parallel_config.worker_cls in VLLMS_WORKERS
    for variable in SCHEDULER_OPTIONS.values():
        if os.environ.get(variable) and no_policy:
            got = f"{variable}: got {os.environ[variable]!r} for vLLM's own scheduler"
            raise ValueError(f"{got}, needs PC_VLLM=eviction, or a scheduler_cls that reads it")
    known = (*SCHEDULER_OPTIONS, *HIDDEN_STATES_OPTIONS)
    for name, value in additional_config(vllm_config).items():
        if name in SCHEDULER_OPTIONS and no_policy:
            raise ValueError(f"{name}: got one for vLLM's own scheduler, needs PC_VLLM=eviction")
        if name == "pc_reuse" and value not in REUSE:
            raise ValueError(f"pc_reuse: got {value!r}, needs one of {', '.join(REUSE)}")
        if name in HIDDEN_STATES_OPTIONS and no_rows:
            raise ValueError(f"{name}: got one for vLLM's own worker, needs PC_VLLM=hidden_states")
        if name.startswith("pc_") and name not in known:
            raise ValueError(f"additional_config: got {name!r}, needs some of {', '.join(known)}")


def announce(vllm_config: Any) -> None:
    """Says in vLLM's log, once in a process, what of this package an engine uses."""
    make_logger().info_once(describe(vllm_config))  # type: ignore[attr-defined]


def describe(vllm_config: Any) -> str:
    """What of this package an engine with this configuration uses, in one line."""
    active = [*_attention_in_use(vllm_config)]
    scheduler = _class_name(vllm_config.scheduler_config.scheduler_cls)
    if has_policy(vllm_config):
        policy = chosen_policy(vllm_config)
        kind = POLICIES[policy].__name__ if policy in POLICIES else "unknown"
        reuse = asked_of_scheduler(vllm_config, "pc_reuse") or "gap"
        active.append(f"eviction ({scheduler}, policy {policy}: {kind}, reuse {reuse})")
        if "compression" in _enabled:
            reason = getattr(vllm_config.model_config, "pc_cannot_compress", "")
            active.append(f"compression (not in use: {reason})" if reason else "compression")
    if keeps_rows(vllm_config):
        given = additional_config(vllm_config)
        options = [f"{name}={given[name]!r}" for name in HIDDEN_STATES_OPTIONS if name in given]
        active.append(f"hidden_states ({', '.join([_class_name(vllm_config.parallel_config.worker_cls), *options])})")
    omni = sys.modules.get("vllm_omni.core.prefix_cache")
    if str(getattr(getattr(omni, "OmniPrefixCacheManager", None), "__module__", "")).startswith(str(__package__)):
        active.append("omni (OmniPrefixCacheManager)")
    versions = [f"{name} {importlib.import_module(name).__version__}" for name in ("pc", "vllm")]
    return f"{', '.join(versions)}: {'; '.join(active) or 'no feature is in use'}"


def _attention_in_use(vllm_config: Any) -> Sequence[str]:
    """What attention to tell of: nothing where ours is not registered."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    name, path = "CPU_ATTN" if current_platform.is_cpu() else "CUSTOM", _BACKEND
    if getattr(getattr(vllm_config, "model_config", None), "use_mla", False):
        name, path = "CPU_MLA" if current_platform.is_cpu() else "CUSTOM_MLA", _LATENT_BACKEND
    try:
        if AttentionBackendEnum[name].get_path() != path:
            return ()
    except (KeyError, ValueError):  # nothing is registered
        return ()
    given = getattr(vllm_config, "attention_config", None)
    chosen = [getattr(given, "backend", None), *(getattr(given, "backend_per_kind", None) or {}).values()]
    if name.startswith("CUSTOM") and AttentionBackendEnum[name] not in chosen:
        return (f"attention (not in use: needs --attention-backend {name})",)
    return (f"attention ({path.rpartition('.')[2]} as {name})",)


def has_policy(vllm_config: Any) -> bool:
    """Whether an engine's scheduler is one of this package, by the end of its name."""
    return _class_name(vllm_config.scheduler_config.scheduler_cls).endswith("PolicyScheduler")


def keeps_rows(vllm_config: Any) -> bool:
    """The same of its workers: whether hidden states are there behind hits."""
    return _class_name(vllm_config.parallel_config.worker_cls).endswith("HiddenStatesWorker")


def _class_name(given: Any) -> str:
    return given.rpartition(".")[2] if isinstance(given, str) else getattr(given, "__name__", "")


def _complete(vllm_config: Any) -> None:
    """Sets what the user has left open, checks this package's options, and says what is in use."""
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    if "eviction" in _enabled and scheduler.scheduler_cls is None:
        kind = "AsyncPolicyScheduler" if scheduler.async_scheduling else "PolicyScheduler"
        scheduler.scheduler_cls = f"{__package__}.eviction.{kind}"
    if "hidden_states" in _enabled and parallel.worker_cls in VLLMS_WORKERS[1:]:
        parallel.worker_cls = f"{__package__}.hidden_states.HiddenStatesWorker"
    if vllm_config.model_config is not None:  # an engine's
        check_options(vllm_config)
        vllm_config.model_config.pc_pools_hits = keeps_rows(vllm_config)
        announce(vllm_config)


def _hook_configurations() -> None:
    """Sees every configuration right after vLLM has completed it."""
    from vllm.config import VllmConfig

    def wrap(complete: Callable[..., None]) -> Callable[..., None]:
        def complete_both(self: Any) -> None:
            complete(self)
            _complete(self)

        return complete_both

    wrap_once(VllmConfig, "__post_init__", wrap)
