"""The demo, which sends each request with and without the cache, and the trained model that it uses."""

from __future__ import annotations

if __name__ != "pc.demo":
    raise ImportError(f"import pc.demo, not {__name__}")

from ._trained import NoTrainedModelError, trained_model_folder

__all__ = ["NoTrainedModelError", "trained_model_folder"]
