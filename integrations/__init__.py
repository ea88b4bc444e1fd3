"""Adapters: translate a framework's batch into block tables and slots. Import the one you need by its name."""

from __future__ import annotations

if __name__ != "pc.integrations":
    raise ImportError(f"import pc.integrations, not {__name__}: a second copy would register its attention twice")
