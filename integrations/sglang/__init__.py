"""SGLang with this project's attention and eviction policies, as a plugin.

Installed beside SGLang, `register` is called by SGLang itself (entry point group `sglang.srt.plugins`) in each of its
processes and does nothing until it is asked to: `PC_SGLANG=attention,eviction` in the environment, either or both. They
are then chosen by SGLang's own options, `--attention-backend pc` and `--radix-eviction-policy pc_default`; see
docs/sglang.md. SGLang is imported where it is used.
"""

from __future__ import annotations

from .features import FEATURES, enable, enable_by_environment
from .versions import UnsupportedVersionError, check_version

__all__ = ["FEATURES", "UnsupportedVersionError", "check_version", "enable", "register"]


def register() -> None:
    """Registers with SGLang what the environment variable PC_SGLANG names, separated by commas; nothing without it.

    Raises:
        ValueError: A name that is no feature. SGLang logs it and goes on without any, and refuses our names in its
            options.
        UnsupportedVersionError: A SGLang whose interfaces are not those this package was written for; likewise.

    Examples:
        >>> from pc.integrations.sglang import register
        >>> register()  # what SGLang calls; PC_SGLANG names no feature here
    """
    enable_by_environment()
