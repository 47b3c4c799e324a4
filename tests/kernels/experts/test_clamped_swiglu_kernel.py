"""The clamped SwiGLU kernel against the formula in float64, and inside GPT-OSS's experts."""

import pytest
import torch

from acmoe.ops.dispatch import record_choices
from acmoe.ops.experts import clamped_swiglu

pytest.importorskip("triton")

ALPHA, LIMIT = 1.702, 0.8


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", [(3, 5), (70, 33)])  # less than a program's block, and more
def test_value_and_gradient_are_the_formulas(
    shape: tuple[int, int], interleaved: bool, device: str
) -> None:
    rows, hidden = shape
    generator = torch.Generator().manual_seed(0)
    gate, u = torch.randn(2, rows, hidden, generator=generator, dtype=torch.float64)
    grad = torch.randn(rows, hidden, generator=generator, dtype=torch.float64)
    g, up = gate.clamp(max=LIMIT), u.clamp(-LIMIT, LIMIT)
    sig = 1 / (1 + torch.exp(-ALPHA * g))
    wanted = (up + 1) * g * sig
    d_gate = grad * (up + 1) * (sig + ALPHA * g * sig * (1 - sig)) * (gate <= LIMIT)
    d_u = grad * g * sig * (u.abs() <= LIMIT)
    join = torch.stack if interleaved else torch.cat
    h = join((gate, u), dim=-1).reshape(rows, 2 * hidden).float().to(device).requires_grad_()
    with record_choices() as choices:
        out = clamped_swiglu(h, alpha=ALPHA, limit=LIMIT, interleaved=interleaved)
    assert [choice.kernel for choice in choices] == ["triton"]
    out.backward(grad.float().to(device))
    assert h.grad is not None
    assert torch.allclose(out.detach().cpu().double(), wanted, atol=1e-6)
    d_h = join((d_gate, d_u), dim=-1).reshape(rows, 2 * hidden)
    assert torch.allclose(h.grad.cpu().double(), d_h, atol=2e-6)


def test_nan_stays_nan_and_infinities_are_clamped(device: str) -> None:
    h = torch.tensor([[torch.nan, 0.0, torch.inf, torch.inf, 1.0, -torch.inf]], device=device)
    out = clamped_swiglu(h, alpha=ALPHA, limit=LIMIT, interleaved=True)
    wanted = clamped_swiglu.definition(h, alpha=ALPHA, limit=LIMIT, interleaved=True)
    assert torch.allclose(out, wanted, equal_nan=True)
    assert out[0, 0].isnan() and out[0, 1:].isfinite().all()
