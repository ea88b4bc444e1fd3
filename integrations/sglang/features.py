"""Registration of features with SGLang in this process, once each, and log messages about active features."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...cache.policies import DEPRECATED, POLICIES
from ..seam import check_features, features_in_environment
from . import api
from .api import CORE, PREFIX, announce, check_version, logger

VARIABLE = "PC_SGLANG"
"""The environment variable that names the features."""

BACKEND = "pc"
"""The name of our backend for `--attention-backend`."""

_SURPRISES = (AttributeError, ImportError, TypeError)
"""Exceptions from an SGLang that differs from the tables of `api`. Refusals raise ValueError, which is not caught."""

_enabled: set[str] = set()


def warn_off(feature: str, reason: str) -> None:
    """Log that SGLang's own code runs in place of a feature, and why."""
    logger.warning("%s is off, and SGLang's own code runs in its place: %s", feature, reason)


def _ours_or_stock(feature: str, ours: Callable[[], Any], stock: Callable[[], Any], **objects: Any) -> Any:
    """Return what `ours` makes. If SGLang cannot serve the feature, log why and return what `stock` makes.

    `objects` are those of SGLang whose attributes are checked before.
    """
    reason = api.why_not(feature, **objects)
    if not reason:
        try:
            return ours()
        except _SURPRISES as error:
            reason = f"{type(error).__name__}: {error}"
    warn_off(feature, reason)
    return stock()


def _enable_attention() -> str:
    """Register the attention backend, and return a text for the log."""

    def make(runner: Any) -> Any:
        def ours() -> Any:
            from .attention import PagedAttnBackend

            backend = PagedAttnBackend(runner)
            announce(f"attention by {type(backend).__name__}")
            return backend

        return _ours_or_stock("attention", ours, lambda: api.stock_backend(runner), runner=runner)

    api.register_backend(BACKEND, make)
    return f"attention (--attention-backend {BACKEND})"


def _enable_eviction() -> str:
    """Register the eviction policies, and return a text for the log."""
    names = policy_names()

    def make_core(params: Any, components: Any) -> Any:
        from .eviction import PolicyTreeCore

        return PolicyTreeCore(params, components)

    def make(context: Any, sglangs: Any) -> Any:
        if not context.params.eviction_policy.lower().startswith(PREFIX):
            return sglangs(context)

        def ours() -> Any:
            from .eviction import make_cache

            return make_cache(context, sglangs)

        return _ours_or_stock("eviction", ours, lambda: sglangs(api.with_lru(context)), context=context)

    is_served = not api.why_not("eviction")
    if is_served:
        api.register_core(CORE, make_core)
    api.register_policies(names, make, (lambda name: functools.partial(_refuse, name)) if is_served else None)
    return f"eviction (--radix-eviction-policy {', '.join(names)})"


def policy_names() -> list[str]:
    """Return the names of this package's policies for `--radix-eviction-policy`, `pc_lru` first."""
    names = sorted(POLICIES, key=lambda name: (name != "lru", name != "default"))
    return [f"{PREFIX}{name}" for name in (*names, *DEPRECATED)]


def _refuse(name: str, **config: Any) -> Any:
    """Stand in for a policy in a cache other than SGLang's UnifiedRadixCache: raise ValueError."""
    raise ValueError(f"{name}: got a cache that asks for a single leaf, needs SGLang's UnifiedRadixCache")


FEATURES: dict[str, Callable[[], str]] = {"attention": _enable_attention, "eviction": _enable_eviction}
"""The features that `PC_SGLANG` may name. Each function registers one with SGLang, and returns a text for the log."""


def enable(*names: str, fallback: str = "raise") -> None:
    """Register features with SGLang in this process, before it reads its options. A second call changes nothing.

    Args:
        *names: Keys of `FEATURES`.
        fallback: "warn": if the installed SGLang cannot serve a feature, SGLang's own code serves its names, and a
            warning in the log says why. "raise": the feature is refused.

    Raises:
        ValueError: A name is not a feature, or `fallback` is unknown. Nothing has been registered.
        UnsupportedVersionError: With `fallback="raise"`, the installed SGLang lacks something that a feature needs.
            Nothing has been registered.

    Examples:
        >>> from pc.integrations.sglang import enable
        >>> try:
        ...     enable("attentoin")
        ... except ValueError as error:
        ...     print(str(error).partition(",")[0])
        PC_SGLANG: got 'attentoin'
    """
    new = [name for name in names if name not in [*_enabled]]
    served = []
    for name, reason in check_features(VARIABLE, FEATURES, new, fallback, check_version).items():
        if reason:
            if not api.can_register(name):
                logger.warning("%s is off, and SGLang's options do not know its names: %s", name, reason)
                continue
            warn_off(name, reason)
        served.append(FEATURES[name]())
        _enabled.add(name)
    if served:
        announce(f"registered {'; '.join(served)}")


def enable_by_environment() -> None:
    """Register the features that the environment names. Raise ValueError like `enable`."""
    enable(*features_in_environment(VARIABLE), fallback="warn")
