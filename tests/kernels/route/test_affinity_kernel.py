"""The fused router against `route_reference` in float64, forwards and backwards.

T tokens, D features, E experts, C clusters, K experts per token, as route_cases.py has them.
"""

import math

import pytest
import torch
from route_cases import (
    NOISY,
    C,
    D,
    E,
    K,
    Route,
    T,
    check_zero_loss,
    compare,
    drawn,
    fused_route,
    leaves,
    route_reference,
    sorted_by,
)

from acmoe.ops.route.autograd import route_op
from acmoe.ops.route.tokens import ScaledTokens
from slow_cases import slow_on_cpu

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_empty")

CASES = [  # dtype, scaled, over selected, masked
    (torch.float32, True, True, True),
    (torch.float32, False, False, False),
    (torch.bfloat16, True, False, True),
    (torch.bfloat16, False, True, False),
    (torch.float16, True, True, False),
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


@pytest.mark.parametrize("form", ["one kernel", "ranges of features", "many experts"])
def test_the_kernel_writes_the_loss_of_a_router_without_one(
    form: str, generator: torch.Generator, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from acmoe.ops.route.triton import few_tokens, many_experts, route, route_tiles

    if form == "ranges of features":
        monkeypatch.setattr(few_tokens, "FEWEST_FEATURES", 16)
    elif form == "many experts":
        for module in (route, route_tiles):
            monkeypatch.setattr(module, "MANY_EXPERTS", E - 1)
        monkeypatch.setattr(many_experts, "AFFINITY_TILE", (32, 16, 4, 2))
    case = drawn(generator, device, torch.bfloat16, scaled=True)
    assert few_tokens.in_ranges(case["x"], case["embedding"]) == (form == "ranges of features")
    check_zero_loss(case)


def test_an_embedding_of_16_bits_needs_no_split(generator: torch.Generator, device: str) -> None:
    """Its further parts are zeros: the same numbers in float32, which are split, give its bits."""
    case = drawn(generator, device, torch.float32, True)
    low = case["embedding"].bfloat16()
    found = [
        fused_route(*(case | {"embedding": embedding}).values(), K, True).affinity
        for embedding in (low, low.float())
    ]
    assert torch.equal(*found)


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
