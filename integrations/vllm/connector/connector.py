"""A KV connector for vLLM over a tier of `pc.cache`: its plan for each step, and the transfers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
)
from ..scheduler_output import ScheduledRequest, follow_tables
from .layout import block_bytes, check_connector, check_options, describe, layout_of, open_tier

Keys = dict[int, bytes]
"""The keys of blocks' contents, by block. Blocks to load are consecutive blocks of one request."""


@dataclass
class TransferPlan(KVConnectorMetadata):
    """The blocks that workers load before a step, and those that they save after it."""

    fingerprint: str
    loads: list[Keys] = field(default_factory=list)
    saves: Keys = field(default_factory=dict)


@dataclass
class SavedRequest:
    """A request: how many of its blocks are cached, in the tier or on the way there, and the range to load.

    From the block `doubtful_from` on, its KV may come from lost blocks that it shares.
    """

    request: Any
    saved: int = 0
    load: tuple[int, int] | None = None
    doubtful_from: int | None = None


class Planner:
    """The scheduler's half of the connector: it plans which blocks each step loads from a tier and saves to it.

    Keys are vLLM's own hashes of blocks, which cover all tokens before a block, adapters, media and salts. A block is
    saved once a step has completed it with known tokens, so never with rejected drafts. Each tensor-parallel rank has a
    tier, and a block counts as cached if all ranks have it.
    """

    def __init__(
        self, tiers: Sequence[Tier], block_size: int, fingerprint: str, produces: bool = True, consumes: bool = True
    ) -> None:
        self._tiers, self._size, self._fingerprint = tiers, block_size, fingerprint
        self._produces, self._consumes = produces, consumes
        self._tables: dict[str, list[int]] = {}
        self._requests: dict[str, SavedRequest] = {}
        self.doubtful: set[int] = set()
        """Blocks of the last step whose KV may come from lost blocks, so that no other request may find them."""

    def find(self, request: Any, computed: int) -> int:
        """Return how many tokens after `computed` the tier has, in whole blocks and without the prompt's last token."""
        self._requests[request.request_id] = known = SavedRequest(request)
        if not self._consumes or computed % self._size or request.skip_reading_prefix_cache:
            return 0
        known.saved, behind = computed // self._size, (request.num_tokens - 1) // self._size
        keys = [bytes(key) for key in request.block_hashes[known.saved : behind]]
        count = len(keys)
        for tier in self._tiers:
            there = tier.contains_many(keys[:count])
            count = there.index(False) if False in there else len(there)
        return count * self._size

    def admit(self, request: Any, count: int) -> None:
        """Record that a request is about to run with `count` tokens from the tier."""
        known = self._requests.setdefault(request.request_id, SavedRequest(request))
        first, known.saved = known.saved, known.saved + count // self._size
        known.load = (first, known.saved) if count else None

    def plan(self, output: Any) -> TransferPlan:
        """Return the plan of a step that has been scheduled."""
        plan = TransferPlan(self._fingerprint)
        self.doubtful = set()
        for name in output.finished_req_ids:
            self._requests.pop(name, None)
        for each in follow_tables(self._tables, output, 0):
            known = self._requests.get(each.request_id)
            if known is not None:
                self._add(plan, known, each, output.num_scheduled_tokens[each.request_id])
        return plan

    def _add(self, plan: TransferPlan, known: SavedRequest, step: ScheduledRequest, count: int) -> None:
        """Add one request's loads and saves of a step, in which it computes `count` tokens, to the plan."""
        hashes, size = known.request.block_hashes, self._size

        def keyed(first: int, behind: int) -> Keys:
            return dict(zip(step.blocks[first:behind], map(bytes, hashes[first:behind]), strict=True))

        if known.load is not None:
            plan.loads.append(keyed(*known.load))
            known.load = None
        else:
            known.saved = min(known.saved, step.begin // size)  # after a failed load, blocks are computed again
        if known.doubtful_from is not None:
            self.doubtful.update(step.blocks[known.doubtful_from :])
            return
        # Blocks with tokens that vLLM does not know yet, such as drafts, have no hash.
        behind = min((step.begin + count) // size, len(hashes), len(step.blocks))
        if self._produces and behind > known.saved:
            plan.saves |= keyed(known.saved, behind)
            known.saved = behind

    def lose(self, lost: set[int]) -> set[int]:
        """Record that blocks could not be loaded. Return them and all blocks after them, whose KV is wrong.

        Of several requests with a lost block, vLLM lets one compute it. The others continue at once and may read it
        before, so nothing more of these requests is saved.
        """
        firsts = {
            name: next(at for at, block in enumerate(table) if block in lost)
            for name, table in self._tables.items()
            if name in self._requests and not lost.isdisjoint(table)
        }
        if len(firsts) > 1:
            for name, first in firsts.items():
                self._requests[name].doubtful_from = first
        return {block for name, first in firsts.items() for block in self._tables[name][first:]}

    def forget(self, name: str) -> None:
        """Forget a request that has ended."""
        self._requests.pop(name, None)


class BlockStore:
    """Access to a worker's blocks as rows of bytes: one row has a block of all layers, in any layout.

    Raises:
        ValueError: A block has another size than `nbytes`.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], nbytes: int) -> None:
        self.caches = [caches[name] for name in sorted(caches)]
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

    Blocks are loaded before the step that needs them. A thread writes them after the step that completes them. A tier
    may lose blocks at any time. A lost block is computed, whatever `kv_load_failure_policy` says.

    `kv_connector_extra_config` of vLLM's KVTransferConfig has these options:

    - `tier`: "disk" with `path` and `capacity_bytes`, "mooncake" with the arguments of `MooncakeTier.connect`, or
      "module:function".
    - `model`: a name for the weights, if they are in no folder of this machine.
    - `writer_bytes`: the most bytes that wait to be written.

    Raises:
        ValueError: At start-up: an option is unknown, or the model has recurrent layers, several groups of layers,
            pipeline or context parallelism, or adapters (LoRA).
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
        self._failed: set[int] = set()
        self._pool: Any = None
        self._quiet = 0
        # Number of steps that may be scheduled before the scheduler knows of a failed load.
        self._unaware: int = vllm_config.max_concurrent_batches
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

    # The scheduler's half.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens the tier has after those cached in the engine."""
        return self._planner.find(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Record the request and the tokens that it loads from the tier."""
        self._planner.admit(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> TransferPlan:
        """Return the blocks that the workers load and save around this step."""
        plan = self._planner.plan(scheduler_output)
        self._hide(self._planner.doubtful)
        return plan

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Remember vLLM's pool of blocks."""
        self._pool = gpu_block_pool

    def update_connector_output(self, connector_output: Any) -> None:
        """Let no request find blocks that could not be loaded, nor what was computed from them."""
        if connector_output.invalid_block_ids:
            self._hide(self._planner.lose(connector_output.invalid_block_ids))

    def _hide(self, blocks: set[int]) -> None:
        """Remove blocks from vLLM's own prefix cache; their requests keep them."""
        if blocks:
            self._pool.evict_blocks(blocks - {0})  # 0: vLLM's null block

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
            self._tier = TierWriter(open_tier(self._options, layout), self._options.get("writer_bytes", 1 << 30))
        return self._tier

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Fill this step's blocks from the tier, and collect lost blocks for `get_block_ids_with_load_errors`."""
        plan = connector_metadata(self)
        if isinstance(plan, TransferPlan) and plan.loads:
            assert self._store is not None
            tier = self._open(plan)
            lost = [block for wanted in plan.loads for block in self._store.load(tier, wanted)]
            if lost:
                logger.warning("%d blocks that a tier had a moment ago are gone; they are computed", len(lost))
                self._failed.update(lost)
                self._quiet = 1 + self._unaware

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: blocks are loaded before the forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are saved after the step."""

    def wait_for_save(self) -> None:
        """Save completed blocks, except in steps that were scheduled before a failed load was known."""
        if self._quiet:
            self._quiet -= 1
            return
        plan = connector_metadata(self)
        if isinstance(plan, TransferPlan) and plan.saves:
            assert self._store is not None
            self._store.save(self._open(plan), plan.saves)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be loaded in this step."""
        failed, self._failed = self._failed, set()
        return failed

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
