"""Models that users change after caching was enabled, as in their reports, and calls that show the effect."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from generate_cases import build_model, plain, prompt

VECTOR = 2 * torch.randn(64, generator=torch.Generator().manual_seed(9))


def build(name: str = "Llama", **options: Any) -> Any:
    return build_model(f"{name}Config", f"{name}ForCausalLM", **{"eos_token_id": None, **options})


def steer(module: Any, inputs: Any, output: Any) -> Any:
    """A forward hook that adds a vector to a layer's output."""
    return output + VECTOR if isinstance(output, torch.Tensor) else (output[0] + VECTOR, *output[1:])


def steer_last(module: Any, inputs: Any, output: Any) -> Any:
    """A forward hook that adds a vector to the last token's output, if a pass has several tokens."""
    changed = (output if isinstance(output, torch.Tensor) else output[0]).clone()
    if changed.shape[1] > 1:
        changed[:, -1] += VECTOR
    return changed if isinstance(output, torch.Tensor) else (changed, *output[1:])


def _drop(model: Any) -> None:
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:3], 3


def _double(model: Any) -> None:
    layer = copy.deepcopy(model.model.layers[3])
    layer.self_attn.layer_idx = 4
    model.model.layers.append(layer)
    model.config.num_hidden_layers = 5


def _other_heads(model: Any) -> None:
    other = build(num_hidden_layers=4, num_key_value_heads=4)
    model.model, model.lm_head, model.config.num_key_value_heads = other.model, other.lm_head, 4


def _wider_heads(model: Any) -> None:
    other = build(num_hidden_layers=4, head_dim=32)
    model.model, model.lm_head, model.config.head_dim = other.model, other.lm_head, 32


def _window(size: int | None) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.config.sliding_window = size
        for layer in model.model.layers:
            layer.self_attn.sliding_window = size

    return change


def _patched(model: Any) -> None:
    layer = model.model.layers[0].mlp
    own = layer.forward
    layer.forward = lambda x: own(x) * (0.5 if x.shape[1] == 1 else 1.0)  # differs in decode steps


def _llama() -> Any:
    return build(num_hidden_layers=4)


def _mistral() -> Any:
    return build("Mistral", sliding_window=20)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "layer dropped": (_llama, _drop),
    "layer doubled": (_llama, _double),
    "other KV heads": (_llama, _other_heads),
    "wider heads": (_llama, _wider_heads),
    "window to none": (_mistral, _window(None)),
    "window widened": (_mistral, _window(40)),
    "window narrowed": (_mistral, _window(8)),
    "hook at the last token": (_llama, lambda model: model.model.layers[0].register_forward_hook(steer_last)),
    "forward of a module": (_llama, _patched),
    "half precision": (_llama, lambda model: model.to(torch.bfloat16)),
}
"""By name, a function that makes a model and one that changes it."""


def differing(model: Any, **options: Any) -> list[str]:
    """Return how calls with the cache differ from the model's own generate, for a prompt that is asked twice."""
    found = []
    options = {"max_new_tokens": 8, **options}
    prompts = prompt(60), torch.cat([prompt(60), prompt(7, 9)], 1)
    wanted = [plain(model, input_ids=ids, **options) for ids in prompts]
    for number in (0, 0, 1):
        ids, want = prompts[number], wanted[number]
        try:
            found += [] if torch.equal(model.generate(ids, **options), want) else ["other tokens"]
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found
