"""Small models of many families, prompts for them, and results of generate without and with the cache."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch.nn.modules.module import register_module_forward_pre_hook

from pc.integrations.huggingface import PrefixCaching, enable_prefix_caching

CACHE = "cache" if "cache" in vars(transformers.generation.GenerateDecoderOnlyOutput) else "past_key_values"
"""This transformers version's name of the cache, in arguments and results."""
VOCAB = 503
EOS = 7
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}


def cache_of(result: Any) -> Any:
    return getattr(result, CACHE)


def build_model(config: str, model: str, seed: int = 0, **options: Any) -> Any:
    """Return a small model of a class, with seeded random weights; `options` are fields of its config."""
    torch.manual_seed(seed)
    return getattr(transformers, model)(getattr(transformers, config)(**{**SMALL, **options})).eval()


@dataclass(frozen=True)
class Family:
    name: str
    config: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        return build_model(self.config, self.model, **self.options)


FAMILIES = [
    Family("llama", "LlamaConfig", "LlamaForCausalLM"),
    Family("llama-head-dim-80", "LlamaConfig", "LlamaForCausalLM", {"head_dim": 80}),
    Family("qwen2", "Qwen2Config", "Qwen2ForCausalLM"),
    Family("qwen3", "Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
    Family("mistral", "MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    Family("mistral-window", "MistralConfig", "MistralForCausalLM", {"sliding_window": 20}),
    Family("phi3", "Phi3Config", "Phi3ForCausalLM"),
    Family("olmo2", "Olmo2Config", "Olmo2ForCausalLM"),
    Family("granite", "GraniteConfig", "GraniteForCausalLM", {"attention_multiplier": 0.1, "logits_scaling": 4.0}),
    Family("gemma", "GemmaConfig", "GemmaForCausalLM", {"head_dim": 32}),
    Family("gpt-neox", "GPTNeoXConfig", "GPTNeoXForCausalLM"),
    Family("gpt2", "GPT2Config", "GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
    Family("mixtral", "MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4}),
    Family("gemma2", "Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 32, "sliding_window": 20}),
    Family("gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM", {"sliding_window": 9, "num_hidden_layers": 6}),
    Family(
        "cohere2",
        "Cohere2Config",
        "Cohere2ForCausalLM",
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    Family("glm4", "Glm4Config", "Glm4ForCausalLM", {"head_dim": 16}),
    Family("opt", "OPTConfig", "OPTForCausalLM", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    Family("mpt", "MptConfig", "MptForCausalLM", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}),
    Family("gpt-oss", "GptOssConfig", "GptOssForCausalLM", {"sliding_window": 24, "num_local_experts": 4}),
]
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
DEEPSEEK = Family("deepseek-v3", "DeepseekV3Config", "DeepseekV3ForCausalLM", LATENT)
INDEXER = {"index_topk": 128, "index_head_dim": 16, "index_n_heads": 4}
SPARSE = Family("deepseek-v3.2", "DeepseekV32Config", "DeepseekV32ForCausalLM", LATENT | INDEXER)
LLAMA = FAMILIES[0]
PAGED = [family for family in FAMILIES if family.name != "mpt"]
"""The families whose attention uses transformers' interface, which packed passes need."""
HYBRIDS = [
    Family(
        "qwen3-next",
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            "num_hidden_layers": 4, "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        },
    ),
    Family("lfm2", "Lfm2Config", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}),
    Family(
        "granite-4",
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1,
            "mamba_d_state": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 96,
        },
    ),
    Family(
        "mamba-2",
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    ),
    Family("mamba", "MambaConfig", "MambaForCausalLM", {"state_size": 8}),
    Family(
        "jamba",
        "JambaConfig",
        "JambaForCausalLM",
        {
            "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "num_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    Family(
        "inkling",
        "InklingTextConfig",
        "InklingForCausalLM",
        {
            "head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
            "sliding_window_size": 20, "d_rel": 8, "rel_extent": 32, "layer_types": ["hybrid_sliding", "hybrid"],
            "mlp_layer_types": ["dense", "sparse"], "moe_intermediate_size": 32, "n_routed_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
]  # fmt: skip


BY_NAME = {family.name: family for family in [*FAMILIES, DEEPSEEK, *HYBRIDS]}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "use_cache": ({"use_cache": False}, "use_cache=False asks for no cache"),
    "cache_implementation": (
        {"cache_implementation": "static"},
        "cache_implementation asks for another cache (static)",
    ),
    "a cache": ({CACHE: transformers.DynamicCache}, f"{CACHE} of your own"),
    "positions": (
        {"position_ids": torch.arange(5, 45)[None]},
        "position_ids differ from those that transformers derives from attention_mask",
    ),
    "mask": (
        {"attention_mask": torch.full((1, 40), 2)},  # transformers adds the values up to positions
        "attention_mask has values other than 0 and 1",
    ),
}
"""Arguments of calls that are not served, and the reasons; a class is made anew for each call."""


def refused(case: str) -> tuple[dict[str, Any], str]:
    options, reason = REFUSED[case]
    return {name: value() if isinstance(value, type) else value for name, value in options.items()}, reason


def first_quick(cases: Iterable[Any]) -> list[Any]:
    """Return the cases of a test, all but the first marked `slow`, so that `make test` runs only the first."""
    first, *others = cases
    return [first, *(pytest.param(case, marks=pytest.mark.slow) for case in others)]


def remembering(family: Family) -> Any:
    """Return a hybrid model with long memory; with random weights, its states would forget within a few tokens."""
    model = family.build()
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            torch.nn.init.constant_(weight, -4.0)
    return model


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(8, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


def left_padded(*prompts: torch.Tensor) -> dict[str, torch.Tensor]:
    width = max(p.shape[1] for p in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for line, keep, p in zip(ids, mask, prompts, strict=True):
        line[width - p.shape[1] :] = p
        keep[width - p.shape[1] :] = 1
    return {"input_ids": ids, "attention_mask": mask}


NEW_TOKENS = 12
"""Enough for an answer to prompts of 40 tokens to fill a block. Most of a test's time is a pass for each token."""


def plain(model: Any, **kwargs: Any) -> Any:
    """Call the model's own generate, whether or not caching is enabled."""
    return type(model).generate(model, **{"max_new_tokens": NEW_TOKENS, **kwargs})


def both(model: Any, seed: int = 0, **kwargs: Any) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    want = plain(model, **kwargs)
    torch.manual_seed(seed)
    return want, model.generate(**{"max_new_tokens": NEW_TOKENS, **kwargs})


def same_answers(model: Any, times: int, seed: int = 0, **kwargs: Any) -> Iterator[torch.Tensor]:
    """Make a call of generate `times` times, and yield each answer, which must be that of the model's own generate."""
    want, got = both(model, seed, **kwargs)
    for number in range(times):
        if number:
            torch.manual_seed(seed)
            got = model.generate(**{"max_new_tokens": NEW_TOKENS, **kwargs})
        assert torch.equal(want, got)
        yield got


def assert_same(model: Any, seed: int = 0, times: int = 1, **kwargs: Any) -> torch.Tensor:
    """Check a call made `times` times as `same_answers` does, and return the answer."""
    return list(same_answers(model, times, seed, **kwargs))[-1]


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[float, Callable[[], Any]], Any]]:
    """Yield a function that interrupts a call after some seconds.

    It returns None if the interrupt came within the call.
    """

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def attempt(seconds: float, call: Callable[[], Any]) -> Any:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            result = call()
            signal.setitimer(signal.ITIMER_REAL, 0)
            return result
        except KeyboardInterrupt:
            return None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield attempt
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def assert_nothing_held(handle: PrefixCaching) -> None:
    handle.manager.check()
    assert handle.stats().held_blocks == 0
    assert handle.stats().num_requests == 0


@contextlib.contextmanager
def enabled(model: Any, **options: Any) -> Iterator[PrefixCaching]:
    """Serve a model over a cache, and check at the end that no block is held."""
    with enable_prefix_caching(model, **options) as handle:
        yield handle
        assert_nothing_held(handle)


def cached(model: Any, handle: PrefixCaching, ids: torch.Tensor | None = None, **call: Any) -> int:
    """Check a call as `assert_same` does, and return how many tokens its first row read from the cache."""
    return cached_each(model, handle, ids, 1, **call)[0]


def cached_each(
    model: Any, handle: PrefixCaching, ids: torch.Tensor | None = None, times: int = 2, **call: Any
) -> list[int]:
    """Check a call made `times` times, and return how many tokens the first row of each read from the cache."""
    call = {"input_ids": prompt(40) if ids is None else ids, **call}
    return [handle.last_requests[0].cached_tokens for _ in same_answers(model, times, **call)]


@contextlib.contextmanager
def counting(model: Any) -> Iterator[list[int]]:
    """Yield a list that gets how many tokens pass through the model's embedding in each pass."""
    seen: list[int] = []
    embedding = model.get_input_embeddings()

    def count(module: Any, inputs: Any) -> None:
        if module is embedding:
            seen.append(inputs[0].numel())

    hook = register_module_forward_pre_hook(count)  # a hook of the model itself would empty the cache
    try:
        yield seen
    finally:
        hook.remove()


def count_computed(model: Any, **kwargs: Any) -> int:
    """Return how many tokens a call of generate computes."""
    with counting(model) as seen:
        model.generate(**kwargs)
    return sum(seen)
