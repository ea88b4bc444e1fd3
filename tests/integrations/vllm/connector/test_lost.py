"""Schedulers with a connector, over a made-up model and a tier that loses blocks: no answer may change."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_shared
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.worker.gpu_worker import Worker
from vllm_exact import BLOCK, ENGINES, ExactEngine, following, prompt, random_traffic

from pc.integrations.vllm.connector import TierConnector


class Losing(dict):
    """A tier that engines share. It loses a share of the blocks that it has just reported."""

    def __init__(self, share: float, rng: random.Random) -> None:
        super().__init__()
        self.share, self.rng, self.lost, self.given = share, rng, 0, 0

    def contains_many(self, keys: list[bytes]) -> list[bool]:
        return [key in self for key in keys]

    def get_many(self, keys: list[bytes]) -> list[Any]:
        for key in keys:
            if self.rng.random() < self.share:
                self.lost += self.pop(key, None) is not None
        found = [self.get(key) for key in keys]
        self.given += len(keys) - found.count(None)
        return found


class Rows:
    """The blocks of an `ExactEngine` as the worker half of a connector reads and writes them."""

    def __init__(self, engine: ExactEngine) -> None:
        self.engine = engine

    def load(self, tier: Losing, wanted: dict[int, bytes]) -> list[int]:
        found = dict(zip(wanted, tier.get_many(list(wanted.values())), strict=True))
        lost = next((at for at, rows in enumerate(found.values()) if rows is None), len(found))
        for block, rows in list(found.items())[:lost]:
            self.engine.kv[block * BLOCK : (block + 1) * BLOCK] = rows
        return list(wanted)[lost:]

    def save(self, tier: Losing, blocks: dict[int, bytes]) -> None:
        for block, key in blocks.items():
            rows = self.engine.kv[block * BLOCK : (block + 1) * BLOCK]
            assert tier.setdefault(key, rows) == rows  # whatever any engine has saved under a key is the same


class ConnectedEngine(ExactEngine):
    """An engine with both halves of a connector. The worker's half runs after the forward pass, as in vLLM.

    With `beside`, it is in a `MultiConnector` with `Claims`, which loads nothing and reports that after the pass.
    """

    def __init__(self, tier: Losing, num_blocks: int, beside: bool = False, **options: Any) -> None:
        from vllm.config import KVTransferConfig

        ours = vllm_shared.transfer({"tier": f"{__name__}:opened", "model": "made-up"})
        opened.tier = tier
        theirs = {"kv_connector": "Claims", "kv_connector_module_path": "vllm_connector", "kv_role": "kv_both"}
        both = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        both["kv_connector_extra_config"] = {"connectors": [theirs, ours]}
        super().__init__(num_blocks, kv_transfer_config=KVTransferConfig(**both if beside else ours), **options)
        scheduler = self.scheduler
        config = copy.copy(scheduler.vllm_config)  # as a MultiConnector copies it
        config.kv_transfer_config = KVTransferConfig(**ours)
        self.worker: Any = TierConnector(config, KVConnectorRole.WORKER, scheduler.kv_cache_config)
        self.worker._store, self.worker._tier = Rows(self), tier

    def _execute(self, output: Any) -> Any:
        from vllm.v1.outputs import KVConnectorOutput

        plans = output.kv_connector_metadata
        self.worker.bind_connector_metadata(getattr(plans, "metadata", [plans])[-1])
        result = super()._execute(output)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        _, received = self.worker.get_finished(output.finished_req_ids)
        lost = self.worker.get_block_ids_with_load_errors()
        if output.has_sync_kv_loads:
            lost |= set(self.tables["claimed"][: 64 // BLOCK])
        result.kv_connector_output = KVConnectorOutput(finished_recving=received, invalid_block_ids=lost)
        return result


def opened(layout: Any, options: Any) -> Losing:
    """Return the tier of the test that runs."""
    return opened.tier


@ENGINES
@pytest.mark.parametrize("share", [0.0, 0.02, 0.2])
def test_random_traffic_over_a_tier_that_loses_blocks(kind, share):
    """Requests with common beginnings, aborts, preemptions and evictions, in two engines one after the other."""
    rng = random.Random(str(share))
    tier = Losing(share, rng)
    roots = [prompt(rng.randrange(100, 400), at) for at in range(4)]

    def ask(asked):
        root = rng.choice(roots)
        return (
            root[: rng.randrange(20, len(root))] + prompt(rng.randrange(1, 60), rng.randrange(40)),
            rng.randrange(1, 30),
            {},
        )

    for num_blocks in (70, 40):  # requests preempt each other in the second
        engine = ConnectedEngine(tier, num_blocks, **kind)
        asked = random_traffic(engine, rng, ask)
        assert engine.said == {name: following(*each) for name, each in asked.items()}
    assert tier.given > 100
    assert (tier.lost > 10) == (share > 0)


def change(engine: ExactEngine, way: str) -> None:
    """Change the weights in one of vLLM's ways, here none of them, or reset the connector's cache."""
    config = engine.scheduler.vllm_config
    config.model_config = copy.copy(config.model_config)  # as `update_config` does to name other weights
    runner = SimpleNamespace(reload_weights=lambda: None, get_model=lambda: torch.nn.Linear(1, 1))
    worker = SimpleNamespace(vllm_config=config, model_runner=runner, _weight_update_active=True)
    worker._check_weight_transfer_engine = lambda: None
    worker.weight_transfer_engine = SimpleNamespace(update_weights=lambda info: None)
    assert engine.scheduler.reset_prefix_cache(reset_connector=way == "reset_connector")
    if way != "reset_connector":
        getattr(Worker, way)(worker, *[{}] * (way == "update_weights"))


@ENGINES
@pytest.mark.parametrize("way", ["reset_connector", "reload_weights", "update_weights", "reset_weights"])
def test_nothing_is_read_or_saved_after_a_change_of_weights(kind, way, warnings):
    """The tier may have KV of the old weights, and other engines still use them, also those of this process."""
    tier, tokens = Losing(0.0, random.Random(0)), prompt(100)
    engine, neighbour = (ConnectedEngine(tier, 70, **kind) for _ in range(2))
    engine.add("before", tokens)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.add("loads", tokens)
    engine.run()
    given, saved = tier.given, dict(tier)
    assert given == 6
    change(engine, way)
    for name, asked in {"again": tokens, "other": prompt(100, 1)}.items():
        engine.add(name, asked)
        engine.run()
        assert engine.said[name] == following(asked, 4)
        assert engine.computed[name] == 103
    assert (tier.given, tier) == (given, saved)
    assert sum("until the engine starts again" in line for line in warnings) == 1
    neighbour.add("loads", tokens)
    neighbour.run()
    assert (neighbour.computed["loads"], tier.given) == (7, given + 6)


@ENGINES
def test_nothing_is_saved_that_was_computed_with_blocks_that_another_connector_could_not_load(kind):
    """It says so after the pass. Blocks of other requests of the same step are saved at once."""
    prompts, tiers = {"other": prompt(40), "claimed": [499, *prompt(595, 1)]}, []
    for beside in (True, False):
        tiers.append(Losing(0.0, random.Random(0)))
        engine = ConnectedEngine(tiers[-1], 70, beside, **kind)
        for name, tokens in prompts.items():
            engine.add(name, tokens, 40)
        for _ in range(1 + kind["asynchronous"]):
            engine.step()
        if beside:
            assert len(tiers[0]) == 2
        engine.run()
        assert engine.said == {name: following(tokens, 40) for name, tokens in prompts.items()}
    assert engine.computed["claimed"] == 635
    assert tiers[0].items() < tiers[1].items()
    assert [len(tier) for tier in tiers] == [4, 43]


@ENGINES
@pytest.mark.parametrize("told", [False, True], ids=["aborted", "told and aborted"])
def test_nothing_is_saved_that_was_computed_behind_a_hit_of_blocks_that_another_connector_could_not_load(kind, told):
    """vLLM leaves such blocks in its prefix cache, also of a request that ends before it computes them again."""
    asked, tiers = [499, *prompt(395, 1)], []
    for beside in (True, False):
        tiers.append(Losing(0.0, random.Random(0)))
        engine = ConnectedEngine(tiers[-1], 40, beside, **kind)
        if beside:
            engine.add("claimed", asked, 40)
            for _ in range(1 + kind["asynchronous"] * told):
                engine.step()
            engine.abort("claimed")
        for name, tokens in {"other": prompt(40), "hits": asked, "in wrong blocks": prompt(500, 2)}.items():
            engine.add(name, tokens, 40)
            engine.run()
    assert tiers[0].items() < tiers[1].items()
    assert [len(tier) for tier in tiers] == [37, 64]  # all but those of the second request
