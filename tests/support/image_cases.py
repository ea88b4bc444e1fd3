"""Small models that read images, prompts with images for them, and a counter of their vision towers' runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch.nn.modules.module import register_module_forward_pre_hook

from pc.integrations.tested import release

IMAGE = 290
TEXT = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 7,
}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}


def _gemma() -> Any:
    text = TEXT | {
        "num_hidden_layers": 4,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    ids = {"image_token_index": IMAGE, "boi_token_index": 291, "eoi_token_index": 292}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=TOWER | {"image_size": 32}, mm_tokens_per_image=16, **ids
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _llava() -> Any:
    tower = TOWER | {"model_type": "clip_vision_model", "num_hidden_layers": 3, "image_size": 16, "projection_dim": 32}
    config = transformers.LlavaConfig(
        text_config=TEXT | {"model_type": "llama"}, vision_config=tower, image_token_index=IMAGE
    )
    return transformers.LlavaForConditionalGeneration(config)


def _paligemma() -> Any:
    text = TEXT | {"model_type": "gemma2", "num_hidden_layers": 3}
    tower = TOWER | {"model_type": "siglip_vision_model", "image_size": 16}
    config = transformers.PaliGemmaConfig(
        text_config=text, vision_config=tower, image_token_index=IMAGE, projection_dim=64
    )
    return transformers.PaliGemmaForConditionalGeneration(config)


def _step() -> Any:
    text = TEXT | {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "share_expert_dim": 32}
    text |= {"num_sliding_attention_heads": 4, "layer_types": ["full_attention"] * 2, "sliding_window": 20}
    tower = TOWER | {"image_size": 64}
    config = transformers.Step3p7Config(text_config=text, vision_config=tower, image_token_id=IMAGE)
    return transformers.Step3p7ForConditionalGeneration(config)


def _granite() -> Any:
    tower = TOWER | {"model_type": "siglip_vision_model", "hidden_size": 64, "image_size": 16}
    config = transformers.Granite4VisionConfig(
        text_config=TEXT, vision_config=tower, image_token_index=IMAGE, image_grid_pinpoints=[[32, 16]],
        vision_feature_select_strategy="full", downsample_rate="2/4", projector_dropout=0.0,
        deepstack_layer_map=[[0, 0], [1, 1]], spatial_target_layers=[1] * 4,
    )  # fmt: skip
    return transformers.Granite4VisionForConditionalGeneration(config)


def _idefics() -> Any:
    text = TEXT | {"model_type": "llama"}
    config = transformers.Idefics3Config(
        text_config=text, vision_config=TOWER | {"image_size": 16}, image_token_id=IMAGE, scale_factor=1
    )
    return transformers.Idefics3ForConditionalGeneration(config)


def _qwen(name: str, **text: Any) -> Any:
    tower = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
        "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "fullatt_block_indexes": [1],
        "window_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 64,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = getattr(transformers, f"{name}Config")(
        vision_config=tower,
        text_config=TEXT | {"rope_parameters": rope} | text,
        image_token_id=IMAGE,
        video_token_id=291,
        vision_start_token_id=292,
        vision_end_token_id=293,
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def _glm() -> Any:
    tower = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
        "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "image_size": 16,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0}
    config = transformers.Glm4vConfig(
        vision_config=tower, text_config=TEXT | {"rope_parameters": rope}, image_token_id=IMAGE, video_token_id=291
    )
    return transformers.Glm4vForConditionalGeneration(config)


DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip


@dataclass(frozen=True)
class VisionCase:
    name: str
    make: Callable[[], Any]
    size: int = 0
    """Height and width of an image. 0: it consists of patches of a grid."""
    types: str | None = None
    spread: tuple[float, float] = (0.05, 2.0)
    """The spread of the weights of embeddings and of all others; large enough that images change the tokens."""
    oldest: tuple[int, int] = (5, 5)
    """The first release of transformers with which prompts with images are served."""
    tiles: int = 0
    """The number of tiles of an image, which are equal here. 0: an image has no tiles."""

    def build(self) -> Any:
        if release(transformers.__version__)[:2] < self.oldest:
            pytest.skip(f"images of {self.name} need transformers {self.oldest}")
        torch.manual_seed(0)
        model = self.make().eval()
        generator = torch.Generator().manual_seed(0)
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                torch.nn.init.constant_(weight, -4.0)  # otherwise states forget within a few tokens
            elif weight.dim() >= 2:
                embedding, other = self.spread
                scale = embedding if "embed_tokens" in name else other * weight[0].numel() ** -0.5
                weight.data.copy_(torch.randn(weight.shape, generator=generator) * scale)
        return model

    def call(self, *rows: list[torch.Tensor | int]) -> dict[str, Any]:
        """Return generate's arguments for rows of text and of images, where a number means an image."""
        lines, images = [], []
        for row in rows:
            parts = []
            for part in row:
                if isinstance(part, int):
                    images.append(self.image(part))
                    parts.append(torch.full((6 if not self.size else 16,), IMAGE))
                else:
                    parts.append(part)
            lines.append(torch.cat(parts))
        ids = torch.zeros(len(lines), max(map(len, lines)), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for line, keep, own in zip(ids, mask, lines, strict=True):
            line[ids.shape[1] - len(own) :] = own
            keep[ids.shape[1] - len(own) :] = 1
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self.types is not None:
            inputs[self.types] = (ids == IMAGE).int()
        if images:
            inputs["pixel_values"] = torch.cat(images)
            if not self.size:
                inputs["image_grid_thw"] = torch.tensor([[1, 4, 6]] * len(images))
            if self.tiles:
                inputs["pixel_values"] = inputs["pixel_values"][:, None].repeat(1, self.tiles, 1, 1, 1)
                inputs["image_sizes"] = torch.tensor([[32, 16]] * len(images))
        return inputs

    def image(self, number: int) -> torch.Tensor:
        """Return an image `[1, 3, size, size]`, or the patches of a grid of 4 by 6, `[24, 96]`."""
        shape = (1, 3, self.size, self.size) if self.size else (24, 3 * 2 * 4 * 4)
        return torch.randn(shape, generator=torch.Generator().manual_seed(number))


GEMMA = (5, 23)  # earlier releases compute other values for images behind a cached prefix

CASES = [
    VisionCase("gemma3", _gemma, 32, "token_type_ids", (0.02, 3.0), oldest=GEMMA),
    VisionCase("llava", _llava, 16),
    VisionCase("qwen2.5-vl", lambda: _qwen("Qwen2_5_VL"), 0, "mm_token_type_ids"),
    VisionCase("qwen3-vl", lambda: _qwen("Qwen3VL"), 0, "mm_token_type_ids"),
    VisionCase("qwen3.5", lambda: _qwen("Qwen3_5", **DELTA), 0, "mm_token_type_ids"),
    VisionCase("granite4-vision", _granite, 16, oldest=(5, 24), tiles=3),
]

PALIGEMMA = VisionCase("paligemma2", _paligemma, 16, "token_type_ids", oldest=GEMMA)
STEP = VisionCase("step3p7", _step, 64, oldest=(5, 24))
IDEFICS = VisionCase("idefics3", _idefics, 16, oldest=GEMMA)
GLM = VisionCase("glm4v", _glm, 0, "mm_token_type_ids")


def text(length: int, seed: int) -> torch.Tensor:
    return torch.randint(10, 280, (length,), generator=torch.Generator().manual_seed(100 + seed))


class TowerRuns:
    """Counts the forward passes of a model's vision tower, within a `with` block."""

    def __init__(self, model: Any) -> None:
        base = model.base_model
        self._tower = getattr(base, "visual", None) or base.vision_tower
        self.count = 0

    def __enter__(self) -> TowerRuns:
        def hook(module: Any, inputs: Any) -> None:
            self.count += module is self._tower

        self._hook = register_module_forward_pre_hook(hook)  # a hook of the model itself would empty the cache
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._hook.remove()
