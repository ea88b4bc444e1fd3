"""Plugins for vLLM: this project's attention, eviction policies, compression and hidden states.

vLLM itself calls `register` (entry point group `vllm.general_plugins`). It does nothing until the environment variable
`PC_VLLM` names features, for example `PC_VLLM=attention,eviction,hidden_states`. vLLM's own options can also name the
classes; see docs/vllm.md. This module does not import vLLM.
"""

from __future__ import annotations

from .api import UnsupportedVersionError, check_version
from .features import FEATURES, enable, enable_by_environment

__all__ = ["FEATURES", "UnsupportedVersionError", "check_version", "enable", "register"]


def register() -> None:
    """Enable the features that the environment variable PC_VLLM names, separated by commas.

    vLLM calls this function in every process, in some more than once. A feature that the installed vLLM cannot serve
    stays off; a warning in vLLM's log says why.

    Raises:
        ValueError: PC_VLLM has a name that is no feature, or a variable PC_VLLM_* has an unknown name or value.

    Examples:
        >>> from pc.integrations.vllm import register
        >>> register()  # what vLLM calls; PC_VLLM names no feature here
    """
    enable_by_environment()
