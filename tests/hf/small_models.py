"""Tiny random models of every MoE family of transformers: hidden size 32, 8 experts, 4 layers.

`build(name)` gives the model, `inputs(name)` the arguments of a forward pass. Routers get large
random weights, because some begin at zero and would decide nothing.
"""

import re
from typing import Any

import torch
import transformers
from small_configs import FAMILIES, LAYERS, VOCABULARY, Small
from torch import Tensor, nn

# A value for every field of a config that has a size; a config takes those that it has.
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 128,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 16,
    # Experts, under all their names.
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1),
    # Attention through low-rank projections, with an indexer that picks keys.
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    # Linear attention and state-space layers.
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "mamba_n_heads": 8,
    "mamba_d_state": 8,
    "mamba_d_head": 8,
    "mamba_dt_rank": 4,
}


def config(small: Small) -> Any:
    """The config that a row describes."""
    kind = getattr(transformers, small.config)
    known = {key: value for key, value in COMMON.items() if key in kind.__dataclass_fields__}
    parts = {key: config(part) for key, part in small.parts.items()}
    return kind(**(known | small.fields | parts))


def build(name: str, seed: int = 0) -> nn.Module:
    """A random model of a family in evaluation mode, whose routers decide something."""
    return build_small(FAMILIES[name], seed)


def build_small(small: Small, seed: int = 0) -> nn.Module:
    """The model that a row describes."""
    torch.manual_seed(seed)
    kind = getattr(transformers, small.model)
    make = kind.from_config if small.model.startswith("Auto") else kind._from_config
    model = make(config(small)).eval()
    if small is FAMILIES["qwen3_omni_moe.talker"]:  # transformers leaves its experts uninitialised
        for part, weight in model.named_parameters():
            if ".experts." in part:
                nn.init.normal_(weight, std=0.02)
    sharpen(model, torch.Generator().manual_seed(seed + 1))
    return model


ROUTER = re.compile(r"(Router|Gating|MoEV1Gate)$")
BIASES = ("e_score_correction_bias", "expert_bias", "balancing_biases")


@torch.no_grad()
def sharpen(model: nn.Module, generator: torch.Generator) -> None:
    """Give routers random weights of size 0.5, and their biases size 0.1."""
    for module in model.modules():
        if ROUTER.search(type(module).__name__):
            for weight in module.parameters():
                if weight.dim() == 2:
                    weight.copy_(0.5 * torch.randn(weight.shape, generator=generator))
    for name, buffer in (*model.named_buffers(), *model.named_parameters()):
        if name.endswith(BIASES):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
        if name.endswith("tid2eid"):  # two different experts for every token id
            ranks = torch.rand((len(buffer), 8), generator=generator)
            buffer.copy_(ranks.topk(buffer.shape[1]).indices)


def inputs(name: str, batch: int = 2, length: int = 7, seed: int = 5) -> dict[str, Tensor]:
    """Random token ids (batch, length) as arguments of the model's forward pass."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (2, batch, length), generator=generator)
    if name in ("switch_transformers", "nllb_moe", "diffusion_gemma"):
        return {"input_ids": ids[0], "decoder_input_ids": ids[1]}
    if name == "qwen3_omni_moe.talker":  # it is given the states of another model
        return {"inputs_embeds": torch.randn((batch, length, 32), generator=generator)}
    return {"input_ids": ids[0]}


def is_known(name: str) -> bool:
    """Return True if the installed version of transformers has this family."""
    return hasattr(transformers, FAMILIES[name].config)
