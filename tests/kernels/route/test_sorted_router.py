"""The router over tokens sorted by cluster (sizes: sorted_cases.py)."""

from typing import Any

import pytest
import torch
from route_cases import check_zero_loss, fused_route, route_reference, sorted_by
from sorted_cases import C, D, E, K, T, drawn_assignment
from torch import Tensor

from acmoe.ops.route.autograd import route_op
from acmoe.ops.route.op import fused_route as kernel
from acmoe.ops.route.tokens import ScaledTokens
from acmoe.ops.sort.op import sort_with_tokens_op
from acmoe.ops.sort.order import TokenOrder
from acmoe.ops.statistics.sorted_op import sorted_dispersion_op, sorted_scale_op
from slow_cases import mostly_slow, slow_on_cpu

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.fixture(autouse=True)
def _sorted_however_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tokens than a thousand would otherwise be routed in their own order."""
    from acmoe.ops.route.triton import few_tokens

    monkeypatch.setattr(few_tokens, "MOST_TOKENS", 0)


def drawn(generator: torch.Generator, device: str, dtype: torch.dtype) -> dict[str, Any]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    return {
        "x": normal(T, D).to(dtype),
        "embedding": normal(E, D) / D**0.5,
        "bias": normal(E),
        "scale": normal(C, D).exp(),
        "assignment": drawn_assignment(generator)[:, 0].to(device),
    }


@mostly_slow("dtype", [torch.float32, torch.bfloat16, torch.float16], keep=(1,))
def test_the_sorted_router_is_the_reference(
    dtype: torch.dtype, generator: torch.Generator, device: str
) -> None:
    case = drawn(generator, device, dtype)
    settings = (K, dtype != torch.float32, None, 0.7)
    order = sorted_by(case["assignment"], C)
    names = ("x", "embedding", "bias")
    exact = {n: v.double() if v.is_floating_point() else v for n, v in case.items()}
    mine = [case[name].requires_grad_() for name in names]
    theirs = [exact[name].requires_grad_() for name in names]
    found = fused_route(*case.values(), *settings, order=order)
    wanted = route_reference(*exact.values(), *settings)
    assert torch.equal(found.expert_ids, wanted.expert_ids)
    assert torch.equal(found.first, wanted.expert_ids[:, 0])
    assert torch.equal(found.load.double(), wanted.load)
    results = [found.gate, found.affinity, found.gate_sum]
    exact_results = [wanted.gate, wanted.affinity, wanted.gate_sum]
    # A bf16 token enters as it is, fp16 takes 4 terms: 2^-17 of a product (ops/device/dot.py).
    tolerance = 2e-5 if dtype == torch.float16 else 2e-6
    for one, other in zip(results, exact_results, strict=True):
        assert (one - other).abs().max() < tolerance * other.abs().max()
    upstream = [torch.randn(z.shape, generator=generator).to(device) for z in results]
    grads = torch.autograd.grad(results, mine, upstream)
    exact_grads = torch.autograd.grad(exact_results, theirs, [grad.double() for grad in upstream])
    tolerances = [2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps, 2e-5, 2e-5]
    for one, other, allowed in zip(grads, exact_grads, tolerances, strict=True):
        assert (one - other).abs().max() < allowed * other.abs().max()


def test_the_kernel_writes_the_loss_of_a_router_without_one(
    generator: torch.Generator, device: str
) -> None:
    """All tokens may be in no cluster: the first blocks then have none."""
    case = drawn(generator, device, torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):  # 4 warps, and 2
        case["embedding"] = case["embedding"].to(dtype)
        check_zero_loss(case, sorted_by(case["assignment"], C))
    case["assignment"].fill_(-1)
    check_zero_loss(case, sorted_by(case["assignment"], C))


@mostly_slow("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_of_one_is_the_plain_router(
    dtype: torch.dtype, generator: torch.Generator, device: str
) -> None:
    case = drawn(generator, device, dtype)
    plain = fused_route(case["x"], case["embedding"], case["bias"], None, None, K, True)
    case["scale"] = torch.ones(C, D, device=device)
    found = fused_route(*case.values(), K, True, order=sorted_by(case["assignment"], C))
    for name in ("expert_ids", "gate", "affinity", "load", "first"):
        assert torch.equal(getattr(found, name), getattr(plain, name))


@mostly_slow("dim", [D, 352, 4096], keep=(0,), gpu=(1, 2))
def test_a_scale_of_one_is_the_plain_router_without_a_loss_too(
    dim: int, generator: torch.Generator, device: str
) -> None:
    """A kernel that adds up nothing has fewer warps for sorted tokens than for plain ones."""
    case, order = drawn_in_bf16(generator, device, E, C, dim)
    case["scale"] = torch.ones(C, dim, device=device)
    found, plain = (
        kernel(tokens, case["embedding"], None, top_k=K, over_selected=True)
        for tokens in (
            ScaledTokens(case["x"], case["scale"], case["assignment"], order),
            ScaledTokens(case["x"]),
        )
    )
    for name in ("expert_ids", "gate", "affinity", "first"):
        assert torch.equal(getattr(found, name), getattr(plain, name))


# Experts, clusters, features. Few clusters are looked up in a list, more at a token. The scale goes
# to the embedding, or to the token where there are many experts; 130 are two blocks. One program
# does up to 16 blocks of 64 features.
SIZES = [(E, C, D), (40, 40, D), (128, 1, 1100), (130, C, D)]


def drawn_in_bf16(
    generator: torch.Generator, device: str, experts: int, clusters: int, dim: int
) -> tuple[dict[str, Any], Tensor]:
    assignment = torch.randint(-1, clusters, (T,), generator=generator).to(device)
    case = {
        "x": torch.randn(T, dim, generator=generator).to(device, torch.bfloat16),
        "embedding": torch.randn(experts, dim, generator=generator) / dim**0.5,
        "bias": None,
        "scale": torch.randn(clusters, dim, generator=generator).exp().to(device),
        "assignment": assignment,
    }
    case["embedding"] = case["embedding"].to(device, torch.bfloat16)
    return case, sorted_by(assignment, clusters)


@pytest.mark.parametrize(
    "sizes",
    [SIZES[0], *(pytest.param(one, marks=pytest.mark.slow) for one in SIZES[1:])],
)
def test_a_bf16_embedding_costs_the_sorted_router_an_eighteenth_bit_at_most(
    sizes: tuple[int, int, int], generator: torch.Generator, device: str
) -> None:
    case, order = drawn_in_bf16(generator, device, *sizes)
    wide = {n: case[n].double() for n in ("x", "embedding", "scale")}
    leaves = [case["x"].requires_grad_(), case["embedding"].requires_grad_()]
    exact_leaves = [wide["x"].requires_grad_(), wide["embedding"].requires_grad_()]
    found = fused_route(*case.values(), K, True, order=order)
    wanted = route_reference(*(case | wide).values(), K, True)
    assert torch.equal(found.expert_ids, wanted.expert_ids)
    results, exact_results = [found.gate, found.affinity], [wanted.gate, wanted.affinity]
    # 2^-18 of each product may be left out, of either sign: twice their root sum of squares is
    # rare. Gates move no more than affinities do.
    own = case["assignment"].clamp(min=0)
    scale = wide["scale"][own].masked_fill((case["assignment"] < 0)[:, None], 1.0)
    norm = ((wide["x"] * scale).square() @ wide["embedding"].square().T).sqrt().max()
    for one, other in zip(results, exact_results, strict=True):
        assert (one - other).abs().max() < 2e-6 * other.abs().max() + 2.0**-17 * norm
    grads = torch.autograd.grad(results, leaves, [z.detach() for z in results])
    exact_grads = torch.autograd.grad(exact_results, exact_leaves, exact_results)
    for one, other in zip(grads, exact_grads, strict=True):  # both are rounded to bf16
        assert (one - other).abs().max() < torch.finfo(torch.bfloat16).eps * other.abs().max()


@pytest.mark.parametrize(
    "sizes",
    [SIZES[0], *(pytest.param(one, marks=pytest.mark.slow) for one in SIZES[1:])],
)
def test_a_scale_of_one_changes_no_bit_of_results_and_tokens_gradients(
    sizes: tuple[int, int, int], generator: torch.Generator, device: str
) -> None:
    case, order = drawn_in_bf16(generator, device, *sizes)
    x = case["x"].requires_grad_()
    case["scale"] = torch.ones_like(case["scale"])
    found = fused_route(*case.values(), K, True, order=order)
    plain = fused_route(x, case["embedding"], None, None, None, K, True)
    for name in ("expert_ids", "gate", "affinity", "load", "first"):
        assert torch.equal(getattr(found, name), getattr(plain, name))
    upstream = torch.randn(T, K, generator=generator).to(device)
    grads = [torch.autograd.grad(route.gate, x, upstream)[0] for route in (found, plain)]
    assert grads[0].any() and torch.equal(*grads)


@slow_on_cpu
def test_equal_inputs_give_equal_bits(generator: torch.Generator, device: str) -> None:
    case = drawn(generator, device, torch.bfloat16)
    order = sorted_by(case["assignment"], C)
    inputs = [case[name].requires_grad_() for name in ("x", "embedding", "bias")]
    runs = []
    for _ in range(2):
        found = fused_route(*case.values(), K, True, order=order)
        results = [found.gate, found.gate_sum]
        runs.append([*found, *torch.autograd.grad(results, inputs, results)])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_a_masked_token_changes_nothing(generator: torch.Generator, device: str) -> None:
    case = drawn(generator, device, torch.bfloat16)
    mask = (torch.rand(T, generator=generator) < 0.8).to(device)
    order = sorted_by(case["assignment"], C)
    runs = []
    for padding in (0.0, float("nan")):
        case["x"] = case["x"].detach().masked_fill(~mask[:, None], padding).requires_grad_()
        found = fused_route(*case.values(), K, True, mask, order=order)
        grad = torch.autograd.grad(found.gate.square().sum() + found.gate_sum[0], case["x"])
        runs.append([*found[:6], *grad])  # the last is x itself
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    assert (runs[0][-1][~mask] == 0).all()


def test_the_ops_are_well_formed(generator: torch.Generator, device: str) -> None:
    case = drawn(generator, device, torch.float32)
    order = sorted_by(case["assignment"], C)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    case["x"].requires_grad_()
    clusters = TokenOrder.unpack(order, C)
    args = (*case.values(), K, True, None, 1.0, clusters.token, clusters.end)
    torch.library.opcheck(route_op, args, test_utils=tests)
    options = ("mad", "cluster", 1e-3, 0.0, None, 2, False, "all")
    places = (torch.empty(C, D, device=device), torch.empty(C, device=device))
    args = (case["x"].detach(), *clusters)
    torch.library.opcheck(sorted_scale_op, (*args, None, *places, *options), test_utils=tests[:2])
    torch.library.opcheck(sorted_dispersion_op, (*args, *places, "std"), test_utils=tests[:2])
    args = (case["assignment"].clamp(min=0)[:, None], case["assignment"], C)
    torch.library.opcheck(sort_with_tokens_op, args, test_utils=tests[:2])
