"""Tiny random models of text and images, and calls of them with one image in each sequence."""

from typing import Any

import torch
from small_configs import FAMILIES, HEADS, Small, rope
from small_models import build_small
from torch import Tensor, nn

IMAGE, START, END = 90, 91, 92  # token ids; those of videos and sound follow
PATCHES, FEATURES = 16, 4  # of an image; tokens into which these are merged

VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "depth": 2,
    "num_heads": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "image_size": 16,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
}
QWEN = {
    "image_token_id": IMAGE,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "video_token_id": 93,
}
GLM = {
    "image_token_id": IMAGE,
    "image_start_token_id": START,
    "image_end_token_id": END,
    "video_token_id": 93,
    "video_start_token_id": 94,
    "video_end_token_id": 95,
}


def whole(prefix: str, text: Small, fields: dict[str, Any], **vision: Any) -> Small:
    """A config of text and images, whose vision config has the same prefix."""
    parts = {"text_config": text, "vision_config": Small(f"{prefix}VisionConfig", fields=vision)}
    return Small(f"{prefix}Config", f"{prefix}ForConditionalGeneration", fields, parts)


WHOLE: dict[str, Small] = {
    "ernie4_5_vl_moe": whole("Ernie4_5_VLMoe", FAMILIES["ernie4_5_vl_moe"], GLM, **VISION),
    "gemma4": whole(
        "Gemma4",
        Small(
            "Gemma4TextConfig",
            fields=FAMILIES["gemma4"].fields | {"use_bidirectional_attention": "vision"},
        ),
        {
            "image_token_id": IMAGE,
            "boi_token_id": START,
            "eoi_token_id": END,
            "video_token_id": 93,
            "audio_token_id": 94,
            "boa_token_id": 95,
        },
        **HEADS,
    ),
    "glm4v_moe": whole("Glm4vMoe", FAMILIES["glm4v_moe"], GLM, **VISION),
    "llama4": whole(
        "Llama4",
        FAMILIES["llama4"],
        {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END},
        **VISION
        | {
            "intermediate_size": 128,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
    ),
    "qwen3_5_moe": whole("Qwen3_5Moe", FAMILIES["qwen3_5_moe"], QWEN, **VISION),
    "qwen3_vl_moe": whole(
        "Qwen3VLMoe", Small("Qwen3VLMoeTextConfig", fields=rope(2, 1, 1)), QWEN, **VISION
    ),
    "qwen4_exp": whole("Qwen4Exp", FAMILIES["qwen4_exp"], QWEN, **VISION),
}


def build_whole(name: str) -> nn.Module:
    return build_small(WHOLE[name])


def call_with_images(name: str, batch: int = 2, length: int = 16) -> dict[str, Tensor]:
    """Arguments of a call: each sequence has one image, at tokens 3 to 6."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 80, (batch, length), generator=generator)
    ids[:, 2], ids[:, 3 : 3 + FEATURES], ids[:, 3 + FEATURES] = START, IMAGE, END
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    kinds = (ids == IMAGE).long()
    if name == "llama4":
        return call | {"pixel_values": torch.randn(batch, 3, 16, 16, generator=generator)}
    if name == "gemma4":  # it merges 3 x 3 patches of 16 x 16 pixels
        rows, columns = torch.meshgrid(torch.arange(6), torch.arange(6), indexing="ij")
        place = torch.stack([rows, columns], -1).view(1, 36, 2).expand(batch, -1, -1)
        pixels = torch.rand(batch, 36, 3 * 16 * 16, generator=generator)
        return call | {
            "pixel_values": pixels,
            "image_position_ids": place,
            "mm_token_type_ids": kinds,
        }
    pixels = torch.randn(batch * PATCHES, 3 * 4 * 4, generator=generator)
    grid = torch.tensor([[1, 4, 4]] * batch)
    call |= {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": kinds}
    return call | ({"moe_mm_token_type_ids": kinds} if name == "ernie4_5_vl_moe" else {})
