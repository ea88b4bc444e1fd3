"""Registers features with SGLang in this process, each once, and says in the log what is active."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from .versions import check_version

VARIABLE = "PC_SGLANG"
"""Names the features."""

BACKEND = "pc"
"""What `--attention-backend` takes."""

logger = logging.getLogger("sglang.pc")

_enabled: set[str] = set()


def _enable_attention() -> str:
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    choices.add_attention_backend_choices([BACKEND])
    choices.add_deterministic_attention_backend_choices([BACKEND])
    choices.add_radix_supported_deterministic_attention_backend_choices([BACKEND])

    def make(runner: Any) -> Any:
        from .attention import PagedAttentionBackend

        logger.info("attention by pc's backend")
        return PagedAttentionBackend(runner)

    register_attention_backend(BACKEND)(make)

    return f"attention (--attention-backend {BACKEND})"


FEATURES: dict[str, Callable[[], str]] = {"attention": _enable_attention}
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
    for name in names:
        if name not in FEATURES:
            raise ValueError(f"{VARIABLE}: got {name!r}, needs some of {', '.join(FEATURES)}")
    new = [name for name in dict.fromkeys(names) if name not in _enabled]
    versions = [check_version(name) for name in new]
    if new:
        from ... import __version__

        active = [FEATURES[name]() for name in new]
        _enabled.update(new)
        logger.info("pc %s, sglang %s: %s", __version__, versions[0], "; ".join(active))


def enable_by_environment() -> None:
    """Registers what the environment names; raises as `register`."""
    given = [name.strip() for name in os.environ.get(VARIABLE, "").split(",")]
    enable(*(name for name in given if name))
