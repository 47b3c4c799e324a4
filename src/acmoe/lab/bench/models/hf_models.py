"""Transformers models with random weights, of the sizes that were published.

Only the number of layers is reduced, so that a training step in bfloat16 fits a GPU of 139 GiB.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from acmoe.errors import UserError
from acmoe.runtime import seeded


class HfModel(NamedTuple):
    """A model to measure: how to build its config, and the layers it has by default."""

    config: Callable[[int], Any]  # number of layers -> a transformers config
    layers: int  # by default
    published_layers: int


def _qwen3(layers: int) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=40960,
    )


def _olmoe(layers: int) -> Any:
    from transformers import OlmoeConfig

    return OlmoeConfig(
        vocab_size=50304,
        hidden_size=2048,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_experts=64,
        num_experts_per_tok=8,
        max_position_embeddings=4096,
    )


def _gpt_oss(layers: int) -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        sliding_window=128,
        num_local_experts=32,
        num_experts_per_tok=4,
    )


def _tiny(layers: int) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
    )


MODELS = {
    "qwen3-30b-a3b": HfModel(_qwen3, 8, 48),
    "olmoe-7b": HfModel(_olmoe, 16, 16),
    "gpt-oss-20b": HfModel(_gpt_oss, 8, 24),
    "tiny": HfModel(_tiny, 2, 2),
}


def build(name: str, layers: int | None, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the model with weights drawn from seed 0."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as missing:
        raise UserError(
            f"acmoe bench hf needs transformers ({missing}); pip install 'acmoe[hf]'"
        ) from None
    model = MODELS[name]
    config = model.config(model.layers if layers is None else layers)
    with seeded(0, device), torch.device(device):
        found = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return found.to(device)
