"""SGLang with this project's attention and eviction policies, as a plugin.

Installed beside SGLang, `register` is called by SGLang itself (entry point group `sglang.srt.plugins`) in each of its
processes and does nothing until it is asked to: `PC_SGLANG=attention,eviction` in the environment, either or both. They
are then chosen by SGLang's own options, `--attention-backend pc` and `--radix-eviction-policy pc_default`; see
docs/sglang.md. SGLang is imported where it is used.
"""

from __future__ import annotations

from .api import UnsupportedVersionError, check_version
from .features import FEATURES, enable, enable_by_environment

__all__ = ["FEATURES", "UnsupportedVersionError", "check_version", "enable", "register"]


def register() -> None:
    """Register with SGLang the features that the environment variable PC_SGLANG names, separated by commas.

    Without the variable nothing happens. Where the installed SGLang lacks something that a feature needs, SGLang's own
    code serves our names, and a warning in SGLang's log names what is missing.

    Raises:
        ValueError: A name is no feature. SGLang logs the error, continues without any feature, and does not know our
            names in its options.

    Examples:
        >>> from pc.integrations.sglang import register
        >>> register()  # what SGLang calls; PC_SGLANG names no feature here
    """
    enable_by_environment()
