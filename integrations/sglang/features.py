"""Registers features with SGLang in this process, each once, and says in the log what is active."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...cache.policies import DEPRECATED, POLICIES
from ..plugin import check_features, features_in_environment
from .versions import BACKEND, CORE, PREFIX, announce, check_version

VARIABLE = "PC_SGLANG"
"""Names the features."""

_enabled: set[str] = set()


def _enable_attention() -> str:
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    choices.add_attention_backend_choices([BACKEND])
    choices.add_deterministic_attention_backend_choices([BACKEND])
    choices.add_radix_supported_deterministic_attention_backend_choices([BACKEND])

    def make(runner: Any) -> Any:
        from .attention import PagedAttnBackend

        backend = PagedAttnBackend(runner)
        announce(f"attention by {type(backend).__name__}")
        return backend

    register_attention_backend(BACKEND)(make)

    return f"attention (--attention-backend {BACKEND})"


def _enable_eviction() -> str:
    from sglang.srt.arg_groups import choices
    from sglang.srt.mem_cache import registry, utils
    from sglang.srt.mem_cache.evict_policy import LRUStrategy
    from sglang.srt.mem_cache.unified_cache.tree_core_registry import register_tree_core_backend

    names = policy_names()
    choices.add_radix_eviction_policy_choices(names)
    utils._EVICTION_POLICY_FACTORIES |= {name: functools.partial(_refuse, name) for name in names}
    utils._EVICTION_POLICY_FACTORIES[names[0]] = LRUStrategy

    def make_core(params: Any, components: Any) -> Any:
        from .eviction import PolicyTreeCore

        return PolicyTreeCore(params, components)

    register_tree_core_backend(CORE, make_core)
    sglangs = registry.default_radix_cache_factory

    def make(ctx: Any) -> Any:
        from .eviction import make_cache

        return make_cache(ctx, sglangs)

    registry.default_radix_cache_factory = make
    return f"eviction (--radix-eviction-policy {', '.join(names)})"


def policy_names() -> list[str]:
    """What `--radix-eviction-policy` takes of this package, its lru first."""
    names = sorted(POLICIES, key=lambda name: (name != "lru", name != "default"))
    return [f"{PREFIX}{name}" for name in (*names, *DEPRECATED)]


def _refuse(name: str, **config: Any) -> Any:
    raise ValueError(f"{name}: got a cache that asks for one leaf at a time, needs SGLang's UnifiedRadixCache")


FEATURES: dict[str, Callable[[], str]] = {"attention": _enable_attention, "eviction": _enable_eviction}
"""What `PC_SGLANG` may name; each registers itself and says under which names."""


def enable(*names: str) -> None:
    """Registers features with SGLang in this process, before it reads its options; doing it again changes nothing.

    Args:
        names: Of `FEATURES`.

    Raises:
        ValueError: A name that is no feature; nothing has been registered.
        UnsupportedVersionError: The installed SGLang is not one that the feature was written for; likewise.

    Examples:
        >>> from pc.integrations.sglang import enable
        >>> try:
        ...     enable("attentoin")
        ... except ValueError as error:
        ...     print(str(error).partition(",")[0])
        PC_SGLANG: got 'attentoin'
    """
    new = [name for name in dict.fromkeys(names) if name not in _enabled]
    check_features(VARIABLE, FEATURES, new, check_version)
    active = [FEATURES[name]() for name in new]
    _enabled.update(new)
    if active:
        announce(f"registered {'; '.join(active)}")


def enable_by_environment() -> None:
    """Registers what the environment names; raises as `register`."""
    enable(*features_in_environment(VARIABLE))
