"""The requests of a step of vLLM's scheduler: the first token that each computes, and its blocks.

It serves both of vLLM's model runners and the scheduler's half of a connector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .api import FullAttentionSpec


class ScheduledRequest(NamedTuple):
    """A request of a step."""

    request_id: str
    begin: int
    """The position in the request of the first token that the step computes."""
    blocks: list[int]
    """Its blocks so far, of one group of layers."""
    data: Any
    """vLLM's `NewRequestData` if the request is sent whole, else None."""


def entering_requests(output: Any, group: int) -> Iterator[ScheduledRequest]:
    """Yield the requests that come with a new block table: new ones, and those that resume after a preemption."""
    for new in output.scheduled_new_reqs or ():  # for model runner V2, resumed ones too
        yield ScheduledRequest(new.req_id, int(new.num_computed_tokens or 0), _of_group(new.block_ids, group), new)
    cached = getattr(output, "scheduled_cached_reqs", None)
    if cached is not None and cached.resumed_req_ids:
        for request, blocks, computed in _cached(cached):
            if request in cached.resumed_req_ids:
                yield ScheduledRequest(request, computed, _of_group(blocks, group), None)


def follow_tables(tables: dict[str, list[int]], output: Any, group: int) -> list[ScheduledRequest]:
    """Update the block tables of the running requests from a step's `SchedulerOutput`; return the step's requests.

    Args:
        tables: The blocks of each request in one KV cache group, by its id.
        output: The step's output.
        group: The number of the group.
    """
    for request in output.finished_req_ids:
        tables.pop(request, None)
    step = list(entering_requests(output, group))
    for each in step:
        tables[each.request_id] = each.blocks
    cached = output.scheduled_cached_reqs
    for request, more, computed in _cached(cached):
        if request not in cached.resumed_req_ids:
            tables[request] += _of_group(more, group)
            step.append(ScheduledRequest(request, computed, tables[request], None))
    return step


def slots_of(blocks: Sequence[int], block_size: int, position: int, count: int) -> npt.NDArray[np.int64]:
    """Return the slots of `count` tokens from a position on, for the block table of a request."""
    at = position + np.arange(count)
    return np.asarray(blocks, np.int64)[at // block_size] * block_size + at % block_size


def _cached(cached: Any) -> Iterator[tuple[str, Any, int]]:
    """Yield each request that a worker knows: its id, its new blocks of all groups or None, its computed tokens."""
    return zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)


def _of_group(blocks: Sequence[Any] | None, group: int) -> list[int]:
    """Return the blocks of one group. `blocks` is a list for each group, or the list of the only group."""
    if not blocks:
        return []
    return list(blocks if isinstance(blocks[0], int) else blocks[group])


def full_attention_group(groups: list[Any]) -> int:
    """Return the first group whose layers all attend to the whole sequence.

    Raises:
        ValueError: There is none. Layers with a window free the blocks of a prefix.
    """
    for number, group in enumerate(groups):
        spec = group.kv_cache_spec
        kinds = getattr(spec, "kv_cache_specs", {"": spec}).values()  # several layers' specs in one
        if all(isinstance(kind, FullAttentionSpec) for kind in kinds):
            return number
    raise ValueError("hidden_states: got no layers with full attention, needs one: layers with windows free blocks")
