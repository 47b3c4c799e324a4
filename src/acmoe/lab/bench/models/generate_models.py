"""The models that `acmoe bench generate` measures, with random weights.

`olmoe` is a model of ours of OLMoE's size and with its kind of experts; the other is OLMoE's own
model from transformers. Running statistics are those of one random batch.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from acmoe.config.routing import SMoEConfig
from acmoe.config.text.language import LanguageConfig, language_router
from acmoe.experts.mlp import ExpertMLP
from acmoe.experts.moe import MoE
from acmoe.models.registry import build_model, model_card
from acmoe.models.text.decoder import LanguageModel
from acmoe.routing.statistics.step import fold_statistics
from acmoe.runtime import seeded

OLMOE = LanguageConfig(
    vocab_size=50_304,
    dim=2048,
    heads=16,
    hidden=1024,
    repeats=16,
    span=4096,
    block=4096,
    dropout=0.0,
    num_experts=64,
    top_k=8,
    router=SMoEConfig(),
    norm="pre",
    position="rope",
)

_MEASURED = (8, 128)  # sequences and tokens of the batch whose statistics a router reads


def model_config(name: str) -> Any:
    """Return the config of `olmoe`, or of a model that `acmoe models` lists."""
    return OLMOE if name == "olmoe" else model_card(name).config


def build_ours(
    name: str, router: str, *, dtype: torch.dtype, seed: int, device: torch.device
) -> LanguageModel:
    """Return the model in evaluation mode; its running statistics are those of one batch."""
    made = model_config(name)
    assert isinstance(made, LanguageConfig)
    made = replace(made, router=language_router(router, made))
    with seeded(seed, device), device:
        model = build_model(made)
        if name == "olmoe":
            _gate(model, made)
        drawn = torch.randint(made.vocab_size, _MEASURED)
    assert isinstance(model, LanguageModel)
    model.to(device=device, dtype=dtype).train()
    with torch.no_grad():
        model(drawn)
    fold_statistics(model)
    return model.eval()


def _gate(model: nn.Module, config: LanguageConfig) -> None:
    """Put OLMoE's experts into every MoE layer: SwiGLU without biases."""
    for module in model.modules():
        if isinstance(module, MoE):
            module.experts = ExpertMLP(
                dim=config.dim,
                hidden=config.hidden,
                num_experts=config.num_experts,
                activation="swiglu",
                bias=False,
            )


def build_transformers(*, dtype: torch.dtype, seed: int, device: torch.device) -> Any:
    """Return OLMoE's own model in evaluation mode."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    with seeded(seed, device), device:
        return OlmoeForCausalLM(OlmoeConfig()).to(device, dtype).eval()
