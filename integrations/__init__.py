"""Adapters, which translate a framework's batch into block tables and slots. An adapter is imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if __name__ != "pc.integrations":
    raise ImportError(f"import pc.integrations, not {__name__}: a second copy would register its attention twice")

ADAPTERS = ("huggingface", "sglang", "vllm")

if TYPE_CHECKING:
    from . import huggingface as huggingface
    from . import sglang as sglang
    from . import vllm as vllm
else:  # with __getattr__ visible, type checkers would accept any attribute name

    def __getattr__(name: str) -> Any:
        if name in ADAPTERS:
            return importlib.import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(ADAPTERS)}")


def __dir__() -> list[str]:
    return list(ADAPTERS)
