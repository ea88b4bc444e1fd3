"""Switches features on in this process, each once."""

from __future__ import annotations

from collections.abc import Callable

from .versions import check_version


def _enable_attention() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    # CUSTOM is what users name elsewhere; vLLM's CPU platform takes CPU_ATTN whatever is named.
    register_backend(AttentionBackendEnum.CUSTOM, f"{__package__}.attention.PagedAttentionBackend")
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__package__}.attention.PagedAttentionBackend")


FEATURES: dict[str, Callable[[], None]] = {"attention": _enable_attention}
"""What `PC_VLLM` may name."""


def enable(*names: str) -> None:
    """Switches features on in this process, before vLLM makes an engine; doing it again changes nothing.

    Args:
        names: Of `FEATURES`.

    Raises:
        ValueError: A name that is no feature; nothing has been switched on.
        UnsupportedVersionError: The installed vLLM is not one that the feature was written for; likewise.
    """
    for name in names:
        if name not in FEATURES:
            raise ValueError(f"PC_VLLM: got {name!r}, needs some of {', '.join(FEATURES)}")
    for name in names:
        check_version(name)
    for name in names:
        FEATURES[name]()
