"""vLLM's block tables behind vLLM-Omni's calls: views of groups, and runners that make our manager."""

from __future__ import annotations

from types import SimpleNamespace

import omni
import pytest
import torch

omni.use_omni()

from vllm_omni.core.prefix_cache.interface import OmniPrefixCacheUnmatchError  # noqa: E402

from pc.integrations.vllm.omni import OmniPrefixCacheManager as Ours  # noqa: E402

BLOCKS, WIDTH = 40, 6


def input_batch(groups, kernel_sizes):
    """Return a batch with vLLM's own block tables, and a request with 9 computed tokens in every group."""
    from vllm.v1.worker.block_table import BlockTable

    tables = []
    for (size, blocks), kernel in zip(groups, kernel_sizes, strict=True):
        table = BlockTable(size, 4, 16, 64, False, torch.device("cpu"), kernel, 0)
        table.add_row(blocks, 1)
        tables.append(table)
    holder = SimpleNamespace(block_tables=tables)
    return SimpleNamespace(
        req_ids=["a"],
        req_id_to_index={"a": 1},
        num_computed_tokens_cpu=torch.tensor([0, 9, 0, 0]).numpy(),
        block_table=type("Tables", (), {"block_tables": tables, "__getitem__": lambda _, i: holder.block_tables[i]})(),
    )


def specs(*kinds):
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    shape = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    made = [
        SlidingWindowSpec(block_size=size, sliding_window=8, **shape)
        if window
        else FullAttentionSpec(block_size=size, **shape)
        for size, window in kinds
    ]
    return [SimpleNamespace(kv_cache_spec=spec) for spec in made]


@pytest.mark.parametrize("kernel", [8, 4])
def test_the_view_of_two_groups_and_a_window(kernel):
    """VLLM-Omni raises for models with windows, and for blocks that kernels split."""
    from pc.integrations.vllm.omni import check_groups, make_view

    groups = specs((16, True), (8, False))
    check_groups(groups)
    view = make_view(input_batch([(16, [1]), (8, [5, 2, 7])], [16, kernel]), 16, groups)
    assert (view.group, view.block_size) == (1, 8)
    assert view.batch_req_ids() == ["a"]
    wanted = [(5, 2, 7)[at // 8] * 8 + at % 8 for at in range(9, 20)]
    for count in (11, 1, 0):
        assert view.slots(["a"], {"a": count}).index.tolist() == wanted[:count]
    assert view.slots(["a"], {}).count == 0


def test_what_has_windows_alone_is_refused():
    from pc.integrations.vllm.omni import check_groups

    with pytest.raises(OmniPrefixCacheUnmatchError, match="no layers with full attention"):
        check_groups(specs((16, True)))


def test_runners_make_ours(monkeypatch):
    """Runners make our manager through vLLM-Omni's own code, for two groups."""
    from vllm.distributed import parallel_state

    _, _, mixin, group_view = omni.restore_later(monkeypatch)
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: SimpleNamespace(is_last_rank=True))
    from pc.integrations.vllm import enable

    enable("omni")
    config = SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=specs((16, True), (8, False)))
    runner = type("Runner", (mixin.PrefixCacheRunnerMixin,), {})()
    runner.is_pooling_model = False
    runner.kv_cache_config = config
    runner.input_batch = input_batch([(16, [1]), (8, [5, 2, 7])], [16, 8])
    runner._omni_prefix_cache_cfg = group_view.stage_prefix_cache_config(
        kv_cache_config=config,
        cache_config=SimpleNamespace(enable_prefix_caching=True, block_size=16),
        kv_transfer_config=None,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        model_config=None,
        is_pooling_model=False,
    )
    request = SimpleNamespace(req_id="a", num_computed_tokens=0, block_ids=([1], [5, 2, 7]))
    runner.input_batch.num_computed_tokens_cpu[1] = 0
    step = SimpleNamespace(scheduled_new_reqs=[request], num_scheduled_tokens={"a": 9}, finished_req_ids=set())
    runner._prefix_cache_step_begin(step)
    assert type(runner.omni_prefix_cache) is Ours
    hidden = torch.randn(9, WIDTH)
    saved = runner._prefix_cache_save_step(
        hidden, {"codes": {"audio": hidden[:, :2]}}, num_tokens_unpadded=9, num_tokens_padded=9
    )
    rows, others = runner._prefix_cache_materialize(saved, ["a"])
    assert torch.equal(rows["a"], hidden)
    assert torch.equal(others["codes.audio"]["a"], hidden[:, :2])
    runner.omni_prefix_cache.shutdown()
