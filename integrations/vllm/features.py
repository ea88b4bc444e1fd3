"""Enabling of features in this process, checks of their options, and the line in the log that names what is in use."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from ...cache.policies import POLICIES
from ..seam import check_features, features_in_environment
from . import api
from .api import available, check_version
from .metrics import export_counts

VARIABLE = "PC_VLLM"
"""The environment variable that lists the features. Other variables with this prefix set an option of one feature."""

REUSE = ("prefix", "gap", "anywhere")
"""What requests may reuse: a leading run of cached blocks; later runs after a gap too (the default); or text at
another position too, which is approximate."""

SCHEDULER_OPTIONS = {"pc_policy": "PC_VLLM_POLICY", "pc_reuse": "PC_VLLM_REUSE", "pc_chunk": "PC_VLLM_CHUNK"}
"""Options in `additional_config`, and the variables with the same meaning."""

HIDDEN_STATES_OPTIONS = (
    *("pc_hidden_states_device", "pc_hidden_states_bytes", "pc_hidden_states_waiting_bytes"),
    *("pc_hidden_states_dir", "pc_hidden_states_dir_bytes", "pc_hidden_states_dir_seconds"),
)
"""Options in `additional_config`; `HiddenStatesWorker` explains them."""

_BACKEND = f"{__package__}.attention.PagedAttentionBackend"
_LATENT_BACKEND = f"{__package__}.attention.latent.LatentAttentionBackend"

_enabled: set[str] = set()


def _enable_attention() -> None:
    """Register our backends with vLLM, and count the blocks that the requests of a batch share."""
    from .attention.builder import count_shared

    api.register_attention(_BACKEND)
    if available("attention.latent"):
        api.register_attention(_LATENT_BACKEND, latent=True)
    if available("attention.shared_prefix"):
        api.call_before_metadata(count_shared)


def _enable_eviction() -> None:
    """Export counters, and let workers move text. `_complete` sets the scheduler in each configuration."""
    from .moves import follow_engines

    export_counts()
    if available("eviction.anywhere"):
        follow_engines()


def _enable_compression() -> None:
    """Let workers compress prompts, and let vLLM refuse requests with wrong options."""
    from .compression.options import refuse_wrong_options
    from .moves import PREPARATIONS, follow_engines

    PREPARATIONS["pc_cannot_compress"] = f"{__package__}.compression.worker"
    follow_engines()
    refuse_wrong_options()


def _enable_hidden_states() -> None:
    """Allow prefix hits for pooling requests that return one row for each token, if the engine has our worker.

    The worker adds the rows of the hits.
    """
    if available("hidden_states.pooling"):
        api.pool_prefix_hits(lambda model_config: getattr(model_config, "pc_pools_hits", False))


def _enable_omni() -> None:
    """Replace vLLM-Omni's cache of hidden states."""
    from .omni import OmniPrefixCacheManager, check_groups, make_view

    api.replace_omni_cache(OmniPrefixCacheManager, check_groups, make_view)


FEATURES: dict[str, Callable[[], None]] = {
    "attention": _enable_attention,
    "eviction": _enable_eviction,
    "compression": _enable_compression,
    "hidden_states": _enable_hidden_states,
    "omni": _enable_omni,
}
"""The features that `PC_VLLM` may name."""

NEEDS = {"compression": ("attention", "eviction")}
"""By feature, the features that it needs beside it."""


def enable(*names: str, fallback: str = "warn") -> None:
    """Enable features in this process, before vLLM makes an engine. Enabling a feature again changes nothing.

    Args:
        *names: Keys of `FEATURES`.
        fallback: With "warn", a feature that the installed vLLM cannot serve stays off, and a warning in vLLM's log
            says why; vLLM runs as without it. With "raise", the feature is refused.

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
    for name, needs in NEEDS.items():
        off = [need for need in needs if need not in (*names, *_enabled)]
        if name in names and off:
            raise ValueError(f"{VARIABLE}: got {name} without {', '.join(off)}, which it needs")

    def check_new(name: str) -> None:
        if name not in _enabled:  # an enabled feature may have replaced what the check compares
            check_version(name)

    reasons = check_features(VARIABLE, FEATURES, names, fallback, check_new)
    for name in reasons:
        for need in NEEDS.get(name, ()):
            if reasons.get(need) and need not in _enabled:
                reasons[name] = reasons[name] or f"it needs {need}, which is off"
    for name, reason in reasons.items():
        if reason:
            api.log_off(name, reason)
    served = [name for name, reason in reasons.items() if not reason]
    for name in served:
        FEATURES[name]()
        _enabled.add(name)
    if served:
        api.call_after_configuration(_complete)


def enable_by_environment() -> None:
    """Enable what the environment names, after a check of all its variables.

    Raises:
        ValueError: A variable has an unknown name or value, or names a feature without one that it needs.
    """
    for variable in os.environ:
        if variable.startswith(f"{VARIABLE}_") and variable not in SCHEDULER_OPTIONS.values():
            needs = ", ".join([VARIABLE, *SCHEDULER_OPTIONS.values()])
            raise ValueError(f"{variable}: got an unknown variable, needs some of {needs}")
    for name, known in (("PC_VLLM_POLICY", POLICIES), ("PC_VLLM_REUSE", REUSE)):
        value = os.environ.get(name)
        if value and value not in known:
            raise ValueError(f"{name}: got {value!r}, needs one of {', '.join(known)}")
    enable(*features_in_environment(VARIABLE))
    if any(map(os.environ.get, SCHEDULER_OPTIONS.values())):
        api.call_after_configuration(_complete)  # a scheduler named in vLLM's own options may read them


def additional_config(vllm_config: Any) -> dict[str, Any]:
    """Return the engine's `additional_config`, {} if it is not a dictionary."""
    given = getattr(vllm_config, "additional_config", None)
    return given if isinstance(given, dict) else {}


def chosen_policy(vllm_config: Any) -> str:
    """Return the policy's name: `pc_policy` of `additional_config`, else PC_VLLM_POLICY, else "default"."""
    return asked_of_scheduler(vllm_config, "pc_policy") or "default"


def asked_of_scheduler(vllm_config: Any, option: str) -> str:
    """Return the value of one of `SCHEDULER_OPTIONS` from `additional_config`, else from the environment, else ""."""
    given = additional_config(vllm_config).get(option)
    return os.environ.get(SCHEDULER_OPTIONS[option], "") if given in (None, "") else str(given)


def check_options(vllm_config: Any) -> None:
    """Check this package's options.

    Raises:
        ValueError: An option or its value is unknown, or its feature is off.
    """
    scheduler = vllm_config.scheduler_config.scheduler_cls
    no_policy = scheduler is None or api.is_vllms(scheduler)
    no_rows = vllm_config.parallel_config.worker_cls in api.VLLMS_WORKERS
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
    """Log once which features of this package an engine uses."""
    api.make_logger().info_once(describe(vllm_config))  # type: ignore[attr-defined]


def describe(vllm_config: Any) -> str:
    """Return in one line which features of this package an engine with this configuration uses."""
    active = _attention_in_use(vllm_config)
    scheduler = _class_name(vllm_config.scheduler_config.scheduler_cls)
    if has_policy(vllm_config):
        policy = chosen_policy(vllm_config)
        kind = POLICIES[policy].__name__ if policy in POLICIES else "unknown"
        reuse = asked_of_scheduler(vllm_config, "pc_reuse") or "gap"
        active.append(f"eviction ({scheduler}, policy {policy}: {kind}, reuse {reuse})")
        if "compression" in _enabled:
            reason = getattr(getattr(vllm_config, "model_config", None), "pc_cannot_compress", "")
            active.append(f"compression (not in use: {reason})" if reason else "compression")
    if keeps_rows(vllm_config):
        given = additional_config(vllm_config)
        options = [f"{name}={given[name]!r}" for name in HIDDEN_STATES_OPTIONS if name in given]
        active.append(f"hidden_states ({', '.join([_class_name(vllm_config.parallel_config.worker_cls), *options])})")
    if str(getattr(api.omni_manager(), "__module__", "")).startswith(str(__package__)):
        active.append("omni (OmniPrefixCacheManager)")
    pc = importlib.import_module("pc").__version__
    return f"pc {pc}, vllm {api.version()}: {'; '.join(active) or 'no feature is in use'}"


def _attention_in_use(vllm_config: Any) -> list[str]:
    """Return the entry about attention for the log, in a list; [] if our backend is not registered."""
    name, is_chosen = api.chosen_attention(vllm_config)
    path = api.registered_attention(name)
    if path not in (_BACKEND, _LATENT_BACKEND):
        return []
    if not is_chosen:
        return [f"attention (not in use: needs --attention-backend {name})"]
    return [f"attention ({path.rpartition('.')[2]} as {name})"]


def has_policy(vllm_config: Any) -> bool:
    """Return whether an engine's scheduler is one of this package. The end of its name decides."""
    return _class_name(vllm_config.scheduler_config.scheduler_cls).endswith("PolicyScheduler")


def keeps_rows(vllm_config: Any) -> bool:
    """Return whether an engine's workers are `HiddenStatesWorker`s, which keep hidden states for prefix hits."""
    return _class_name(vllm_config.parallel_config.worker_cls).endswith("HiddenStatesWorker")


def _class_name(given: Any) -> str:
    return given.rpartition(".")[2] if isinstance(given, str) else getattr(given, "__name__", "")


def _complete(vllm_config: Any) -> None:
    """Set what the user has left open, check this package's options, and log what is in use."""
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    if "eviction" in _enabled:
        if scheduler.scheduler_cls is None:
            kind = "AsyncPolicyScheduler" if scheduler.async_scheduling else "PolicyScheduler"
            scheduler.scheduler_cls = f"{__package__}.eviction.{kind}"
        elif api.is_vllms(scheduler.scheduler_cls):  # vLLM itself chooses one for diffusion models
            api.log_off("eviction", f"got the scheduler {scheduler.scheduler_cls}")
    if "hidden_states" in _enabled and parallel.worker_cls in api.VLLMS_WORKERS[1:]:
        parallel.worker_cls = f"{__package__}.hidden_states.HiddenStatesWorker"
    if vllm_config.model_config is not None:  # only an engine's configuration has a model
        check_options(vllm_config)
        vllm_config.model_config.pc_pools_hits = keeps_rows(vllm_config)
        announce(vllm_config)
