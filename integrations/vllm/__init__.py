"""vLLM with this project's attention, eviction policies and hidden-state cache, as plugins.

Installed beside vLLM, `register` is called by vLLM itself (entry point group `vllm.general_plugins`) and does nothing
until it is asked to: `PC_VLLM=attention,eviction,hidden_states` in the environment, any of them. The classes can also
be named in vLLM's own options; see docs/vllm.md. vLLM is imported where it is used.
"""

from __future__ import annotations

from .api import UnsupportedVersionError, check_version
from .features import FEATURES, enable, enable_by_environment

__all__ = ["FEATURES", "UnsupportedVersionError", "check_version", "enable", "register"]


def register() -> None:
    """Enables the features that the environment variable PC_VLLM names, separated by commas; none without it.

    vLLM calls it in every process, more than once in some.

    Raises:
        ValueError: A name that is no feature, or another variable PC_VLLM_* with a name or a value that is not known.
            When an engine is made then, an option is refused whose feature it does not use.
        UnsupportedVersionError: A vLLM whose interfaces are not those this package was written for.

    Examples:
        >>> from pc.integrations.vllm import register
        >>> register()  # what vLLM calls; PC_VLLM names no feature here
    """
    enable_by_environment()
