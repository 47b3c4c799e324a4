"""The fused router as an op: gradients of some results alone, empty and compiled calls, refusals.

T tokens, D features, E experts, C clusters, K experts per token, as route_cases.py has them.
"""

from typing import Any

import pytest
import torch
from route_cases import (
    D,
    E,
    K,
    T,
    differentiable,
    drawn,
    fused_route,
    leaves,
    route_reference,
    wide,
)
from torch import Tensor

from acmoe.errors import UserError
from acmoe.ops.route.autograd import route_op
from acmoe.ops.route.op import unsupported
from acmoe.ops.route.tokens import ScaledTokens

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_empty")


def test_a_gradient_of_one_result_alone_is_enough(generator: torch.Generator, device: str) -> None:
    case = drawn(generator, device, torch.float32, True)
    exact = wide(case)
    mine, theirs = leaves(case), leaves(exact)
    for pick in range(3):
        found = differentiable(fused_route(*case.values(), K, True))[pick]
        wanted = differentiable(route_reference(*exact.values(), K, True))[pick]
        grads = torch.autograd.grad(found.square().sum(), mine)
        exact_grads = torch.autograd.grad(wanted.square().sum(), theirs)
        for one, other in zip(grads, exact_grads, strict=True):
            assert (one - other).abs().max() < 1e-5 * other.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_who_reads_x_after_the_router_has_his_gradient_added(
    dtype: torch.dtype, generator: torch.Generator, device: str
) -> None:
    case = drawn(generator, device, dtype, True)
    (x, *_) = leaves(case)
    upstream = torch.randn(T, D, generator=generator).to(device, dtype)
    found = fused_route(*case.values(), K, True)
    loss = found.gate.square().sum()
    (own,) = torch.autograd.grad(loss, x, retain_graph=True)
    (both,) = torch.autograd.grad([loss, found.x], x, [torch.ones_like(loss), upstream])
    # A 16-bit sum is rounded once here and twice there (truncated by the interpreter).
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(both, own + upstream, rtol=2 * eps, atol=4 * eps)
    assert torch.equal(found.x, x)
    # Alone, it is the identity.
    found = fused_route(*case.values(), K, True)
    (alone,) = torch.autograd.grad(found.x, x, upstream)
    assert torch.equal(alone, upstream)


@pytest.mark.parametrize(
    ("tokens", "dim", "experts"),
    [(70, 1090, 5), pytest.param(150, 1100, 70, marks=pytest.mark.slow)],
)
def test_long_rows_get_both_gradients_in_every_column(
    tokens: int, dim: int, experts: int, generator: torch.Generator, device: str
) -> None:
    # Programs of 512 features: several a row, the last of them not full.
    x = torch.randn(tokens, dim, generator=generator).to(device, torch.bfloat16).requires_grad_()
    embedding = (torch.randn(experts, dim, generator=generator) / dim**0.5).to(device)
    upstream = torch.randn(tokens, dim, generator=generator).to(device, torch.bfloat16)
    found = fused_route(x, embedding, None, None, None, K, True)
    loss = found.gate.square().sum()
    (own,) = torch.autograd.grad(loss, x, retain_graph=True)
    (both,) = torch.autograd.grad([loss, found.x], x, [torch.ones_like(loss), upstream])
    exact = x.detach().double().requires_grad_()
    gate = route_reference(exact, embedding.double(), None, None, None, K, True).gate
    (wanted,) = torch.autograd.grad(gate.square().sum(), exact)
    eps = torch.finfo(torch.bfloat16).eps
    assert (own - wanted).abs().max() < 2 * eps * wanted.abs().max()
    torch.testing.assert_close(both, own + upstream, rtol=2 * eps, atol=4 * eps)


def test_no_tokens_no_load(device: str) -> None:
    x = torch.empty(0, D, device=device, requires_grad=True)
    embedding = torch.randn(E, D, device=device, requires_grad=True)
    found = fused_route(x, embedding, None, None, None, K, True)
    assert found.gate.shape == (0, K) and found.affinity.shape == (0, E)
    assert (found.load == 0).all() and (found.gate_sum == 0).all()
    found.gate_sum.sum().backward()
    assert embedding.grad is not None and (embedding.grad == 0).all()


def test_the_op_is_well_formed(generator: torch.Generator, device: str) -> None:
    case = drawn(generator, device, torch.float32, True)
    leaves(case)
    args = (*case.values(), K, True, None, 1.0, None, None)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(route_op, args, test_utils=tests)
    noise = torch.randn(T, E, generator=generator).to(device)
    torch.library.opcheck(route_op, (*args, noise), test_utils=tests)


def test_a_compiled_router_is_the_eager_one(generator: torch.Generator, device: str) -> None:
    case = drawn(generator, device, torch.float32, True)
    inputs = leaves(case)

    def loss(*args: Any) -> tuple[Tensor, Tensor]:
        route = fused_route(*args, K, True)
        return route.expert_ids, route.gate.square().sum() + route.gate_sum.square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    ids, value = loss(*case.values())
    compiled_ids, compiled_value = compiled(*case.values())
    assert torch.equal(ids, compiled_ids) and torch.equal(value, compiled_value)
    grads = torch.autograd.grad(value, inputs), torch.autograd.grad(compiled_value, inputs)
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_arguments_that_do_not_fit_are_refused(device: str) -> None:
    x, embedding = torch.ones(4, 2, device=device), torch.ones(3, 2, device=device)
    assignment = torch.zeros(4, device=device).long()
    with pytest.raises(UserError, match="top_k=4"):
        fused_route(x, embedding, None, None, None, 4, True)
    with pytest.raises(UserError, match="come together"):
        fused_route(x, embedding, None, None, assignment, 1, True)
    with pytest.raises(UserError, match=r"scale \(3, 5\)"):
        fused_route(x, embedding, None, torch.ones(3, 5, device=device), assignment, 1, True)
    with pytest.raises(UserError, match=r"noise has shape \(3, 4\); .* need \(4, 3\)"):
        noise = torch.ones(3, 4, device=device)
        fused_route(x, embedding, None, None, None, 1, True, noise=noise)
    reason = unsupported(ScaledTokens(x.double()), embedding, 1)
    assert reason is not None and "float64" in reason
