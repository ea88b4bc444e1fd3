"""Forward passes over one row, behind what a cache has, with the inputs that generate would give."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache


def cache_name(model: Any) -> str:
    """The name under which a model's forward takes its cache."""
    known = inspect.signature(model.forward).parameters
    return "cache_params" if "cache_params" in known and "past_key_values" not in known else "past_key_values"


def accepted(model: Any, **inputs: Any) -> dict[str, Any]:
    """Those of the inputs that a model's forward knows."""
    known = inspect.signature(model.forward).parameters
    return {name: value for name, value in inputs.items() if name in known}


@torch.no_grad()
def forward(
    model: Any,
    tokens: np.ndarray,
    start: int,
    end: int,
    cache: DynamicCache,
    given: dict[str, Any] | None = None,
) -> Any:
    """Computes tokens `start` to `end` of one row behind those in a cache, with the inputs that generate would give.

    Args:
        model: The model.
        tokens: Of the row.
        start: The first token to compute, as many as the cache has.
        end: Behind the last.
        cache: Of one row.
        given: Positions, types and images up to `end`; None: those of text.
    """
    ids = torch.from_numpy(tokens[:end])[None].to(model.device)
    options: dict[str, Any] = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    first = start == 0 or given is not None
    if given is None:
        positions = model._prepare_position_ids_for_generation(ids, {"attention_mask": torch.ones_like(ids)})
        given = accepted(model, position_ids=positions)
    inputs = model.prepare_inputs_for_generation(
        ids,
        next_sequence_length=end - start,
        **{cache_name(model): cache},
        attention_mask=None,
        **given,
        is_first_iteration=first,
        use_cache=True,
        **options,
    )
    return model(**inputs, return_dict=True)
