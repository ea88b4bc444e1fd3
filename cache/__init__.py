"""Block identity, eviction and the manager that hands out block tables; numpy only in the hot path."""

from __future__ import annotations

if __name__ != "pc.cache":
    raise ImportError(f"import pc.cache, not {__name__}: a second copy would not share its classes")

__all__: list[str] = []
