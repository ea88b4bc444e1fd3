"""SGLang's attention backend `pc`, with checks that refuse unsupported models and layers by name."""

from __future__ import annotations

from typing import Any

import torch

from ...triton_ops import paged_attention, sliding_window_attention, sparse_gap_attention
from ...triton_ops._attention.checks import MAX_HEAD_DIM
from ...triton_ops._core.checks import FLOATS
from .api import (
    AttentionBackend,
    AttentionType,
    KVWriteLoc,
    RadixAttention,
    TreeMaskMode,
    VerifyMask,
    default_tree_mask_mode,
    get_exec,
    get_parallel,
)
from .steps import AttentionStep, Kind, StepBuilder, draft_masks, pack_masks

CACHE_DTYPES = (*FLOATS, torch.float8_e4m3fn)


class PagedAttnBackend(AttentionBackend):
    """Decoder attention through `pc`, for prefill with prefix hits, chunks, mixed steps, decode and draft verification.

    It supports page sizes from 1, head sizes up to `MAX_HEAD_DIM`, learned sinks, tanh softcap and grouped queries.
    Sliding windows may be in SGLang's pool for windows or in the common pool. Caches may be float8 e4m3 with the
    layers' scales. Decode and verification may run in graphs.

    It refuses these by name: MLA, encoders and cross attention, ALiBi (SGLang passes no slopes) and local attention in
    chunks. It also refuses bidirectional spans, images whose tokens attend to each other, diffusion models, context
    parallelism, translated pools and other cache dtypes.
    """

    needs_cpu_seq_lens = False  # lengths on the host are used if present, but never copied from the device
    verify_mask: VerifyMask | None = None
    """The buffer in which SGLang's tree builder writes the mask of drafts; None until graphs are captured."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.pool = runner.token_to_kv_pool
        self.device = runner.device
        self.max_context_len = runner.model_config.context_len  # SGLang's drafts read it
        self.is_draft_worker = bool(runner.is_draft_worker)
        self.batch_invariant = bool(get_exec().deterministic.enable_deterministic_inference)
        layers = [m for m in getattr(runner, "model", torch.nn.Module()).modules() if isinstance(m, RadixAttention)]
        reasons = _refusals(runner) + sorted({reason for layer in layers for reason in _layer_refusals(layer)})
        if reasons:
            raise ValueError(f"pc's attention backend does not support: {'; '.join(reasons)}")
        self._layers: dict[Any, tuple[Kind, dict[str, torch.Tensor]]] = {}  # kinds, and scales of float8 caches
        kinds = {self._kind(layer) for layer in layers} or {(False, 0)}
        num_kv_heads = max(runner.model_config.get_num_kv_heads(get_parallel().attn_tp_size), 1)
        self.builder = StepBuilder(runner, kinds, num_kv_heads, self.batch_invariant)
        self.forward_metadata: AttentionStep | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make the metadata of a step that runs without a graph. Its layers share it."""
        batch, mode = forward_batch, forward_batch.forward_mode
        if mode.is_idle() or batch.batch_size == 0:
            self.forward_metadata = None
            return
        _check_batch(batch)
        rows, seq_lens = batch.req_pool_indices, batch.seq_lens
        # With drafts, lengths on the host may be older than those on the device.
        lengths = getattr(batch, "seq_lens_cpu", None) if batch.spec_info is None else None
        longest = None if lengths is None else int(lengths.max())
        if mode.is_decode() or mode.is_target_verify():
            query_len = batch.spec_info.draft_token_num if mode.is_target_verify() else 1
            added = query_len if mode.is_target_verify() else 0
            starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device) * query_len
            drafts = None
            if mode.is_target_verify() and batch.spec_info.custom_mask is not None:
                masks = self._draft_masks(batch.spec_info, query_len, seq_lens)
                drafts = pack_masks(masks), batch.positions.to(torch.int32)
            step = self.builder.step(rows, seq_lens + added, starts, query_len, longest, drafts)
        else:
            starts = torch.nn.functional.pad(batch.extend_seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
            counts = getattr(batch, "extend_seq_lens_cpu", None)
            step = self.builder.step(rows, seq_lens, starts, None if counts is None else int(max(counts)), longest)
        step.window_slots = self.builder.window_slots(batch.out_cache_loc)
        self.forward_metadata = step

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate memory that captured graphs read."""
        self.builder.reserve(max_bs, max_num_tokens)
        per_seq = max_num_tokens // max(max_bs, 1)
        if per_seq > 1 and not self.is_draft_worker:
            size = max_bs * per_seq * per_seq
            buffer = torch.zeros(size, dtype=torch.bool, device=self.device)
            self.verify_mask = VerifyMask(buffer=buffer, mode=TreeMaskMode.QLEN_ONLY, max_bs=max_bs)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Select the metadata that the graph for this batch size reads, and copy the masks of drafts to it."""
        self.forward_metadata = self._graph_step(forward_batch)
        if forward_batch.forward_mode.is_target_verify():
            self._keep_masks(forward_batch.spec_info, forward_batch.seq_lens)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Update a graph's metadata. The graph itself records these operations at its start."""
        step, verify = self._graph_step(forward_batch), forward_batch.forward_mode.is_target_verify()
        num_seqs = step.seq_lens.shape[0]
        seq_lens = forward_batch.seq_lens[:num_seqs]
        query_len = forward_batch.spec_info.draft_token_num if verify else 1
        rows, slots = forward_batch.req_pool_indices[:num_seqs], forward_batch.out_cache_loc
        if step.tree_mask is not None and step.depths is not None and self.verify_mask is not None:
            step.depths.copy_(forward_batch.positions[: num_seqs * query_len])
            masks = draft_masks(self.verify_mask.buffer, query_len, seq_lens, of_all_keys=False)
            step.tree_mask.copy_(pack_masks(masks))
        self.builder.refresh(step, rows, seq_lens + query_len if verify else seq_lens, slots[: num_seqs * query_len])
        self.forward_metadata = step

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Set the masks of a step that was prepared before its drafts existed."""
        step = self.forward_metadata
        if step is None or spec_info.custom_mask is None:
            return
        query_len = spec_info.draft_token_num
        if cuda_graph_bs is None:
            step.tree_mask = pack_masks(self._draft_masks(spec_info, query_len, step.seq_lens - query_len))
            step.depths = spec_info.positions.to(torch.int32)
            self.builder.plan(step)
        elif self.verify_mask is None or spec_info.custom_mask is not self.verify_mask.buffer:
            raise NotImplementedError("custom_mask: got a mask made outside the graph, needs the backend's own buffer")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of the sequences that pad a graph."""
        return 1

    def forward_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute attention for prompts, chunks and drafts; see `_attend`."""
        return self._attend(*args, **kwargs)

    def forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute attention for one token of each sequence; see `_attend`."""
        return self._attend(*args, **kwargs)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Write a layer's new keys and values, then return its attention, `[num_tokens, heads * width of values]`."""
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise NotImplementedError(f"{', '.join(given)}: not supported by pc's attention backend")
        (kind, scales), step = self._kind_and_scales(layer), self.forward_metadata
        if step is None:
            raise RuntimeError("forward_metadata: got None, needs init_forward_metadata before the first layer")
        if save_kv_cache and k is not None and v is not None:
            place = KVWriteLoc.for_batch(forward_batch, swa_loc=step.window_slots)
            if scales and layer.k_scale is not None:
                # SGLang divides the tensors in place, so it gets copies.
                self.pool.set_kv_buffer(layer, place, k.clone(), v.clone(), layer.k_scale, layer.v_scale)
            else:
                self.pool.set_kv_buffer(layer, place, k, v)
        keys, values = self._caches(layer.layer_id)
        windowed, window = kind
        query, scale = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim), float(layer.scaling)
        tensors = (query, keys, values, step.tables[windowed], step.seq_lens, step.query_start_loc)
        options: dict[str, Any] = {
            "softcap": float(layer.logit_cap or 0.0),
            "sinks": sinks,
            "max_query_len": step.max_query_len,
            "max_seq_len": step.max_seq_len,
            "plan": step.plans.get(kind),
            "batch_invariant": self.batch_invariant,
            **scales,
        }
        if step.tree_mask is not None:
            options |= {"causal": step.causal, "tree_mask": step.tree_mask}
            out = sparse_gap_attention(*tensors, step.depths, scale, window, **options)
        elif window:
            out = sliding_window_attention(*tensors, scale, window, **options)
        else:
            out = paged_attention(*tensors, scale, **options)
        return out.view(out.shape[0], -1)

    def _caches(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values `[num_blocks, page_size, num_kv_heads, head_dim]` as views of SGLang's slots."""
        blocks = []
        for slots in (self.pool.get_key_buffer(layer_id), self.pool.get_value_buffer(layer_id)):
            if slots.dim() != 3:
                raise NotImplementedError(f"KV cache: got shape {list(slots.shape)}, needs [slots, heads, head_dim]")
            whole = slots.shape[0] // self.builder.page_size
            blocks.append(slots[: whole * self.builder.page_size].unflatten(0, (whole, self.builder.page_size)))
        return blocks[0], blocks[1]

    def _kind(self, layer: Any) -> Kind:
        """Return the kind of a layer. SGLang's window counts the keys before a query; `pc` counts its own key too."""
        size = layer.sliding_window_size
        mapping = getattr(self.pool, "layers_mapping", None)
        in_window_pool = mapping is not None and hasattr(self.pool, "swa_kv_pool") and bool(mapping[layer.layer_id][1])
        return in_window_pool, 0 if size is None or size < 0 else size + 1

    def _kind_and_scales(self, layer: Any) -> tuple[Kind, dict[str, torch.Tensor]]:
        """Return a layer's kind, and the scales of a float8 cache.

        Raises:
            NotImplementedError: The layer is not supported. It is checked at its first call.
        """
        found = self._layers.get(layer)  # several layers may read the keys of one layer_id
        if found is None:
            reasons = _layer_refusals(layer)
            if reasons:
                raise NotImplementedError(f"pc's attention backend does not support: {'; '.join(reasons)}")
            scales: dict[str, torch.Tensor] = {}
            keys = self.pool.get_key_buffer(layer.layer_id)
            if keys.dtype == torch.float8_e4m3fn:
                for name in ("k_scale", "v_scale"):
                    given = getattr(layer, name)
                    given = torch.ones(1) if given is None else torch.as_tensor(given, dtype=torch.float32).reshape(-1)
                    scales[name] = given.to(keys.device)
            found = self._layers[layer] = self._kind(layer), scales
        return found

    def _draft_masks(self, spec_info: Any, query_len: int, seq_lens: torch.Tensor) -> torch.Tensor:
        """Return the masks of a batch's drafts in one form, whichever form SGLang used."""
        mask = spec_info.custom_mask
        ours = self.verify_mask is not None and mask is self.verify_mask.buffer
        of_all_keys = not ours and default_tree_mask_mode() is not TreeMaskMode.QLEN_ONLY
        return draft_masks(mask, query_len, seq_lens, of_all_keys)

    def _keep_masks(self, spec_info: Any, seq_lens: torch.Tensor) -> None:
        """Copy the masks to the buffer that a graph reads."""
        mask, held = spec_info.custom_mask, self.verify_mask
        if mask is None or held is None or mask is held.buffer or mask.numel() == 0:
            return
        masks = self._draft_masks(spec_info, spec_info.draft_token_num, seq_lens)
        held.buffer[: masks.numel()].copy_(masks.reshape(-1))

    def _graph_step(self, batch: Any) -> AttentionStep:
        """Return the step whose memory the graph of this batch's size reads."""
        mode = batch.forward_mode
        if not (mode.is_decode_or_idle() or mode.is_target_verify()):
            raise NotImplementedError(f"forward_mode: got {mode.name} in a graph, needs DECODE or TARGET_VERIFY")
        _check_batch(batch)
        if mode.is_target_verify():
            drafts = batch.spec_info.custom_mask is not None
            return self.builder.graph_step(batch.batch_size, batch.spec_info.draft_token_num, drafts)
        return self.builder.graph_step(batch.batch_size, 1, False)


def _check_batch(batch: Any) -> None:
    """Raise NotImplementedError for a batch of a kind that is not supported."""
    mode = batch.forward_mode
    if getattr(batch, "encoder_lens", None) is not None:
        raise NotImplementedError("encoder_lens: encoder-decoder models are not supported by pc's attention backend")
    if mode.is_dllm_extend():
        raise NotImplementedError("forward_mode: DLLM_EXTEND is not supported by pc's attention backend")
    drafting = mode.is_decode() and getattr(batch.spec_info, "kv_indices", None) is not None
    if drafting or mode.is_draft_extend_v2():
        needs = "another --speculative-draft-attention-backend"
        raise NotImplementedError(f"forward_mode: got {mode.name} of a draft model, needs {needs}")


def _refusals(runner: Any) -> list[str]:
    """Return the properties of an engine that are not supported."""
    config, parallel, reasons = runner.model_config, get_parallel(), []
    if runner.use_mla_backend:
        reasons.append("multi-head latent attention")
    if config.is_encoder_decoder:
        reasons.append("encoder-decoder models")
    if config.is_multimodal and hasattr(getattr(runner, "model", None), "prepare_attn_masks"):
        reasons.append("images whose tokens attend to each other (start the engine without --enable-multimodal)")
    if not 1 <= config.head_dim <= MAX_HEAD_DIM:
        reasons.append(f"head_dim {config.head_dim} (1 to {MAX_HEAD_DIM})")
    if runner.kv_cache_dtype not in CACHE_DTYPES:
        reasons.append(f"kv_cache_dtype {str(runner.kv_cache_dtype).removeprefix('torch.')}")
    if getattr(config, "attention_chunk_size", None) is not None:
        reasons.append("attention in local chunks (attention_chunk_size)")
    if parallel.attn_dcp_size > 1 or parallel.attn_cp_size > 1:
        reasons.append("context parallelism")
    if getattr(runner.token_to_kv_pool, "swa_req_ring_size", None) is not None:
        reasons.append("a ring of slots for each request's window")
    translator = getattr(runner, "kv_index_translator", None)
    if translator is not None and translator.is_translating:
        reasons.append("the unified memory pool, whose slots are translated")
    return reasons


def _layer_refusals(layer: Any) -> list[str]:
    """Return the properties of a layer that are not supported."""
    reasons = []
    if layer.is_cross_attention:
        reasons.append("cross attention")
    if layer.attn_type is not AttentionType.DECODER:
        reasons.append(f"attention type {layer.attn_type.value}")
    if layer.use_irope:
        reasons.append("attention in local chunks (use_irope)")
    if layer.pos_encoding_mode != "NONE":
        reasons.append(f"pos_encoding_mode {layer.pos_encoding_mode}")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        reasons.append(f"logit capping by {layer.logit_capping_method}")
    if layer.xai_temperature_len > 0:
        reasons.append("temperatures that follow the length (xai_temperature_len)")
    return reasons
