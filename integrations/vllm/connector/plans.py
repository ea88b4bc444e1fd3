"""The scheduler's half of a connector: what to load from a tier, and what to save into it, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from ....cache.tier import Tier


class Blocks(NamedTuple):
    """Blocks of a request, one behind the other, and the keys of their contents."""

    ids: list[int]
    keys: list[bytes]


@dataclass
class Plan(KVConnectorMetadata):
    """What the workers do around one step.

    Attributes:
        fingerprint: Of the blocks; see `layout.describe`.
        loads: By request, blocks to fill before the step.
        saves: Blocks that the step completes.
    """

    fingerprint: str
    loads: list[Blocks] = field(default_factory=list)
    saves: list[Blocks] = field(default_factory=list)


@dataclass
class Followed:
    """A running request, its blocks, how many of them are in the tier or on the way there, and those to be loaded."""

    request: Any
    blocks: list[int] = field(default_factory=list)
    saved: int = 0
    load: tuple[int, int] | None = None


class Planner:
    """Plans of an engine's steps.

    Keys are the hashes by which vLLM finds blocks itself: they count in everything in front of a block, adapters, media
    and salts. A block is saved when a step has completed it with tokens that are known, so never with rejected drafts.

    Args:
        tiers: One for each tensor-parallel rank; a block counts when all have it.
        block_size: Tokens of a block, and of a hash.
        fingerprint: Handed on to the workers.
        produces: Whether blocks are saved.
        consumes: Whether blocks are loaded.
    """

    def __init__(
        self, tiers: Sequence[Tier], block_size: int, fingerprint: str, produces: bool = True, consumes: bool = True
    ) -> None:
        self._tiers, self._size, self._fingerprint = tiers, block_size, fingerprint
        self._produces, self._consumes = produces, consumes
        self._requests: dict[str, Followed] = {}
        self._found: dict[str, int] = {}

    def find(self, request: Any, computed: int) -> int:
        """How many tokens behind `computed` the tier has, in whole blocks; the last token of all is computed anew."""
        if not self._consumes or computed % self._size or request.skip_reading_prefix_cache:
            return 0
        first, behind = computed // self._size, (request.num_tokens - 1) // self._size
        keys = [bytes(key) for key in request.block_hashes[first:behind]]
        count = len(keys)
        for tier in self._tiers:
            there = tier.contains_many(keys[:count])
            count = there.index(False) if False in there else len(there)
        self._found[request.request_id] = computed
        return count * self._size

    def admit(self, request: Any, count: int) -> None:
        """A request is about to run, with `count` tokens from the tier."""
        first = self._found.pop(request.request_id, 0) // self._size
        followed = Followed(request, saved=first + count // self._size)
        if count:
            followed.load = first, first + count // self._size
        self._requests[request.request_id] = followed

    def plan(self, output: Any) -> Plan:
        """The plan of a step that has been scheduled."""
        plan = Plan(self._fingerprint)
        for name in output.finished_req_ids:
            self._requests.pop(name, None)
        for new in output.scheduled_new_reqs:
            followed = self._requests.get(new.req_id)
            if followed is not None:
                followed.blocks = list(new.block_ids[0])
                self._add(plan, followed, new.num_computed_tokens, output.num_scheduled_tokens[new.req_id])
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            followed = self._requests.get(name)
            if followed is not None:
                if name in cached.resumed_req_ids:
                    followed.blocks = []
                if blocks is not None:
                    followed.blocks += blocks[0]
                self._add(plan, followed, computed, output.num_scheduled_tokens[name])
        return plan

    def _add(self, plan: Plan, followed: Followed, computed: int, count: int) -> None:
        hashes, size = followed.request.block_hashes, self._size
        if followed.load is not None:
            first, behind = followed.load
            plan.loads.append(Blocks(followed.blocks[first:behind], [bytes(key) for key in hashes[first:behind]]))
            followed.load = None
        else:
            followed.saved = min(followed.saved, computed // size)  # a load failed: they are computed again
        # Tokens that vLLM does not know yet, drafts among them, have no hash either.
        behind = min((computed + count) // size, len(hashes), len(followed.blocks))
        if self._produces and behind > followed.saved:
            first, followed.saved = followed.saved, behind
            plan.saves.append(Blocks(followed.blocks[first:behind], [bytes(key) for key in hashes[first:behind]]))

    def forget(self, name: str) -> None:
        """A request has ended."""
        self._requests.pop(name, None)
        self._found.pop(name, None)
