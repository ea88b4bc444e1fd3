"""A plugin that gives SGLang this project's attention and eviction policies.

SGLang calls `register` in each of its processes (entry point group `sglang.srt.plugins`). It does nothing unless the
environment names features: `PC_SGLANG=attention`, `PC_SGLANG=eviction` or `PC_SGLANG=attention,eviction`. SGLang's own
options then select them: `--attention-backend pc` and `--radix-eviction-policy pc_default`; see docs/sglang.md. This
module imports SGLang only when a feature is enabled.
"""

from __future__ import annotations

from .api import UnsupportedVersionError, check_version
from .features import FEATURES, enable, enable_by_environment

__all__ = ["FEATURES", "UnsupportedVersionError", "check_version", "enable", "register"]


def register() -> None:
    """Register with SGLang the features that the environment variable PC_SGLANG names, separated by commas.

    Without the variable nothing happens. If the installed SGLang lacks a name that a feature uses, the feature stays
    off. SGLang's own code then runs, even if SGLang's options select the feature. A warning in SGLang's log says which
    name is missing.

    Raises:
        ValueError: A name is not a feature. SGLang logs the error, continues without any feature, and does not know our
            names in its options.

    Examples:
        >>> from pc.integrations.sglang import register
        >>> register()  # what SGLang calls; PC_SGLANG names no feature here
    """
    enable_by_environment()
