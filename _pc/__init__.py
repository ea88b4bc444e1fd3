"""Fused paged attention and prefix caching for PyTorch.

Importing `pc` registers `torch.ops.pc.*` and does nothing else. The public names below are the whole interface;
adapters for frameworks are imported when they are named: `pc.integrations.huggingface.enable_prefix_caching`.
"""

from __future__ import annotations

from . import cache, triton_ops
from . import integrations as integrations
from .cache import *  # noqa: F403
from .triton_ops import *  # noqa: F403

__version__ = "0.1.0"
__all__ = ["__version__", *cache.__all__, *triton_ops.__all__]
MODULES = ("cache", "integrations")
"""What else belongs to the interface; not in `__all__`, so that `from pc import *` hides no `cache` of its caller."""


def __dir__() -> list[str]:
    return sorted([*__all__, *MODULES])
