"""Block tables of a worker's requests, followed from what vLLM's scheduler says; the same for both model runners."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass
class Followed:
    """A request.

    Attributes:
        prompt: Its tokens.
        asked: Whether its rows are wanted.
        blocks: Block numbers of the group that is followed.
        complete: Whether its prompt has been computed to the end.
    """

    prompt: list[int]
    asked: bool
    blocks: list[int] = field(default_factory=list)
    complete: bool = False


class RequestTables:
    """The requests of a worker.

    Args:
        group: The KV cache group whose blocks are followed.
        block_size: Tokens of its blocks.
        asked_for: The name under `extra_args` of sampling parameters that asks for rows.
    """

    def __init__(self, group: int, block_size: int, asked_for: str) -> None:
        self.group = group
        self.block_size = block_size
        self.asked_for = asked_for
        self.requests: dict[str, Followed] = {}

    def follow(self, output: Any) -> dict[str, int]:
        """Takes over what a step's `SchedulerOutput` says; returns the first position of each of its requests."""
        for request in output.finished_req_ids:
            self.requests.pop(request, None)
        positions: dict[str, int] = {}
        for new in output.scheduled_new_reqs:  # runner V2 is sent preempted requests so, too
            extra = getattr(new.sampling_params, "extra_args", None) or {}
            known = self.requests.get(new.req_id)
            if known is None:
                known = Followed(list(new.prompt_token_ids or ()), bool(extra.get(self.asked_for)))
                self.requests[new.req_id] = known
            known.blocks = list(new.block_ids[self.group])
            positions[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for request, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            known = self.requests[request]
            if request in cached.resumed_req_ids:
                known.blocks = []
            if blocks is not None:
                known.blocks = [*known.blocks, *blocks[self.group]]
            positions[request] = computed
        return positions

    def slots(self, request: str, position: int, count: int) -> npt.NDArray[np.int64]:
        """Slots of `count` tokens from a position on."""
        at = position + np.arange(count)
        blocks = np.asarray(self.requests[request].blocks, np.int64)
        return blocks[at // self.block_size] * self.block_size + at % self.block_size
