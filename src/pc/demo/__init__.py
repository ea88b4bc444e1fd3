"""The demo: the workloads that prefix caching is for, each request without and with the cache; and a trained model."""

from __future__ import annotations

if __name__ != "pc.demo":
    raise ImportError(f"import pc.demo, not {__name__}")

from ._trained import NoTrainedModelError, trained_model_folder

__all__ = ["NoTrainedModelError", "trained_model_folder"]
