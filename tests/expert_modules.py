"""Tiny experts modules of transformers, one for each layout and gate it has."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

E, D, F, K = 5, 16, 8, 2

# Family, class, activation, and what it has that others have not.
FAMILIES = {
    "qwen3_moe": ("Qwen3MoeExperts", "silu"),  # SwiGLU
    "qwen3_moe-gelu": ("Qwen3MoeExperts", "gelu"),  # a gate without a kernel
    "nemotron_h": ("NemotronHExperts", "relu2"),  # no gate
    "nemotron_h-relu": ("NemotronHExperts", "relu"),  # no gate, with a kernel
    "gpt_oss": ("GptOssExperts", ""),  # biases, transposed, interleaved, clamped
    "openai_privacy_filter": ("OpenAIPrivacyFilterExperts", ""),  # transposed, clamped
    "aria": ("AriaExperts", ""),  # transposed
    "muse_spark": ("MuseSparkExperts", "silu"),  # a norm behind the experts
}


def experts_of(family: str, *, limit: float = 0.6) -> nn.Module:
    """Build the family's experts with weights that make outputs of about 1."""
    name, act = FAMILIES[family]
    module = family.split("-")[0]
    try:
        file = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
        if not hasattr(getattr(file, name), "_apply_gate"):
            pytest.skip(f"this transformers does not dispatch {name}")
    except ModuleNotFoundError:
        pytest.skip(f"this transformers has no {module}")
    config = SimpleNamespace(
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), E),
        **dict.fromkeys(("hidden_size", "moe_hidden_size"), D),
        **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), F),
        **dict.fromkeys(("hidden_act", "mlp_hidden_act"), act),
        moe_num_experts=E,
        moe_latent_size=None,
        post_norm_eps=1e-5,
        swiglu_alpha=1.702,
        swiglu_limit=limit,  # low enough that some units are clamped
        _experts_implementation="acmoe",
    )
    experts: nn.Module = getattr(file, name)(config)
    if hasattr(experts, "limit"):
        experts.limit = limit
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return experts


def routed(tokens: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Draw hidden states (T, D), different expert ids (T, K), and combine weights (T, K)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, D, generator=generator)
    ids = torch.rand(tokens, E, generator=generator).argsort(dim=1)[:, :K]
    return x, ids, torch.rand(tokens, K, generator=generator)


def outcome(
    experts: nn.Module, implementation: str, x: Tensor, ids: Tensor, gate: Tensor
) -> dict[str, Tensor]:
    """Return the output and the gradients of its product with fixed numbers."""
    experts.config._experts_implementation = implementation  # type: ignore[union-attr]
    experts.zero_grad()
    x, gate = x.clone().requires_grad_(), gate.clone().requires_grad_()
    out = experts(x, ids, gate)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    out.backward(upstream)
    gradients = {name: one.grad for name, one in experts.named_parameters()}
    found = {"out": out.detach(), "x": x.grad, "gate": gate.grad, **gradients}
    return {name: value for name, value in found.items() if value is not None}


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].shape == value.shape and found[name].dtype == value.dtype, name
        scale = max(1.0, float(value.float().abs().max())) if value.numel() else 1.0
        error = (found[name].float() - value.float()).abs()
        assert value.numel() == 0 or float(error.max()) <= tolerance * scale, name
