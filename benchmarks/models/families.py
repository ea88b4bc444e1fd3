"""Every language model class of transformers, built small and run: whether prefix caching serves it, and if not why.

A row is written for each class and version of transformers. The command exits with 1 if the tokens of a class differ.
"""

from __future__ import annotations

import argparse
import logging
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..harness.experiment import Experiment, option

VOCABULARY = 311
SIZES: list[tuple[str, int]] = [
    (r"vocab_size|n_vocab|vocabulary_size", VOCABULARY),
    (r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|seq_length|context_length)", 512),
    (r"(num_hidden_layers|n_layers?|num_layers|decoder_layers|depth)", 4),
    (r"(num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num|num_attention_groups)", 2),
    (r"(num_attention_heads|n_heads?|num_heads|(de|en)coder_attention_heads|attention_heads)", 4),
    (r"(head_dim|d_kv|attention_head_size|global_head_dim|kv_channels|swa_head_dim)", 16),
    (r"((out_)?hidden_size|d_model|n_embd|embed_dim|embedding_size|model_dim|word_embed_proj_dim|rotary_dim_base)", 64),
    (r"(moe_intermediate_size|shared_expert_intermediate_size|expert_ffn_hidden_size|moe_shared_.*size)", 32),
    (
        r"(intermediate_size|ffn_dim|n_inner|ffn_hidden_size|d_ff|decoder_ffn_dim|dense_intermediate_size|.*_ffn_.*size)",
        96,
    ),
    (r"(num_local_experts|num_experts|n_routed_experts|moe_num_experts|num_expert)", 4),
    (r"(num_experts_per_tok|num_experts_per_token|moe_topk|moe_k|top_k_experts|num_activated_experts)", 2),
    (r"(n_group|topk_group|num_expert_group|limited_topk|n_shared_experts|num_shared_experts)", 1),
    (r"(kv_lora_rank|q_lora_rank|qk_nope_head_dim|v_head_dim|lora_rank.*|qk_head_dim)", 16),
    (r"(qk_rope_head_dim|rotary_dim)", 8),
    (r"(sliding_window|sliding_window_size|attention_chunk_size|window_size|attention_window|local_window)", 20),
    (r"(mamba_n_heads|mamba_num_heads)", 8),
    (r"(linear_num_value_heads)", 4),
    (r"(linear_num_key_heads|mamba_n_groups|n_groups)", 2),
    (
        r"(linear_key_head_dim|linear_value_head_dim|mamba_d_head|mamba_head_dim|mamba_d_state|state_size|ssm_state_size)",
        16,
    ),
    (r"(hidden_size_per_layer_input|altup_.*dim|laurel_rank)", 16),
    (r"(vocab_size_per_layer_input)", VOCABULARY),
    (r"(first_k_dense_replace|moe_layer_start_index|num_dense_layers)", 1),
]
"""Sizes of integers in a small config, by name."""
MOST = 26_000_000
"""Parameters of a model that counts as small."""
_SHARED_LAYERS: dict[str, Any] = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
FITTING: list[dict[str, Any]] = [
    {"head_dim": 8, "qk_rope_head_dim": 8},
    {"attn_layer_indices": [1, 3]},
    {"attn_layer_period": 2, "attn_layer_offset": 1},
    {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    {"num_heads": 8, "head_dim": 16, "state_size": 16},
    {"layer_types": ["conv", "full_attention"] * 2},
    {"layer_types": ["mamba", "attention"] * 2},
    {"qk_head_dim": 24, "head_dim": 8},
    _SHARED_LAYERS,
    _SHARED_LAYERS | {"activation_sparsity_pattern": [0.0] * 4},
]
"""Further settings that some configs need."""
SECTIONS = ([2, 3, 3], [1, 1, 2], [3, 3, 2])
"""Rotary frequencies of each axis, where a model's own are those of wider heads."""
OPTIONS: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}
"""Options of generate; some configs switch the cache off."""
OUTCOMES = ("served", "different", "falls back", "not built")


def result(name: str, outcome: str, reused: int = 0, why: str = "", warned: int = 0) -> dict[str, Any]:
    """Return the row of a class.

    Args:
        name: The class.
        outcome: One of `OUTCOMES`.
        reused: Tokens of a prompt of 70 that its second call reuses.
        why: The reason if the class was not served or not built.
        warned: Warnings that calls give with the cache and not without, each counted once.
    """
    same = {"served": "True", "falls back": "True", "different": "False"}.get(outcome, "")
    row = {"class": name, "outcome": outcome, "same_tokens": same, "reused": reused, "warnings": warned}
    return row | {"why": why}


def classes() -> list[str]:
    """Return the names of the classes that generate text from a prompt, with or without images."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    names = dict.fromkeys((*_causal(), *_named(auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)))
    known = {*dir(transformers)}  # to ask for a class by name would import it
    return [name for name in names if name in known]


def _causal() -> list[str]:
    from transformers.models.auto import modeling_auto as auto

    return _named(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _named(mapping: Any) -> list[str]:
    return [n for value in mapping.values() for n in (value if isinstance(value, list | tuple) else [value])]


def shrink(config: Any, seen: int = 0) -> dict[str, Any]:
    """Return keyword arguments that make a config of the same class small, with its sub-configs."""
    small: dict[str, Any] = {}
    for name, value in vars(config).items():
        if hasattr(value, "to_dict") and seen < 3:
            small[name] = {"model_type": value.model_type, **shrink(value, seen + 1)}
        elif type(value) is int:
            for pattern, size in SIZES:
                if re.fullmatch(pattern, name):
                    small[name] = min(size, value) if value > 0 else value
                    break
    if hasattr(config, "kv_lora_rank"):
        small["num_key_value_heads"] = 4
    small |= {n: None for n in ("pad_token_id",) if hasattr(config, n)}
    ids = [n for n in vars(config) if n.endswith("token_id") and isinstance(getattr(config, n), int)]
    small |= {name: 2 + i for i, name in enumerate(ids)}
    return small


def build(name: str) -> Any:
    """Return a model of the class with few small layers.

    Raises:
        Exception: No config gives a model that runs; the exception is that of the first config.
    """
    import torch
    import transformers

    cls = getattr(transformers, name)
    default = cls.config_class()
    first: Exception | None = None
    for extra in _variants(default):
        try:
            config = cls.config_class(**shrink(default) | extra)
            if name in _causal() and hasattr(config, "is_decoder"):
                config.is_decoder = True
            with torch.device("meta"):
                count = sum(p.numel() for p in cls(config).parameters())
            if count > MOST:
                raise ValueError(f"{count / 1e6:.0f} M parameters after shrinking")
            torch.manual_seed(0)
            model = cls(config).eval()
            model.generate(torch.full((1, 9), 20), max_new_tokens=2, **OPTIONS)
        except Exception as error:  # noqa: PERF203
            first = first or error
        else:
            return model
    assert first is not None
    raise first


def scatter(model: Any, embedding: float, weight: float) -> None:
    """Give a model random weights with these spreads."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            torch.nn.init.constant_(parameter, -4.0)  # states forget within a few tokens otherwise
        elif parameter.dim() >= 2:
            scale = embedding if "emb" in name or "wte" in name else weight * parameter[0].numel() ** -0.5
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def _variants(default: Any) -> Iterator[dict[str, Any]]:
    """Yield what a shrunk config may also need: lists with one entry per layer, and sizes that fit each other."""
    yield {}
    layers = getattr(default, "layer_types", None)
    if layers:
        kinds = list(dict.fromkeys(layers))
        yield {"layer_types": (kinds * 4)[:4]}
    yield {"num_hidden_layers": getattr(default, "num_hidden_layers", 4)}
    yield {n: size for n, v in vars(default).items() if v is None for p, size in SIZES if re.fullmatch(p, n)}
    yield from (extra for extra in FITTING if all(hasattr(default, n) for n in extra))
    text: Any = getattr(default, "text_config", None)
    if hasattr(text, "to_dict"):
        rope = getattr(text, "rope_parameters", None) or {}
        extras = [*_variants(text), *({"rope_parameters": rope | {"mrope_section": s}} for s in SECTIONS)]
        yield from ({"text_config": {"model_type": text.model_type, **shrink(text, 1), **extra}} for extra in extras)


def run_class(name: str) -> dict[str, Any]:
    """Build one class and compare its tokens with and without the cache."""
    import torch

    from pc.integrations.huggingface import enable_prefix_caching

    try:
        model = build(name)
        ids = torch.randint(20, VOCABULARY - 10, (1, 70), generator=torch.Generator().manual_seed(1))
        other = ids.clone()
        other[0, 60] += 1
        options = {"max_new_tokens": 12, **OPTIONS}
        mask = torch.ones(2, 70, dtype=torch.long)
        mask[1, :33] = 0
        batch = torch.cat([ids, ids.roll(33, 1)])
        batch[1, :33] = 0
        calls = [{"input_ids": ids}, {"input_ids": other}, {"input_ids": batch, "attention_mask": mask}]
        for spread in ((1.0, 1.4), (0.1, 2.0), (0.02, 3.0), (0.3, 5.0), (10.0, 3.0)):
            scatter(model, *spread)
            with noted() as plain:
                want = [model.generate(**call, **options) for call in calls]
            counts = not torch.equal(want[0][:, 70:], want[1][:, 70:])
            if counts:
                break
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        return result(name, "not built", why=f"{type(error).__name__}: {text[0]}")
    if not counts:
        return result(name, "not built", why="a token of the prompt does not change what follows")
    reused = 0
    with noted() as cached:
        handle = enable_prefix_caching(model, num_blocks=64)
        for _ in range(2):
            for call, expected in zip(calls, want, strict=True):
                got = model.generate(**call, **options)
                if call is calls[0] and handle.last_requests:
                    reused = handle.last_requests[0].cached_tokens
                if not torch.equal(got, expected):
                    return result(name, "different", reused)
    stats, more = handle.stats(), len(cached - plain)
    if handle.unsupported or stats.calls_handed_back:
        why = handle.unsupported or ", ".join(stats.calls_handed_back)
        return result(name, "falls back", why=why, warned=more)
    return result(name, "served", reused, warned=more)


@contextmanager
def noted() -> Iterator[set[str]]:
    """Collect the warnings that users see meanwhile, and those that transformers logs."""
    from transformers.utils import logging as transformers_logging

    texts: set[str] = set()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.add(record.getMessage())  # type: ignore[method-assign]
    log, disabled = transformers_logging.get_logger(), logging.root.manager.disable
    others, log.handlers = log.handlers, [handler]
    logging.disable(logging.NOTSET)
    getattr(type(log), "warning_once").cache_clear()  # noqa: B009  it is put on the class by transformers
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield texts
    finally:
        texts |= {str(warning.message) for warning in caught}
        log.handlers = others
        logging.disable(disabled)


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each class; at the end, exit with 1 if the tokens of one differ.

    Raises:
        SystemExit: A name is unknown, before anything runs.
    """
    known = classes()
    if unknown := [name for name in given.names if name not in known]:
        raise SystemExit(f"CLASS: got {', '.join(unknown)}, needs classes of transformers that generate text")
    logging.disable(logging.WARNING)
    found: Counter[str] = Counter()
    for name in given.names or known:
        row = run_class(name)
        found[row["outcome"]] += 1
        yield row
    print(*(f"{found[outcome]} {outcome}" for outcome in OUTCOMES), sep="\n")
    if found["different"]:
        raise SystemExit(1)


main = Experiment(
    "families.csv",
    rows,
    {"names": option([], "such as LlamaForCausalLM; none: all", metavar="CLASS")},
    ("class", "transformers"),
    ("transformers",),
).main
