"""Tiny models for engines, saved to disk. Their answers change with any token of the prompt."""

from __future__ import annotations

from pathlib import Path

import torch

SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.12,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = 40
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "q_lora_rank": None, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "n_shared_experts": 1, "first_k_dense_replace": 2, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "llama": ("LlamaConfig", {"head_dim": 32}),
    "llama64": ("LlamaConfig", {"head_dim": 64}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    # One layer, so KV depends only on token and position.
    "llama_flat": (
        "LlamaConfig",
        {
            "head_dim": 32,
            "num_hidden_layers": 1,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "gptj_flat": ("GPTJConfig", {"num_hidden_layers": 1, "rotary_dim": 16}),
    "mistral": ("MistralConfig", {"head_dim": 32, "sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 32,
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 20.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "num_hidden_layers": 6,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 32,
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": False,
        },
    ),
    # Latent rows of 512 and 64 columns, as vLLM's own kernel for CPUs needs.
    "deepseek_v2": ("DeepseekV2Config", {**LATENT, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3Config", {**LATENT, "q_lora_rank": 64, "topk_group": 1, "n_group": 1}),
    "gpt2": ("GPT2Config", {"n_layer": 2, "n_head": 4, "n_embd": 128, "n_positions": 512}),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_expand": 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 256,
        },
    ),
}
"""By name, the configuration's class in transformers and the values that differ from `SIZES`."""


def save_model(name: str, folder: Path) -> str:
    """Save the model of this name under `folder`, unless it exists, and return its path."""
    import transformers

    path = folder / name
    if not (path / "config.json").exists():
        kind, options = MODELS[name]
        torch.manual_seed(0)
        config = getattr(transformers, kind)(**{**SIZES, **options})
        model = transformers.AutoModelForCausalLM.from_config(config).float()
        with torch.no_grad():
            for parameter, values in model.named_parameters():
                if "sinks" in parameter:
                    values.normal_()
                if kind.startswith("Gemma") and "embed_tokens" in parameter:
                    values.mul_(0.2)  # otherwise only the last token matters, since output weights are tied
        model.save_pretrained(path)
    return str(path)
