"""Fused paged attention and prefix caching for PyTorch.

Importing `pc` registers `torch.ops.pc.*` and does nothing else. The public names below are the whole interface;
adapters for frameworks are imported when they are named: `pc.integrations.huggingface.enable_prefix_caching`.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
MODULES = ("cache", "flash_attn", "integrations")
"""Public modules. They are not in `__all__`, so that `from pc import *` does not replace a caller's own `cache`."""


def _is_command() -> bool:
    """Return whether this process is `python -m pc` or the `pc` command installed beside this Python."""
    if sys.argv[:1] == ["-m"]:
        return sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] == ["pc"]
    program = Path(*sys.argv[:1])
    return program.name == "pc" and program.parent == Path(sys.executable).parent


if TYPE_CHECKING or not _is_command():
    from . import cache, triton_ops
    from . import flash_attn as flash_attn
    from . import integrations as integrations
    from .cache import *  # noqa: F403
    from .triton_ops import *  # noqa: F403

    __all__ = ["__version__", *cache.__all__, *triton_ops.__all__]
else:  # importing torch takes seconds, and help and completion do not need it: import names on first use

    def __getattr__(name: str) -> Any:
        if name in ("triton_ops", *MODULES):
            return importlib.import_module(f".{name}", __name__)
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        modules = [importlib.import_module(f".{module}", __name__) for module in ("cache", "triton_ops")]
        names = {public: getattr(module, public) for module in modules for public in module.__all__}
        globals().update(names, __all__=["__version__", *names])
        if name not in globals():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]


def __dir__() -> list[str]:
    return sorted([*sys.modules[__name__].__all__, *MODULES])
