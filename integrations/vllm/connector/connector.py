"""A KV connector for vLLM over a tier of `pc.cache`: its plan for each step, and the transfers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, repeat
from typing import Any

import torch

from ....cache.tiers.tier import Tier
from ....cache.tiers.writer import TierWriter
from ..api import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    check_version,
    connector_metadata,
    get_tensor_model_parallel_rank,
    logger,
    mark_weight_changes,
)
from ..scheduler_output import ScheduledRequest, entering_requests, follow_tables
from .layout import block_bytes, check_connector, check_options, describe, layout_of, open_tier

Keys = dict[int, bytes]
"""The keys of blocks' contents, by block. Blocks to load are consecutive blocks of one request."""


@dataclass
class TransferPlan(KVConnectorMetadata):
    """The blocks that workers load and save during a step."""

    fingerprint: str
    loads: dict[str, Keys] = field(default_factory=dict)  # by request
    saves: Keys = field(default_factory=dict)


@dataclass
class SavedRequest:
    """A request: how many of its blocks are cached, in the tier or on the way there.

    While it waits for blocks from the tier, `loading` has their keys. If they could not be loaded, `failed` is True.
    If it has used a block that another connector could not load, `is_wrong` is True until its next admission.
    """

    request: Any
    saved: int = 0
    hits: int = 0  # its first blocks, which were in the engine at its admission
    loading: Keys = field(default_factory=dict)
    failed: bool = False
    is_wrong: bool = False


class Planner:
    """The scheduler's half of the connector: it plans which blocks each step loads from a tier and saves to it.

    Keys are vLLM's own hashes of blocks, which cover all tokens before a block, adapters, media and salts. A block is
    saved once a step has completed it with known tokens, so never with rejected drafts. Each tensor-parallel rank has a
    tier, and a block counts as cached if all ranks have it.

    A request waits until its blocks are loaded, and shares them only then. So a block that a tier has lost is in no
    step before it is computed.

    Another connector of a `MultiConnector` may load blocks in the step that computes with them, and report afterwards
    that it could not. Requests that hold such blocks save nothing until two more outputs are known. The first may
    belong to an earlier step, because vLLM schedules at most one step ahead. If a block could not be loaded, they
    save nothing at all, because some releases of vLLM compute them again at wrong positions. vLLM leaves their blocks
    in its prefix cache, so requests that hit the blocks later save nothing either.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        block_size: int,
        fingerprint: str,
        produces: bool = True,
        consumes: bool = True,
        max_tokens: int = 1 << 62,
    ) -> None:
        self._tiers, self._size, self._fingerprint = tiers, block_size, fingerprint
        self._produces, self._consumes, self._max_tokens = produces, consumes, max_tokens
        self._tables: dict[str, list[int]] = {}
        self._requests: dict[str, SavedRequest] = {}
        self._loads: dict[str, Keys] = {}  # those of the next step
        self._on_the_way: set[bytes] = set()
        self._unsure: dict[int, int] = {}
        """By block that another connector loads, and by later block of its requests, how many outputs are to come
        before requests with it save blocks."""
        self._wrong: set[int] = set()
        """Blocks that could not be loaded and later ones of their requests, until others compute in them."""

    def find(self, request: Any, computed: int) -> int | None:
        """Return how many tokens after `computed` the tier has, in whole blocks and without the prompt's last token.

        None if the request has to ask again in a later step. This is so if another request loads the next block, which
        both can share then. It is also so if this step already loads as many tokens as a step may compute. A request
        whose load failed finds nothing, so that it is computed.
        """
        known = self._requests.setdefault(request.request_id, SavedRequest(request))
        known.hits = computed // self._size
        if known.failed:
            return 0
        known.saved = min(known.saved, computed // self._size)
        if not self._consumes or computed % self._size or request.skip_reading_prefix_cache:
            return 0
        known.saved, behind = computed // self._size, (request.num_tokens - 1) // self._size
        hashes = request.block_hashes[known.saved : behind]
        is_full = sum(map(len, self._loads.values())) * self._size >= self._max_tokens
        if hashes and (is_full or bytes(hashes[0]) in self._on_the_way):
            return None
        keys, count = [*map(bytes, hashes)], len(hashes)
        for tier in self._tiers:
            there = tier.contains_many(keys[:count])
            count = there.index(False) if False in there else len(there)
        return count * self._size

    def admit(self, request: Any, blocks: Sequence[int], count: int) -> None:
        """Record that a request has got `blocks`, and that it waits for `count` tokens of them from the tier."""
        known = self._requests.setdefault(request.request_id, SavedRequest(request))
        if count:
            first, known.saved = known.saved, known.saved + count // self._size
            known.loading = self._keyed(known, blocks, first, known.saved)
            self._loads[request.request_id] = known.loading
            self._on_the_way.update(known.loading.values())

    def loaded(self, names: Collection[str], lost: Collection[int]) -> None:
        """Record from a step's output which requests wait no longer, and which blocks could not be loaded."""
        wrong = self._unsure.keys() & lost
        if wrong:
            self._wrong |= self._unsure.keys()
        for name, blocks in self._tables.items() if wrong else ():
            if name in self._requests and not wrong.isdisjoint(blocks):
                self._requests[name].is_wrong = True
        self._unsure = {block: count - 1 for block, count in self._unsure.items() if count > 1}
        for name in names:
            known = self._requests.get(name)
            if known is not None:
                known.failed |= not known.loading.keys().isdisjoint(lost)
                self._on_the_way.difference_update(known.loading.values())
                known.loading = {}

    def plan(self, output: Any) -> TransferPlan:
        """Return the plan of a step that has been scheduled."""
        plan, self._loads = TransferPlan(self._fingerprint, self._loads), {}
        for name in output.finished_req_ids:
            self.forget(name)
        for each in entering_requests(output, 0):
            known = self._requests.get(each.request_id)
            if known is not None:
                known.is_wrong = not self._wrong.isdisjoint(each.blocks[: known.hits])
                self._wrong.difference_update(each.blocks[known.hits :])
            if output.has_sync_kv_loads:
                first = 0 if known is None else max(known.hits, 0 if known.failed else known.saved)
                self._unsure |= dict.fromkeys(each.blocks[first : -(-each.begin // self._size)], 2)
        for each in follow_tables(self._tables, output, 0):
            known = self._requests.get(each.request_id)
            if known is None:
                continue
            if known.is_wrong:
                self._wrong |= _from_first(self._wrong, each.blocks)
                continue
            self._wrong.difference_update(each.blocks[each.begin // self._size :])
            unsure = max(map(self._unsure.get, each.blocks, repeat(0)), default=0) if self._unsure else 0
            if unsure:
                self._unsure |= dict.fromkeys(_from_first(self._unsure, each.blocks), unsure)
            else:
                self._save(plan, known, each, output.num_scheduled_tokens[each.request_id])
        return plan

    def _keyed(self, known: SavedRequest, blocks: Sequence[int], first: int, behind: int) -> Keys:
        """Return the keys of a range of a request's blocks."""
        return dict(zip(blocks[first:behind], map(bytes, known.request.block_hashes[first:behind]), strict=True))

    def _save(self, plan: TransferPlan, known: SavedRequest, step: ScheduledRequest, count: int) -> None:
        """Add to the plan the blocks that a request completes in a step in which it computes `count` tokens."""
        known.saved = min(known.saved, step.begin // self._size)  # what could not be loaded is computed
        # Blocks with tokens that vLLM does not know yet, such as drafts, have no hash.
        behind = min((step.begin + count) // self._size, len(known.request.block_hashes), len(step.blocks))
        if self._produces and behind > known.saved:
            plan.saves |= self._keyed(known, step.blocks, known.saved, behind)
            known.saved = behind

    def forget(self, name: str) -> None:
        """Forget a request that has ended."""
        known = self._requests.pop(name, None)
        if known is not None:
            self._on_the_way.difference_update(known.loading.values())

    def stop(self) -> None:
        """Load and save nothing from now on."""
        self._produces = self._consumes = False


def _from_first(found: Collection[int], blocks: Sequence[int]) -> set[int]:
    """Return the blocks of a request from the first one on that is in `found`."""
    return {*dropwhile(lambda block: block not in found, blocks)}


class BlockStore:
    """Access to a worker's blocks as rows of bytes: one row has a block of all layers, in any layout.

    Raises:
        ValueError: A block has another size than `nbytes`.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], nbytes: int) -> None:
        own = {caches[name].data_ptr(): caches[name] for name in sorted(caches)}  # layers may share a cache (Gemma 3n)
        self.caches = list(own.values())
        sizes = [cache[0].numel() * cache.element_size() for cache in self.caches]
        if sum(sizes) != nbytes:
            raise ValueError(f"kv_caches: got {sum(sizes)} bytes a block, needs {nbytes}: a layout that is not served")
        self._sizes = sizes
        self._pin = any(cache.is_cuda for cache in self.caches)

    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the bytes of blocks, `[len(ids), nbytes]` in host memory."""
        rows = torch.empty(len(ids), sum(self._sizes), dtype=torch.uint8, pin_memory=self._pin)
        for cache, part in zip(self.caches, rows.split(self._sizes, dim=1), strict=True):
            found = cache.index_select(0, torch.tensor(ids, device=cache.device))
            part.copy_(found.reshape(len(ids), -1).view(torch.uint8), non_blocking=True)
        if self._pin:
            torch.cuda.current_stream().synchronize()
        return rows

    def write(self, ids: Sequence[int], rows: torch.Tensor) -> None:
        """Write `rows` `[len(ids), nbytes]` from host memory into blocks."""
        for cache, part in zip(self.caches, rows.split(self._sizes, dim=1), strict=True):
            values = part.contiguous().to(cache.device).view(cache.dtype)
            index = torch.tensor(ids, device=cache.device)
            cache.index_copy_(0, index, values.reshape(len(ids), *cache.shape[1:]))

    def load(self, tier: Tier, wanted: Keys) -> list[int]:
        """Fill blocks from a tier, up to the first one that it has lost. Return that block and all later ones."""
        ids, found = list(wanted), tier.get_many(list(wanted.values()))
        count = next((n for n, tensors in enumerate(found) if tensors is None), len(found))
        if count:
            self.write(ids[:count], torch.stack([tensors["kv"] for tensors in found[:count] if tensors]))
        return ids[count:]

    def save(self, tier: Tier, blocks: Keys) -> None:
        """Write blocks to a tier, except those that the tier already has."""
        there = tier.contains_many(list(blocks.values()))
        missing = [block for block, known in zip(blocks, there, strict=True) if not known]
        if missing:
            rows = self.read(missing)
            tier.put_many({blocks[block]: {"kv": row} for block, row in zip(missing, rows, strict=True)})


class TierConnector(KVConnectorBase_V1):
    """A KV connector through which engines read blocks of other engines, from a directory or a Mooncake store.

    A request waits for one step, in which its blocks are loaded. A thread writes blocks after the step that completes
    them. A tier may lose blocks at any time. A lost block is computed, whatever `kv_load_failure_policy` says. Within a
    `MultiConnector`, set that to "recompute".

    `kv_connector_extra_config` of vLLM's KVTransferConfig has these options:

    - `tier`: "disk" with `path` and `capacity_bytes`, "mooncake" with the arguments of `MooncakeTier.connect`, or
      "module:function".
    - `model`: a name for the weights, a draft model's included, if they are in no folder of this machine.
    - `writer_bytes`: the most bytes that wait to be written.

    Raises:
        ValueError: At start-up: an option is unknown, or the model has recurrent layers, several groups of layers,
            pipeline or context parallelism, or adapters (LoRA), or is a diffusion model, or its pooler serves no prefix
            hits. Or vLLM does not hash media, as with neither prefix caching nor a cache of processed media.
        UnsupportedVersionError: The installed vLLM lacks something that the connector needs.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        check_version("connector")
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._options: dict[str, Any] = transfer.kv_connector_extra_config
        check_options(self._options)
        check_connector(vllm_config, kv_cache_config)
        self._bytes = block_bytes(kv_cache_config)
        self._tier: Tier | None = None
        self._tiers: list[Tier] = []
        self._store: BlockStore | None = None
        self._lost: set[int] = set()
        self._cache_config = vllm_config.cache_config
        mark_weight_changes()
        if role is KVConnectorRole.SCHEDULER:
            transfer.kv_load_failure_policy = "recompute"
            fingerprint = describe(vllm_config, kv_cache_config, self._options)
            ranks = vllm_config.parallel_config.tensor_parallel_size
            layouts = [layout_of(fingerprint, rank, self._bytes) for rank in range(ranks)]
            self._tiers = [open_tier(self._options, layout, gives=False) for layout in layouts]
            (group,) = kv_cache_config.kv_cache_groups
            self._planner = Planner(
                self._tiers,
                group.kv_cache_spec.block_size,
                fingerprint,
                produces=transfer.is_kv_producer,
                consumes=transfer.is_kv_consumer,
                max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return None, since any layout is served. vLLM asks before it groups layers.

        Raises:
            ValueError: The model has recurrent layers.
        """
        if vllm_config.model_config.is_hybrid:
            raise ValueError(
                f"kv_transfer_config: got TierConnector for a model with recurrent layers "
                f"({', '.join(vllm_config.model_config.architectures)}), needs one with attention layers alone: states "
                "of recurrent layers need vLLM's hybrid KV cache manager, which is off beside a connector of one group "
                "of blocks (not SupportsHMA); without --kv-transfer-config the model is served, hits within the engine"
            )
        return None

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that is not saved is only a later miss, so vLLM keeps a preempted request's last tokens."""
        return False

    # The scheduler's half.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens the tier has after those in the engine, and whether the request waits for them.

        vLLM asks again later if the number is None.
        """
        count = self._planner.find(request, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Record the request, and let the next step load the tokens that it needs from the tier."""
        self._planner.admit(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> TransferPlan:
        """Return the blocks that the workers load and save in this step."""
        return self._planner.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Record which requests have their blocks, and which blocks could not be loaded."""
        self._planner.loaded(connector_output.finished_recving or (), connector_output.invalid_block_ids)

    def reset_cache(self) -> bool:
        """Stop loading and saving. vLLM asks for a reset after a change of weights, which the fingerprint lacks."""
        logger.warning("TierConnector was reset: it loads and saves no blocks until the engine starts again")
        self._planner.stop()
        return True

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Let vLLM free a request's blocks: saved blocks were copied in the step that completed them."""
        self._planner.forget(request.request_id)
        return False, None

    # A worker's half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Set the caches of the layers, whose blocks are loaded and saved.

        Raises:
            ValueError: Their blocks have other sizes than the scheduler assumes.
        """
        self._store = BlockStore(kv_caches, self._bytes)

    def _open(self, plan: TransferPlan) -> Tier:
        """Return this worker's tier, opened at its first use."""
        if self._tier is None:
            layout = layout_of(plan.fingerprint, get_tensor_model_parallel_rank(), self._bytes)
            self._tier = TierWriter(open_tier(self._options, layout), self._options.get("writer_bytes") or 1 << 30)
        return self._tier

    def _has_other_weights(self) -> bool:
        """Return whether the weights have changed since the start. The fingerprint describes the first ones."""
        changed: bool = getattr(self._cache_config, "pc_changed_weights", False)
        if changed:
            logger.warning_once(
                "TierConnector: the weights have changed, so it loads and saves no blocks until the engine starts again"
            )
        return changed

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Fill the blocks of requests that wait for them, and collect the lost blocks."""
        plan = connector_metadata(self)
        if isinstance(plan, TransferPlan) and plan.loads:
            if self._has_other_weights():
                self._lost.update(block for wanted in plan.loads.values() for block in wanted)
                return
            assert self._store is not None
            tier = self._open(plan)
            lost = [block for wanted in plan.loads.values() for block in self._store.load(tier, wanted)]
            if lost:
                logger.warning("%d blocks that a tier had a moment ago are gone; they are computed", len(lost))
                self._lost.update(lost)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: no request of this step waits for blocks."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are saved after the step."""

    def wait_for_save(self) -> None:
        """Save completed blocks."""
        plan = connector_metadata(self)
        if isinstance(plan, TransferPlan) and plan.saves and not self._has_other_weights():
            assert self._store is not None
            self._store.save(self._open(plan), plan.saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        """Return the requests whose blocks were loaded in this step, as the second value."""
        plan = connector_metadata(self)
        return None, set(plan.loads) if isinstance(plan, TransferPlan) else set()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be loaded in this step."""
        lost, self._lost = self._lost, set()
        return lost

    def shutdown(self) -> None:
        """Wait until all blocks are written, and close the tiers."""
        tiers: list[Any] = [self._tier, *self._tiers]
        self._tier, self._tiers = None, []
        for tier in tiers:
            if isinstance(tier, TierWriter):
                tier.close()
                tier = tier.tier
            if hasattr(tier, "close"):
                tier.close()
