"""The attention backend with SGLang's own pools, layers and batches, without its engine."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("sglang", reason="sglang is not installed: make sglang")

from sglang_batches import DIM, HEADS, Scene

from pc.integrations.sglang.attention import PagedAttnBackend

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def run(scene, backend, batch, tolerance=TOLERANCE, sinks=None, softcap=0.0, masks=None):
    """Compare all layers of a step with the reference."""
    for number, layer in enumerate(scene.layers):
        query, key, value = scene.new(number)
        options = {} if sinks is None else {"sinks": sinks}
        out = backend.forward(query, key, value, layer, batch, **options)
        assert out.shape == (query.shape[0], HEADS * scene.value_dim)
        expected = scene.expected(number, query, softcap=softcap, sinks=sinks, masks=masks)
        torch.testing.assert_close(out.double(), expected, **tolerance)


def step(scene, backend, mode, tokens, *given, **options):
    """Prepare and run a step, and compare it with the reference."""
    batch = scene.batch(mode, tokens, *given)
    backend.init_forward_metadata(batch)
    run(scene, backend, batch, **options)
    scene.advance()


def steps(scene, backend, **options):
    """Run a prompt, a chunk of another prompt, a mixed step, and decodes."""
    for mode, tokens in (
        ("EXTEND", {1: 37, 2: 5}),
        ("EXTEND", {2: 40, 3: 1}),
        ("MIXED", {4: 64, 1: 1, 3: 1}),
        ("DECODE", {1: 1, 2: 1, 3: 1, 4: 1}),
        ("DECODE", {4: 1, 2: 1}),
    ):
        step(scene, backend, mode, tokens, **options)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_extend_mixed_and_decode(one_rank, page_size):
    scene = Scene(page_size)
    steps(scene, PagedAttnBackend(scene.runner()))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window_pool", [False, True], ids=["common", "pool of windows"])
def test_windows(one_rank, page_size, window_pool):
    """Layers with a window beside full layers; SGLang may have a separate pool for windows."""
    scene = Scene(page_size, windows=(0, 24, 24), window_pool=window_pool)
    steps(scene, PagedAttnBackend(scene.runner()))


def test_blocks_that_have_left_the_window(one_rank):
    """SGLang frees these in the pool for windows, and maps their slots to its padding."""
    scene = Scene(4, windows=(0, 8), window_pool=True)
    backend = PagedAttnBackend(scene.runner())
    step(scene, backend, "EXTEND", {1: 50})
    mapping = scene.pool.full_to_swa_index_mapping
    gone = scene.table.req_to_token[1, :40].long()
    for cache in (scene.pool.swa_kv_pool.k_buffer, scene.pool.swa_kv_pool.v_buffer):
        cache[0][mapping[gone]] = torch.nan
        cache[0][:4] = torch.nan
    mapping[gone] = 0
    batch = scene.batch("DECODE", {1: 1})
    backend.init_forward_metadata(batch)
    tables = backend.forward_metadata.tables
    assert tables[True][0].tolist()[:10] == [-1] * 10, "blocks that are gone are visited"
    assert (tables[True][0, 10:] > 0).all()
    assert (tables[False] > 0).all()
    run(scene, backend, batch)


def test_softcap_sinks_and_another_value_width(one_rank):
    scene = Scene(logit_cap=5.0, value_dim=16)
    steps(scene, PagedAttnBackend(scene.runner()), sinks=torch.randn(HEADS), softcap=5.0)


@pytest.mark.parametrize("scale", [None, 0.5])
def test_float8_caches(one_rank, scale):
    """Values that SGLang rounded are read with the layer's scales."""
    scene = Scene(cache_dtype=torch.float8_e4m3fn)
    for layer in scene.layers:
        layer.k_scale = layer.v_scale = None if scale is None else torch.tensor(scale)
    steps(scene, PagedAttnBackend(scene.runner()), tolerance={"rtol": 0.0, "atol": 0.25})
    row = scene.table.req_to_token[1, :37].long()
    stored = scene.pool.get_key_buffer(0)[row].double() * (scale or 1.0)
    assert (stored - scene.keys[0][1, :37]).abs().max() < 0.2
    assert not torch.equal(stored, scene.keys[0][1, :37])


def test_new_keys_are_not_changed(one_rank):
    """SGLang divides keys by their scale in place; the caller's keys must not change."""
    scene = Scene(cache_dtype=torch.float8_e4m3fn)
    scene.layers[0].k_scale = scene.layers[0].v_scale = torch.tensor(0.5)
    backend, batch = PagedAttnBackend(scene.runner()), scene.batch("EXTEND", {1: 8})
    backend.init_forward_metadata(batch)
    query, key, value = scene.new(0)
    kept = key.clone()
    backend.forward(query, key, value, scene.layers[0], batch)
    assert torch.equal(key, kept)


def tree(num_seqs, drafts, seed=0):
    """Return `[num_seqs, drafts, drafts]`, where each draft sees itself and its ancestors."""
    generator = torch.Generator().manual_seed(seed)
    masks = torch.zeros(num_seqs, drafts, drafts, dtype=torch.bool)
    for masked in masks:
        masked[0, 0] = True
        for draft in range(1, drafts):
            parent = int(torch.randint(draft, (1,), generator=generator))
            masked[draft] = masked[parent]
            masked[draft, draft] = True
    return masks


def verify_input(masks, seq_lens, of_all_keys):
    """Return SGLang's input of a verification, with the mask in its tree builder's layout."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    drafts = masks.shape[1]
    rows = [
        torch.cat([torch.ones(drafts, length if of_all_keys else 0, dtype=torch.bool), each], 1).reshape(-1)
        for each, length in zip(masks, seq_lens, strict=True)
    ]
    fields = {field.name: None for field in dataclasses.fields(EagleVerifyInput)}
    fields |= {"custom_mask": torch.cat(rows), "draft_token_num": drafts, "spec_steps": drafts, "topk": 2}
    return EagleVerifyInput(**fields | {"num_tokens_per_req": drafts, "capture_hidden_mode": CaptureHiddenMode.FULL})


@pytest.mark.parametrize("of_all_keys", [False, True], ids=["drafts", "all keys"])
@pytest.mark.parametrize("drafts", [5, 40])
def test_trees_of_drafts(one_rank, monkeypatch, of_all_keys, drafts):
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    layout = TreeMaskMode.FULL_MASK if of_all_keys else TreeMaskMode.QLEN_ONLY
    monkeypatch.setattr("pc.integrations.sglang.attention.default_tree_mask_mode", lambda: layout)
    scene = Scene(windows=(0, 24))
    backend = PagedAttnBackend(scene.runner())
    step(scene, backend, "EXTEND", {1: 37, 2: 20, 3: 1})
    masks = tree(3, drafts)
    lengths = torch.tensor([37, 20, 1])
    positions = (lengths[:, None] + masks.sum(2) - 1).reshape(-1)
    spec = verify_input(masks, lengths.tolist(), of_all_keys)
    step(scene, backend, "TARGET_VERIFY", {1: drafts, 2: drafts, 3: drafts}, spec, positions, masks=masks)


def test_a_chain_of_drafts_needs_no_mask(one_rank):
    scene = Scene()
    backend = PagedAttnBackend(scene.runner())
    step(scene, backend, "EXTEND", {1: 37, 2: 20})
    spec = verify_input(tree(2, 3), [37, 20], False)
    spec.custom_mask = None
    step(scene, backend, "TARGET_VERIFY", {1: 3, 2: 3}, spec, torch.zeros(6, dtype=torch.int64))


def graph_batch(scene, batch, num_seqs):
    """Return the batch as SGLang's graph runner passes it: in its own memory, padded to a captured size."""
    per_seq = batch.out_cache_loc.shape[0] // batch.batch_size
    more = num_seqs - batch.batch_size
    batch.req_pool_indices = torch.cat([batch.req_pool_indices, torch.zeros(more, dtype=torch.int64)])
    batch.seq_lens = torch.cat([batch.seq_lens, torch.ones(more, dtype=torch.int64)])
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, torch.zeros(more * per_seq, dtype=torch.int64)])
    if batch.positions is not None:
        batch.positions = torch.cat([batch.positions, torch.ones(more * per_seq, dtype=torch.int64)])
    batch.seq_lens_cpu, batch.batch_size = None, num_seqs
    return batch


def addresses(step):
    tensors = [step.seq_lens, step.query_start_loc, step.window_slots, step.tree_mask, step.depths]
    tensors += [*step.tables.values(), *step.plans.values()]
    return [tensor.data_ptr() for tensor in tensors if tensor is not None]


def replayed(scene, backend, batch, captured, count, masks=None):
    """Run a padded step, whose first `count` queries are compared, and return the addresses that a graph reads."""
    backend.init_forward_metadata_out_graph(batch, in_capture=captured is None)
    with sync_is_an_error():
        backend.init_forward_metadata_in_graph(batch)
    captured = captured or addresses(backend.forward_metadata)
    assert addresses(backend.forward_metadata) == captured
    padding = batch.out_cache_loc.shape[0] - count
    for number, layer in enumerate(scene.layers):
        query, key, value = (torch.cat([x, x.new_zeros(padding, *x.shape[1:])]) for x in scene.new(number))
        out = backend.forward(query, key, value, layer, batch)[:count]
        expected = scene.expected(number, query[:count], masks=masks)
        torch.testing.assert_close(out.double(), expected, **TOLERANCE)
    return captured


@pytest.mark.parametrize("window_pool", [False, True])
def test_decoding_in_graphs(one_rank, window_pool):
    """Metadata are updated in the memory that a captured graph reads, by operations that a graph can record."""
    scene = Scene(windows=(0, 24), window_pool=window_pool)
    backend = PagedAttnBackend(scene.runner())
    backend.init_cuda_graph_state(4, 4)
    step(scene, backend, "EXTEND", {1: 37, 2: 20, 3: 1})
    captured = None
    for tokens in ({1: 1, 2: 1, 3: 1}, {3: 1, 1: 1}, {2: 1}):
        batch = graph_batch(scene, scene.batch("DECODE", tokens), 4)
        captured = replayed(scene, backend, batch, captured, len(tokens))
        scene.advance()


def sync_is_an_error():
    """Raise if the host reads a tensor."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoReading(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func is not torch.ops.aten._local_scalar_dense.default, "a tensor's value was read"
            return func(*args, **(kwargs or {}))

    return NoReading()


def test_verification_in_graphs(one_rank):
    """The tree builder writes into the backend's buffer, or returns its own mask, which is copied there."""
    scene = Scene(windows=(0, 24))
    backend = PagedAttnBackend(scene.runner())
    drafts, size = 5, 3
    assert backend.verify_mask is None
    backend.init_cuda_graph_state(size, size * drafts)
    step(scene, backend, "EXTEND", {1: 37, 2: 20, 3: 1})
    captured = None
    for seed, tokens in enumerate(({1: drafts, 2: drafts, 3: drafts}, {3: drafts, 1: drafts})):
        masks = tree(len(tokens), drafts, seed)
        lengths = torch.tensor([scene.lengths[row] for row in tokens])
        positions = (lengths[:, None] + masks.sum(2) - 1).reshape(-1)
        spec = verify_input(masks, lengths.tolist(), False)
        if seed:
            backend.verify_mask.buffer[: masks.numel()] = masks.reshape(-1)
            spec.custom_mask = backend.verify_mask.buffer
        batch = graph_batch(scene, scene.batch("TARGET_VERIFY", tokens, spec, positions), size)
        captured = replayed(scene, backend, batch, captured, len(tokens) * drafts, masks)


def test_masks_that_come_after_the_step_was_prepared(one_rank):
    """SGLang prepares a verification while it drafts, and corrects the masks afterwards."""
    scene = Scene()
    backend = PagedAttnBackend(scene.runner())
    step(scene, backend, "EXTEND", {1: 37, 2: 20})
    right, lengths = tree(2, 5, seed=1), torch.tensor([37, 20])
    spec = verify_input(tree(2, 5), [37, 20], False)
    batch = scene.batch("TARGET_VERIFY", {1: 5, 2: 5}, spec, torch.zeros(10, dtype=torch.int64))
    backend.init_forward_metadata(batch)
    spec.custom_mask = right.reshape(-1)
    spec.positions = (lengths[:, None] + right.sum(2) - 1).reshape(-1)
    backend.update_verify_buffers_to_fill_after_draft(spec, None)
    run(scene, backend, batch, masks=right)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_mla_backend": True}, "multi-head latent attention"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"kv_cache_dtype": torch.float8_e5m2}, "kv_cache_dtype float8_e5m2"),
        ({"attention_chunk_size": 8192}, "local chunks"),
        ({"head_dim": 1024}, "head_dim 1024"),
    ],
)
def test_engines_that_are_refused(one_rank, changes, message):
    with pytest.raises(ValueError, match=f"pc's attention backend does not support: .*{message}"):
        PagedAttnBackend(Scene().runner(**changes))


def test_images_whose_tokens_attend_to_each_other_are_refused(one_rank):
    """Gemma-3 sets such masks for SGLang's Triton backend alone; others would attend causally without a word."""
    scene = Scene()
    model = torch.nn.ModuleList(scene.layers)
    model.prepare_attn_masks = None
    PagedAttnBackend(scene.runner(model=model))  # SGLang serves Gemma-3 without images by default
    with pytest.raises(ValueError, match=r"images whose tokens attend to each other .*--enable-multimodal"):
        PagedAttnBackend(scene.runner(model=model, is_multimodal=True))


def test_layers_that_share_keys_have_their_own_windows(one_rank):
    """A layer may read the keys that another layer wrote, under that layer's number."""
    scene = Scene()
    backend = PagedAttnBackend(scene.runner())
    batch = scene.batch("EXTEND", {1: 37})
    backend.init_forward_metadata(batch)
    run(scene, backend, batch)
    reader = Scene(windows=(8,)).layers[0]
    query = torch.randn(37, HEADS * DIM)
    out = backend.forward(query, None, None, reader, batch, save_kv_cache=False)
    scene.windows = (8,)
    torch.testing.assert_close(out.double(), scene.expected(0, query), **TOLERANCE)


def test_context_parallelism_is_refused(one_rank):
    one_rank.attn_dcp_size = 2
    with pytest.raises(ValueError, match="context parallelism"):
        PagedAttnBackend(Scene().runner())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": "ENCODER_ONLY"}, "attention type encoder_only"),
        ({"attn_type": "DECODER_BIDIRECTIONAL"}, "attention type decoder_bidirectional"),
        ({"use_irope": True}, "use_irope"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode ALIBI"),
        ({"logit_cap": 5.0, "logit_capping_method": "sigmoid"}, "logit capping by sigmoid"),
    ],
)
def test_layers_that_are_refused(one_rank, options, message):
    from sglang.srt.layers.radix_attention import AttentionType

    if "attn_type" in options:
        options = {"attn_type": AttentionType[options["attn_type"]]}
    with pytest.raises(ValueError, match=message):
        PagedAttnBackend(Scene(**options).runner())


def test_options_of_a_call_that_are_refused(one_rank):
    scene = Scene()
    backend, batch = PagedAttnBackend(scene.runner()), scene.batch("EXTEND", {1: 8})
    backend.init_forward_metadata(batch)
    query, key, value = scene.new(0)
    with pytest.raises(NotImplementedError, match="k_rope: not supported"):
        backend.forward(query, key, value, scene.layers[0], batch, k_rope=key)


@pytest.mark.parametrize("mode", ["DECODE", "DRAFT_EXTEND_V2"])
def test_draft_models_are_refused(one_rank, mode):
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    scene = Scene()
    backend = PagedAttnBackend(scene.runner())
    batch = scene.batch(mode, {1: 1}, EagleDraftInput(kv_indices=torch.zeros(1)))
    with pytest.raises(NotImplementedError, match="speculative-draft-attention-backend"):
        backend.init_forward_metadata(batch)
