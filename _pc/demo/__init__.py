"""The demo: the two workloads that prefix caching is for, each request without and with the cache."""

from __future__ import annotations

if __name__ != "pc.demo":
    raise ImportError(f"import pc.demo, not {__name__}")
