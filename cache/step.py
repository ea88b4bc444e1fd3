"""What one forward pass computed: its outputs, and which tokens of which requests they belong to."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .allocation import Allocation, Slots


@dataclass(frozen=True)
class Step:
    """The outputs of a forward pass over the tokens of a batch.

    Attributes:
        outputs: By name, nested mappings and sequences included: tensors `[num_tokens, *features]`, and anything else.
        slot_mapping: `[num_tokens]` int64 on the host: the slot of each token, -1 for one that is not stored. The same
            that the KV of these tokens was written to.
        requests: Ids of the requests in the order of the batch; needed for `TensorCache.join` alone.
        query_start_loc: `[num_requests + 1]`, where the tokens of each request begin.
        positions: `[num_tokens]`, position of each token in its request, ascending within it.
    """

    outputs: Mapping[str, Any]
    slot_mapping: Slots
    requests: tuple[Hashable, ...] = ()
    query_start_loc: npt.NDArray[np.int32] | None = None
    positions: npt.NDArray[np.int32] | None = None

    @classmethod
    def of(cls, allocations: Mapping[Hashable, Allocation], outputs: Mapping[str, Any], group: int = 0) -> Step:
        """The step that computes all `compute_spans` of some allocations, request after request.

        Args:
            allocations: By request id, in the order of the batch.
            outputs: As in `outputs`.
            group: Whose slots to take, when the manager has several groups.
        """
        mappings, positions = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
        starts = [0]
        for allocation in allocations.values():
            mapping = allocation.slot_mapping
            mappings.append(mapping[group] if isinstance(mapping, tuple) else mapping)
            positions += [np.arange(start, end, dtype=np.int32) for start, end in allocation.compute_spans]
            starts.append(starts[-1] + len(mappings[-1]))
        return cls(
            outputs,
            np.concatenate(mappings),
            tuple(allocations),
            np.array(starts, np.int32),
            np.concatenate(positions),
        )


def leaves(outputs: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested mappings, lists and tuples, named by its path with dots: `{"a": {"b": x}}` gives "a.b"."""
    if isinstance(outputs, Mapping):
        items = outputs.items()
    elif isinstance(outputs, list | tuple) and not isinstance(outputs, torch.Size):
        items = enumerate(outputs)  # type: ignore[assignment]
    else:
        yield prefix, outputs
        return
    for key, value in items:
        yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
