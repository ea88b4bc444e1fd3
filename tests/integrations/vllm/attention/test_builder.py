"""The metadata of a step: holes for null blocks, one plan for each window, and memory that graphs can read."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import pc

MODULE = "pc.integrations.vllm.attention.builder"


def make_builder(windows=(0,), graphs=False, device="cpu"):
    """Return a builder for layers with these windows. Plans and graphs are otherwise only for devices."""
    from pc.integrations.vllm.attention import PagedMetadataBuilder

    mode = SimpleNamespace(has_full_cudagraphs=lambda: graphs)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=mode, cudagraph_capture_sizes=[1, 2, 4]),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    layers = {str(n): SimpleNamespace(impl=SimpleNamespace(window=window)) for n, window in enumerate(windows)}
    with mock.patch(f"{MODULE}.get_layers_from_vllm_config", return_value=layers):
        spec = SimpleNamespace(block_size=16, num_kv_heads=2)
        return PagedMetadataBuilder(spec, list(layers), config, torch.device(device))


def make_common(num_seqs=3, width=8, **options):
    from vllm.v1.attention.backend import CommonAttentionMetadata

    lens = torch.arange(20, 20 + num_seqs, dtype=torch.int32)
    tables = torch.arange(num_seqs * width, dtype=torch.int32).view(num_seqs, width)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32)
    values = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": lens,
        "num_reqs": num_seqs,
        "num_actual_tokens": num_seqs,
        "max_query_len": 1,
        "max_seq_len": int(lens.max()),
        "block_table_tensor": tables,
        "slot_mapping": torch.zeros(num_seqs, dtype=torch.int64),
    }
    return CommonAttentionMetadata(**{**values, **options})


def test_tables_are_as_wide_as_the_step_and_have_holes_for_the_null_block():
    common = make_common()
    step = make_builder().build(0, common)
    assert step.block_tables.tolist() == [[-1, 1], [8, 9], [16, 17]]
    assert common.block_table_tensor[0, 0] == 0, "vLLM's own table was written to"
    assert step.plans == {}


def test_a_plan_for_each_window_shared_by_the_layers():
    builder = make_builder(windows=(0, 7, 7, 0), device="meta")
    with mock.patch(f"{MODULE}.attention_plan", side_effect=pc.attention_plan) as plan:
        step = builder.build(0, make_common())
    assert [call.kwargs["window"] for call in plan.call_args_list] == [0, 7]
    for window, own in step.plans.items():
        lens, starts = step.seq_lens, step.query_start_loc
        fresh = pc.attention_plan(step.block_tables, lens, starts, 16, window=window, num_kv_heads=2)
        assert torch.equal(own, fresh)


def test_under_graphs_memory_stays_where_it_is():
    builder = make_builder(windows=(0, 7), graphs=True, device="meta")
    small, large = make_common(2), make_common(4)
    first = builder.build_for_cudagraph_capture(small)
    addresses = [first.block_tables.data_ptr(), *(plan.data_ptr() for plan in first.plans.values())]
    builder.build_for_cudagraph_capture(large)
    small.seq_lens.fill_(40)
    small.block_table_tensor[0, 1] = 0
    again = builder.build(0, small)
    assert [again.block_tables.data_ptr(), *(plan.data_ptr() for plan in again.plans.values())] == addresses
    assert again.block_tables.shape == (2, 8), "the width does not depend on the lengths of a step"
    assert again.block_tables[0, 1] == -1
    assert again.max_seq_len is None
    fresh = pc.attention_plan(again.block_tables, again.seq_lens, again.query_start_loc, 16, num_kv_heads=2)
    assert torch.equal(first.plans[0], fresh), "what the graph reads was refreshed"


def test_steps_of_equally_many_queries_are_captured():
    from vllm.v1.attention.backend import AttentionCGSupport

    from pc.integrations.vllm.attention import PagedMetadataBuilder

    assert PagedMetadataBuilder.get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH


def test_a_common_prefix_is_shared_where_it_pays():
    builder = make_builder()
    common = make_common(8, width=19, seq_lens=torch.full((8,), 300, dtype=torch.int32), max_seq_len=300)
    assert builder.build(256, common).num_shared_blocks == 16
    assert builder.build(240, common).num_shared_blocks == 0
    assert builder.build(256, make_common(7)).num_shared_blocks == 0
    assert make_builder(graphs=True, device="meta").build(256, common).num_shared_blocks == 0
    builder.shared = 8, 17  # as `common_prefix` counts it on the host
    assert builder.build(0, common).num_shared_blocks == 17
    builder.shared = 7, 17  # of another batch, or of one padded since
    assert builder.build(0, common).num_shared_blocks == 0
    builder.shared, builder.batch_invariant = (8, 17), True
    assert builder.build(0, common).num_shared_blocks == 0


def test_steps_that_no_operator_computes_are_refused():
    builder = make_builder()
    with pytest.raises(NotImplementedError, match="causal: got one value per sequence"):
        builder.build(0, make_common(causal=torch.ones(3, dtype=torch.bool)))
    with pytest.raises(NotImplementedError, match="R-SWA"):
        builder.build(0, make_common(rswa_prefix_lens=torch.ones(3, dtype=torch.int32)))


def test_the_backend_is_refused_by_name_at_start_up():
    from pc.integrations.vllm.attention import PagedAttentionBackend

    asked = {
        "head_size": 64,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": False,
        "has_sink": True,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": None,
        "attn_type": "decoder",
        "has_sliding_window": True,
    }
    assert PagedAttentionBackend.validate_configuration(**asked) == []
    for change, said in (
        ({"use_mla": True}, "MLA not supported"),
        ({"head_size": 1024}, "head_size not supported"),
        ({"dtype": torch.float64}, "dtype not supported"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype float16 with a model in torch.bfloat16 not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"use_rswa": True}, "R-SWA not supported"),
        ({"use_dcp": True}, "DCP not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"attn_type": "encoder"}, "attention type encoder not supported"),
    ):
        assert PagedAttentionBackend.validate_configuration(**{**asked, **change}) == [said]
