"""Experts whose widths are no multiple of 16, padded, against the definition."""

import pytest
import torch

from acmoe.experts.mlp import ExpertMLP
from acmoe.ops.dispatch import use_backend
from acmoe.ops.sort import sort_rows
from slow_cases import mostly_slow

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_empty")


@mostly_slow(
    ("activation", "bias", "widths"),
    [("swiglu", True, (10, 12)), ("gelu", False, (16, 9)), ("relu", True, (7, 32))],
)
def test_experts_of_odd_widths_are_padded_for_many_rows(
    activation, bias, widths, device, monkeypatch
):
    from acmoe.ops.experts import ExpertWeights, autograd, expert_mlp, op, padding

    seen = []
    run = autograd.fused_expert_mlp
    monkeypatch.setattr(padding, "FEWEST_ROWS", 2)
    monkeypatch.setattr(
        *(op, "fused_expert_mlp"),
        lambda x, weights, *rest, **named: (
            seen.append(weights.down),
            run(x, weights, *rest, **named),
        )[1],
    )
    torch.manual_seed(0)
    mlp = ExpertMLP(
        dim=widths[0], hidden=widths[1], num_experts=4, activation=activation, bias=bias
    )
    x, gate = torch.randn(6, widths[0]), torch.rand(6, 2)
    rows = sort_rows.definition(torch.rand(6, 4).topk(2).indices.to(device), 4)
    results = []
    for backend in ("triton", "torch"):
        leaves = [one.detach().to(device).requires_grad_() for one in (x, gate, *mlp.parameters())]
        weights = ExpertWeights(*leaves[2:], *([] if bias else [None, None]))
        with use_backend(backend):
            out = expert_mlp(leaves[0], weights, rows, leaves[1], activation=activation)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    (down,) = seen
    assert down.shape == (4, *(-(-width // 16) * 16 for width in widths))
    assert not padding.worth_padding(ExpertWeights(down, down, None, None), 999)  # multiples of 16
    assert not padding.worth_padding(weights, 8)  # 2 rows an expert
