"""Questions about two drawn images, and the vision-language model that answers them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ._models import train_tokenizer

SIZE = 224
"""Height and width of an image, pixels."""
PATCH = 14
TOKENS = 256
"""Number of tokens of an image in the small model's prompt: one for each patch."""

IMAGES = ("sunrise", "target")
QUESTIONS = (
    "What is in the picture?",
    "Which colours does it have?",
    "What stands in the middle of it?",
    "Give it a title.",
)

TEXT = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
"""Config of the small model's text layers. With `TOWER`, the vision layers, it has about 33 million parameters."""

TOWER = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "image_size": SIZE,
    "patch_size": PATCH,
}

Encode = Callable[[torch.Tensor, str], Mapping[str, torch.Tensor]]
"""A function from an image and a question about it to arguments of `generate`."""


def draw(name: str) -> torch.Tensor:
    """Draw the image of that name; return it as `[3, SIZE, SIZE]`, float32 from 0 to 1."""
    at = torch.linspace(-1, 1, SIZE)
    y, x = at[:, None].expand(SIZE, SIZE), at.expand(SIZE, SIZE)
    if name == "sunrise":
        sun, ground = (x**2 + (y - 0.2) ** 2 < 0.16) & (y < 0.4), y >= 0.4
        sky = torch.stack((0.9 - 0.2 * y, 0.6 + 0.3 * y, 0.5 - 0.4 * y))
        sky[:, ground] = torch.tensor([0.1, 0.35, 0.15])[:, None]
        sky[:, sun] = torch.tensor([1.0, 0.9, 0.4])[:, None]
        return sky.clamp(0, 1)
    rings = (((x**2 + y**2).sqrt() * 5).long() % 2).float()
    return torch.stack((torch.ones_like(rings), rings, rings))


def image_prompts(encode: Encode) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
    """Yield each question with its prompt: all questions about the first image, then about the second."""
    for name in IMAGES:
        image = draw(name)
        for question in QUESTIONS:
            yield question, encode(image, question)


def load_seeing_model(name: str | None, device: torch.device, dtype: torch.dtype, text: str) -> tuple[Any, Any, Encode]:
    """Return a vision-language model, its tokenizer and a function that makes prompts.

    Args:
        name: Hub id or path. None: a small model with random weights.
        device: Device of the model and of prompts.
        dtype: Dtype of the weights.
        text: Text to train the small model's tokenizer on.
    """
    if name is not None:
        return _load(name, device, dtype)
    tokenizer = train_tokenizer(text)
    return build_model(len(tokenizer)).to(device, dtype).eval(), tokenizer, _encoder(tokenizer, device, dtype)


def _load(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any, Encode]:
    """Return a model of the hub, its tokenizer and a function that makes prompts with its processor."""
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(name)
    model = AutoModelForImageTextToText.from_pretrained(name, dtype=dtype).to(device).eval()

    def encode(pixels: torch.Tensor, question: str) -> Mapping[str, torch.Tensor]:
        image = Image.fromarray((pixels.permute(1, 2, 0) * 255).round().byte().numpy())
        content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
        chat = [{"role": "user", "content": content}]
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        found: Any = processor.apply_chat_template(chat, add_generation_prompt=True, **options)
        return dict(found.to(device, dtype=dtype))  # the dtype applies to floating-point tensors only

    return model, processor.tokenizer, encode


def _encoder(tokenizer: Any, device: torch.device, dtype: torch.dtype) -> Encode:
    """Return a function that makes prompts for the small model."""
    begin, end, image = range(len(tokenizer), len(tokenizer) + 3)

    def encode(pixels: torch.Tensor, question: str) -> Mapping[str, torch.Tensor]:
        before = tokenizer.encode("You are shown a picture and answer a question about it.\n\nUser: ")
        behind = tokenizer.encode(f"\n\n{question}\n\nAssistant: ")
        ids = torch.tensor([[*before, begin, *[image] * TOKENS, end, *behind]], device=device)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "token_type_ids": (ids == image).long(),
            "pixel_values": (pixels * 2 - 1)[None].to(device, dtype),
        }

    return encode


def build_model(vocab_size: int) -> Any:
    """Return a small Gemma-3 with random, seeded weights. Three tokens for images follow the vocabulary."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config = Gemma3Config(
        text_config=TEXT | {"vocab_size": vocab_size + 3},
        vision_config=TOWER,
        mm_tokens_per_image=TOKENS,
        boi_token_index=vocab_size,
        eoi_token_index=vocab_size + 1,
        image_token_index=vocab_size + 2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Gemma3ForConditionalGeneration(config)
        # The projection is initialized with zeros, which would make all images look the same.
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.05)
        return model
