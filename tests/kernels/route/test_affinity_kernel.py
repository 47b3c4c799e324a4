"""The fused router against `route_reference` in float64, forwards and backwards.

T tokens, D features, E experts, C clusters, K experts per token, as route_cases.py has them.
"""

import math
from typing import Any

import pytest
import torch
from route_cases import (
    C,
    D,
    E,
    K,
    Route,
    T,
    differentiable,
    drawn,
    fused_route,
    leaves,
    lost_by_terms,
    route_reference,
    sorted_by,
    wide,
)
from torch import Tensor

from acmoe.errors import UserError
from acmoe.ops.route.autograd import route_op
from acmoe.ops.route.op import unsupported
from acmoe.ops.route.tokens import ScaledTokens
from slow_cases import mostly_slow, slow_on_cpu

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_empty")

CASES = [  # dtype, scaled, over selected, masked
    (torch.float32, True, True, True),
    (torch.float32, False, False, False),
    (torch.bfloat16, True, False, True),
    (torch.bfloat16, False, True, False),
    (torch.float16, True, True, False),
]
NOISY = [  # dtype, scaled, over selected, masked, sorted by cluster
    (torch.float32, True, True, True, False),
    (torch.float32, True, False, False, True),
    (torch.float32, False, True, False, False),
    (torch.bfloat16, True, False, False, False),
    (torch.bfloat16, True, True, True, True),
    (torch.bfloat16, False, False, True, False),
]


@pytest.mark.parametrize(("dtype", "scaled", "selected", "masked"), CASES)
def test_the_kernel_is_the_reference(
    dtype: torch.dtype,
    scaled: bool,
    selected: bool,
    masked: bool,
    generator: torch.Generator,
    device: str,
) -> None:
    compare(drawn(generator, device, dtype, scaled), selected, masked, generator)


@pytest.mark.parametrize(("dtype", "scaled", "selected", "masked", "in_clusters"), NOISY)
def test_the_kernel_is_the_reference_under_noise_too(
    dtype: torch.dtype,
    scaled: bool,
    selected: bool,
    masked: bool,
    in_clusters: bool,
    generator: torch.Generator,
    device: str,
) -> None:
    case = drawn(generator, device, dtype, scaled)
    order = sorted_by(case["assignment"], C) if in_clusters else None
    noise = torch.randn(E, T, generator=generator).to(device).T  # its memory is in another order
    found = compare(case, selected, masked, generator, order, noise)
    assert not torch.equal(found.first, (found.affinity - noise).argmax(-1))  # it changes choices


@pytest.mark.parametrize(("dtype", "scaled", "selected", "masked", "in_clusters"), NOISY[1::2])
def test_affinities_of_many_experts_may_have_a_kernel_of_their_own(
    dtype: torch.dtype,
    scaled: bool,
    selected: bool,
    masked: bool,
    in_clusters: bool,
    generator: torch.Generator,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forty experts, in three blocks of sixteen: the bits of one kernel."""
    from acmoe.ops.route.triton import many_experts, route, route_tiles

    case = drawn(generator, device, dtype, scaled)
    case["embedding"] = torch.randn(40, D, generator=generator).to(device)
    if scaled:
        case["bias"] = torch.randn(40, generator=generator).to(device)
    order = sorted_by(case["assignment"], C) if in_clusters else None
    noise = torch.randn(T, 40, generator=generator).to(device)
    mask = (torch.rand(T, generator=generator) < 0.8).to(device) if masked else None
    arguments = (*case.values(), K, selected, mask, 0.7, order, noise)
    together = fused_route(*arguments)
    for module in (route, route_tiles):
        monkeypatch.setattr(module, "MANY_EXPERTS", 39)
    monkeypatch.setattr(many_experts, "AFFINITY_TILE", (32, 16, 4, 2))
    apart = fused_route(*arguments)
    for name, one, other in zip(Route._fields, apart, together, strict=True):
        if name == "gate_sum":  # added up by other blocks of tokens
            torch.testing.assert_close(one, other)
        else:
            assert torch.equal(one, other), name


RANGES = [(*case[:4], most) for case in NOISY if not case[4] for most in (2, 4)]


@mostly_slow(("dtype", "scaled", "selected", "masked", "most"), RANGES, keep={0, 3, 4, 7})
def test_the_features_of_few_tokens_may_be_summed_in_ranges(
    dtype: torch.dtype,
    scaled: bool,
    selected: bool,
    masked: bool,
    most: int,
    generator: torch.Generator,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seventy features in two ranges, of 64 and 6, or in three of 32, 32 and 6."""
    from acmoe.ops.route.triton import few_tokens

    monkeypatch.setattr(few_tokens, "FEWEST_FEATURES", 16)
    monkeypatch.setattr(few_tokens, "MOST_RANGES", most)
    case = drawn(generator, device, dtype, scaled)
    assert few_tokens.range_size(case["x"], case["embedding"]) == 128 // most
    noise = torch.randn(T, E, generator=generator).to(device)
    compare(case, selected, masked, generator, None, noise)


@mostly_slow("dtype", [torch.bfloat16, torch.float32])
def test_neither_a_scale_of_one_nor_an_unread_sum_changes_a_bit_of_few_tokens(
    dtype: torch.dtype, generator: torch.Generator, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks that select are smaller where nobody reads the sums of the balance loss."""
    from acmoe.ops.route.op import fused_route as kernel
    from acmoe.ops.route.triton import few_tokens

    monkeypatch.setattr(few_tokens, "FEWEST_FEATURES", 16)
    case = drawn(generator, device, dtype, scaled=True)
    x, embedding = case["x"].detach(), case["embedding"].detach()
    one = torch.ones_like(case["scale"])

    def found(tokens: ScaledTokens, temperature: float | None) -> tuple[Tensor, ...]:
        with torch.no_grad():
            result = kernel(
                *(tokens, embedding, case["bias"]),
                top_k=K,
                over_selected=True,
                temperature=temperature,
            )
        return result.expert_ids, result.gate, result.affinity, result.first

    plain = found(ScaledTokens(x), 1.0)
    for other in (
        found(ScaledTokens(x), None),
        found(ScaledTokens(x, one, case["assignment"]), None),
        found(ScaledTokens(x, one, case["assignment"]), 1.0),
        found(ScaledTokens(x, one, case["assignment"], sorted_by(case["assignment"], C)), 1.0),
    ):
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


@pytest.mark.parametrize("num_tokens", [1, 5, T, 70])
def test_the_balance_loss_of_few_tokens_is_that_of_their_sums(
    num_tokens: int, generator: torch.Generator, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 64 tokens one program computes it; 70 are two, whose sums are added."""
    from acmoe.ops.route.op import fused_route as kernel
    from acmoe.ops.route.triton import few_tokens

    monkeypatch.setattr(few_tokens, "FEWEST_FEATURES", 16)
    x, embedding = (
        torch.randn(n, D, generator=generator).to(device, torch.bfloat16) for n in (num_tokens, E)
    )
    with torch.no_grad():
        found = kernel(
            *(ScaledTokens(x), embedding, None),
            top_k=K,
            over_selected=True,
            temperature=0.7,
            balance_weight=0.3,
        )
    affinity_TE = x.double() @ embedding.double().T
    gate_E = (affinity_TE / 0.7).softmax(1).sum(0)
    chosen_TK = affinity_TE.topk(K).indices
    load_E = torch.bincount(chosen_TK.flatten(), minlength=E)
    expected = 0.3 * E * (load_E / load_E.sum() * gate_E / num_tokens).sum()
    assert found.balance is not None
    torch.testing.assert_close(found.balance.double(), expected, rtol=1e-5, atol=1e-6)


def test_an_embedding_of_16_bits_needs_no_split(generator: torch.Generator, device: str) -> None:
    """Its further parts are zeros: the same numbers in float32, which are split, give its bits."""
    case = drawn(generator, device, torch.float32, True)
    low = case["embedding"].bfloat16()
    found = [
        fused_route(*(case | {"embedding": embedding}).values(), K, True).affinity
        for embedding in (low, low.float())
    ]
    assert torch.equal(*found)


def compare(
    case: dict[str, Any],
    selected: bool,
    masked: bool,
    generator: torch.Generator,
    order: Tensor | None = None,
    noise: Tensor | None = None,
) -> Route:
    """Return the kernel's results and gradients, after comparing them."""
    device, dtype = case["x"].device, case["x"].dtype
    mask = (torch.rand(T, generator=generator) < 0.8).to(device) if masked else None
    if mask is not None:
        case["x"][~mask] = float("nan")  # padding may hold anything
    settings = (K, selected, mask, 0.7)
    exact = wide(case)
    mine, theirs = leaves(case), leaves(exact)
    found = fused_route(*case.values(), *settings, order, noise)
    wanted = route_reference(*exact.values(), *settings, noise)
    assert torch.equal(found.expert_ids, wanted.expert_ids)
    assert torch.equal(found.first, wanted.first)
    assert torch.equal(found.load.double(), wanted.load)
    # Gates move no more than affinities do; their sums over T tokens add that up.
    cuts = [lost_by_terms(exact, dtype, mask) * times for times in (1, 1, T)]
    for one, other, cut in zip(differentiable(found), differentiable(wanted), cuts, strict=True):
        # float32 accuracy: the products keep 24 bits, the sums of 70 features a few less.
        assert (one - other).abs().max() < 2e-6 * other.abs().max() + cut

    upstream = [torch.randn(z.shape, generator=generator).to(device) for z in differentiable(found)]
    grads = torch.autograd.grad(differentiable(found), mine, upstream)
    exact_grads = torch.autograd.grad(
        differentiable(wanted), theirs, [grad.double() for grad in upstream]
    )
    # A token's gradient has the token's dtype (truncated by the interpreter); those of parameters
    # are float32, from 3 terms of a product where the tokens have 16 bits.
    tolerances = [2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps, 2e-5, 2e-5]
    for one, other, tolerance in zip(grads, exact_grads, tolerances, strict=False):
        assert (one - other).abs().max() < tolerance * other.abs().max()
    return found


def test_where_experts_are_equal_the_noise_decides(device: str) -> None:
    # x = 0: the affinities are the noise. Softmax over the chosen (2, 1): (e, 1) / (e + 1). The
    # second token is padding: chosen for, but not counted.
    x, embedding = torch.zeros(2, 3, device=device), torch.ones(3, 3, device=device)
    noise = torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]], device=device, requires_grad=True)
    mask = torch.tensor([True, False], device=device)
    x.requires_grad_()
    found = fused_route(x, embedding, None, None, None, 2, True, mask, noise=noise)
    assert torch.equal(found.affinity, noise)
    assert found.expert_ids.tolist() == [[1, 2], [0, 1]] and found.first.tolist() == [1, 0]
    assert found.load.tolist() == [0, 1, 1]
    share = 1 / (1 + math.exp(-1))
    assert found.gate[0].tolist() == pytest.approx([share, 1 - share])
    total = found.gate[:, 0].sum() + found.affinity.sum()
    assert torch.autograd.grad(total, noise, allow_unused=True) == (None,)  # it is a constant


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


def test_of_equal_experts_the_first_is_chosen(device: str) -> None:
    # Affinities (0, 1, 0, 1, -1): best first, ties by index, and -0 ties with 0.
    embedding = torch.tensor([[0.0], [1.0], [-0.0], [1.0], [-1.0]], device=device)
    x = torch.ones(2, 1, device=device)
    found = fused_route(x, embedding, None, None, None, 4, True)
    assert found.expert_ids.tolist() == [[1, 3, 0, 2]] * 2
    assert found.load.tolist() == [2, 2, 2, 2, 0]
    assert found.gate[0, 0] == found.gate[0, 1] > found.gate[0, 2] == found.gate[0, 3]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_token_still_gets_distinct_experts_and_harms_no_other(
    bad: float, generator: torch.Generator, device: str
) -> None:
    case = drawn(generator, device, torch.bfloat16, True)
    clean = fused_route(*case.values(), K, True)
    case["x"][4, 9] = bad
    found = fused_route(*case.values(), K, True)
    assert len(set(found.expert_ids[4].tolist())) == K
    assert found.expert_ids.min() >= 0 and found.expert_ids.max() < E
    others = torch.arange(T, device=device) != 4
    assert torch.equal(found.affinity[others], clean.affinity[others])
    assert torch.equal(found.expert_ids[others], clean.expert_ids[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_scale_of_one_is_the_plain_router(
    dtype: torch.dtype, generator: torch.Generator, device: str
) -> None:
    case = drawn(generator, device, dtype, True)
    plain = fused_route(case["x"], case["embedding"], case["bias"], None, None, K, True)
    case["scale"] = torch.ones(C, D, device=device)
    ones = fused_route(*case.values(), K, True)
    case["scale"] = torch.full((C, D), float("nan"), device=device)
    case["assignment"] = torch.full((T,), -1, device=device)
    outside = fused_route(*case.values(), K, True)  # in no cluster: no scale is read
    for route in (ones, outside):
        assert all(torch.equal(one, other) for one, other in zip(route, plain, strict=True))


def test_an_id_that_is_no_cluster_keeps_the_token(generator: torch.Generator, device: str) -> None:
    case = drawn(generator, device, torch.float32, True)
    (x, *_) = leaves(case)
    results = []
    for outside in (-1, C, 10**6):
        case["assignment"][3:9] = outside
        found = route_op(*case.values(), K, True, None, 1.0, None, None)
        results.append((*found, *torch.autograd.grad(found[1].square().sum(), x)))
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(result, results[0], strict=True))


@slow_on_cpu
def test_equal_inputs_give_equal_bits(generator: torch.Generator, device: str) -> None:
    case = drawn(generator, device, torch.bfloat16, True)
    runs = []
    for _ in range(2):
        inputs = leaves(case)
        found = fused_route(*case.values(), K, True)
        results = [found.gate, found.gate_sum]
        grads = torch.autograd.grad(results, inputs, results)
        runs.append([*found, *grads])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scaled", [False, True])
def test_products_keep_float32_accuracy(
    scaled: bool, dtype: torch.dtype, generator: torch.Generator, device: str
) -> None:
    # All positive, so nothing cancels: 500 additions of 24-bit products stay within 2^-20, where
    # tf32 would leave 2^-11 and bf16 2^-8. Rescaled 16-bit tokens lose up to 2^-17 of a product, of
    # either sign: over 500 of them about 2^-18 / sqrt(500) = 2^-22.
    x = torch.rand(16, 500, generator=generator).to(device, dtype)
    embedding = torch.rand(16, 500, generator=generator).to(device)
    scale = torch.rand(1, 500, generator=generator).to(device) if scaled else None
    assignment = torch.zeros(16, device=device).long() if scaled else None
    found = fused_route(x, embedding, None, scale, assignment, 1, False).affinity.double()
    wanted = (x.double() * (1 if scale is None else scale.double())) @ embedding.double().T
    assert ((found - wanted).abs() / wanted).max() < 2.0**-20


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (130, 16)])
def test_few_and_many_experts(
    experts: int, top_k: int, generator: torch.Generator, device: str
) -> None:
    x = torch.randn(3, 5, generator=generator).to(device).requires_grad_()
    embedding = torch.randn(experts, 5, generator=generator).to(device)
    found = fused_route(x, embedding, None, None, None, top_k, False)
    exact = x.detach().double().requires_grad_()
    wanted = route_reference(exact, embedding.double(), None, None, None, top_k, False)
    assert torch.equal(found.expert_ids, wanted.expert_ids)
    (grad,) = torch.autograd.grad(found.gate.square().sum(), x)
    (exact_grad,) = torch.autograd.grad(wanted.gate.square().sum(), exact)
    assert torch.allclose(grad.double(), exact_grad, rtol=1e-4, atol=1e-6)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_tokens_have_finite_gates(
    dtype: torch.dtype, generator: torch.Generator, device: str
) -> None:
    """The definition shrinks tokens beyond 2^32; the kernel does not, and is finite up to 1e30."""
    x = torch.randn(T, D, generator=generator).to(dtype).to(device)
    embedding = torch.randn(E, D, generator=generator).to(device)
    expected = (x.double() @ embedding.double().T).argmax(-1)
    for size in (1e9, 1e30):
        tokens = (x.float() * size).to(dtype)
        found = fused_route(tokens, embedding, None, None, None, K, True)
        assert found.affinity.isfinite().all() and found.gate.isfinite().all()
        assert torch.equal(found.first, expected)
