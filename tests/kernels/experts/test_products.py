"""How accurately the experts multiply: as torch itself, at the setting that the user gave torch.

T tokens, D features, E experts, K experts per token.
"""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from acmoe.experts.mlp import ExpertMLP
from acmoe.ops.dispatch import use_backend
from acmoe.ops.sort import sort_rows
from slow_cases import mostly_slow

SETTINGS = [("highest", "tf32x3"), ("high", "tf32"), ("medium", "tf32")]


@pytest.fixture
def restored() -> Iterator[None]:
    """Torch's setting is put back, its older name first: that one may not contradict the newer."""
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = before


def mixed(mlp: ExpertMLP, x_TD: Tensor, ids_TK: Tensor, backend: str) -> list[Tensor]:
    """The output of the experts, and its gradients by tokens, gate and weights."""
    generator = torch.Generator().manual_seed(1)
    gate_TK, cotangent_TD = (
        torch.rand(shape, generator=generator).to(x_TD) for shape in (ids_TK.shape, x_TD.shape)
    )
    leaves = [x_TD.detach().requires_grad_(), gate_TK.requires_grad_(), *mlp.parameters()]
    with use_backend(backend):
        out_TD = mlp(leaves[0], sort_rows(ids_TK, 3), gate_TK)
    return [out_TD.detach(), *torch.autograd.grad(out_TD, leaves, cotangent_TD.to(out_TD))]


def drawn(tokens: int, dim: int, hidden: int, device: str) -> tuple[ExpertMLP, Tensor, Tensor]:
    """Three experts, tokens, and two experts for each of them."""
    torch.manual_seed(0)
    mlp = ExpertMLP(dim=dim, hidden=hidden, num_experts=3, activation="gelu")
    ids_TK = torch.rand(tokens, 3).topk(2).indices
    return mlp.to(device), torch.randn(tokens, dim, device=device), ids_TK.to(device)


@pytest.mark.parametrize(("setting", "wanted"), SETTINGS)
def test_only_float32_follows_torchs_setting(setting: str, wanted: str, restored: None) -> None:
    from acmoe.ops.device.dot import dot_precision

    torch.set_float32_matmul_precision(setting)
    assert dot_precision(torch.float32) == wanted
    # Else another setting would compile 16-bit kernels again, to the same code.
    assert dot_precision(torch.bfloat16) == dot_precision(torch.float16) == "ieee"


def test_torchs_newer_name_of_the_setting_is_followed_too(restored: None) -> None:
    from acmoe.ops.device.dot import dot_precision

    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert dot_precision(torch.float32) == "tf32"
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert dot_precision(torch.float32) == "tf32x3"


@pytest.mark.skipif(torch.cuda.is_available(), reason="watches the interpreter")
@mostly_slow(
    ("setting", "autocast", "wanted"),
    [("highest", False, "tf32x3"), ("high", False, "tf32"), ("highest", True, "ieee")],
)
def test_every_product_of_the_experts_is_taken_at_that_precision(
    setting: str,
    autocast: bool,
    wanted: str,
    restored: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward and backward; under autocast float32 weights are multiplied as bf16, like tokens."""
    from triton.runtime.interpreter import InterpreterBuilder

    seen, multiply = [], InterpreterBuilder.create_dot

    def watched(self, left, right, total, precision, *rest):
        seen.append(precision.name.lower())
        return multiply(self, left, right, total, precision, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", watched)
    torch.set_float32_matmul_precision(setting)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        mixed(*drawn(6, 16, 16, "cpu"), "triton")
    # Three experts of one tile: up, down, and four gradients.
    assert seen == [wanted] * 18


@pytest.mark.gpu
# tf32 cuts a number after 10 bits: 3e-4 of it are lost on average, in two products of two numbers.
@pytest.mark.parametrize(
    ("setting", "least", "most"), [("highest", 0.0, 1e-5), ("high", 1e-5, 2e-3)]
)
def test_float32_experts_are_as_accurate_as_torch_is_set(
    setting: str, least: float, most: float, restored: None
) -> None:
    mlp, x_TD, ids_TK = drawn(300, 200, 120, "cuda")
    expected = mixed(copy.deepcopy(mlp).double(), x_TD.double(), ids_TK, "torch")
    torch.set_float32_matmul_precision(setting)
    found = mixed(mlp, x_TD, ids_TK, "triton")
    errors = [
        ((one - other).norm() / other.norm()).item()
        for one, other in zip(found, expected, strict=True)
    ]
    assert least <= errors[0] < most  # below the least the setting would have changed nothing
    assert max(errors) < 2 * most  # gradients see the rounding of forward and backward
