"""Small models whose answers change with every token of a prompt, and their answers with and without batching."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from generate_cases import BY_NAME, VOCAB, Family
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from pc.integrations.huggingface import ContinuousBatching

_join = ContinuousBatchingManager.join


@functools.wraps(_join)
def _join_at_once(manager: Any, *args: Any, **kwargs: Any) -> None:
    """Wake the loop of a manager that ends. Without requests, the loop sleeps 0.1 s before it sees the end."""
    if hasattr(manager, "_wake_up_loop"):
        manager._wake_up_loop.set()
    _join(manager, *args, **kwargs)


ContinuousBatchingManager.join = _join_at_once
ALTERNATING = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Sharp:
    """A model family whose weights are scaled until each token of a prompt changes the answer.

    Attributes:
        family: The family.
        factor: The factor by which weight matrices are scaled.
        only: Matrices whose names contain one of these strings are scaled. If empty, all are.
    """

    family: Family
    factor: float
    only: tuple[str, ...] = ()

    def build(self) -> Any:
        model = self.family.build()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                wanted = not self.only or any(part in name for part in self.only)
                if weight.dim() > 1 and wanted and "embed" not in name and "lm_head" not in name:
                    weight.mul_(self.factor)
        return model


VALUES = ("v_proj", "o_proj")
LLAMA = Sharp(BY_NAME["llama"], 4)
WINDOW = Sharp(
    Family("mistral-window", "MistralConfig", "MistralForCausalLM", {"sliding_window": 24, "num_hidden_layers": 3}),
    20,
    VALUES,
)
GEMMA3 = Sharp(
    Family(
        "gemma3-mixed",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "sliding_window": 24,
            "num_hidden_layers": 4,
            "layer_types": ALTERNATING * 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
        },
    ),
    4,
)
GEMMA2 = Sharp(
    Family(
        "gemma2",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"sliding_window": 20, "num_hidden_layers": 4, "head_dim": 16, "query_pre_attn_scalar": 16},
    ),
    4,
)
SHARP = [LLAMA, Sharp(BY_NAME["qwen3"], 4), WINDOW, GEMMA2, GEMMA3, Sharp(BY_NAME["gpt-oss"], 20, VALUES)]


def tokens(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = torch.randint(8, VOCAB, (length,), generator=generator).tolist()
    return drawn


def config(new: int = 8, **options: Any) -> Any:
    return GenerationConfig(
        **{"max_new_tokens": new, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0} | options
    )


def alone(model: Any, prompts: Sequence[list[int]], new: int = 8, **options: Any) -> list[list[int]]:
    """Return the answers of the model's own generate, which gets each prompt in its own call."""
    settings = {"do_sample": False, "eos_token_id": None, "max_new_tokens": new} | options
    rows = [torch.tensor([prompt]) for prompt in prompts]
    # Without a mask, generate would treat tokens equal to the padding token as padding.
    answers = [type(model).generate(model, r, attention_mask=torch.ones_like(r), **settings) for r in rows]
    return [answer[0, row.shape[1] :].tolist() for answer, row in zip(answers, rows, strict=True)]


def batched(model: Any, prompts: Sequence[list[int]], new: int = 8, **options: Any) -> list[list[int]]:
    """Return the answers of generate_batch, and check that no request failed."""
    generation = options.pop("generation_config", None) or config(new)
    settings = ContinuousBatchingConfig(**options)
    outputs = model.generate_batch(list(prompts), generation_config=generation, continuous_batching_config=settings)
    assert [output.error for output in outputs.values()] == [None] * len(outputs)
    return [output.generated_tokens for output in outputs.values()]


def assert_nothing_held(batching: ContinuousBatching) -> None:
    batching.manager.check()
    stats = batching.stats()
    assert (stats.held_blocks, stats.num_requests) == (0, 0)
