"""Which group of layers hidden states follow."""

from __future__ import annotations

from typing import Any


def full_attention_group(groups: list[Any]) -> int:
    """The first group whose layers all attend to the whole sequence; windows give blocks of a prefix back.

    Raises:
        ValueError: There is none.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    for number, group in enumerate(groups):
        spec = group.kv_cache_spec
        kinds = getattr(spec, "kv_cache_specs", {"": spec}).values()  # several layers' specs in one
        if all(isinstance(kind, FullAttentionSpec) for kind in kinds):
            return number
    raise ValueError("hidden_states: the model has no layers with full attention, needs some: windows give blocks back")
