"""The router in C: a float64 loop, the definition, and gradients of any order.

T tokens, D features, E experts, K experts per token.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from two_of_three import EMBEDDING_ED, OPTIONS, X_TD, check_by_hand, kernel_of

from acmoe import MoE
from acmoe.ops.dispatch import record_choices
from acmoe.ops.native.library import missing
from acmoe.ops.route import Route, ScaledTokens, native, route

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no C kernels here: {missing()}")


def case(
    tokens: int, dim: int, experts: int, seed: int, *, scaled: bool, bias: bool
) -> tuple[ScaledTokens, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, dim, generator=generator)
    given = ScaledTokens(x)
    if scaled:
        cluster_T = torch.randint(-1, experts, (tokens,), generator=generator)
        scale = torch.randn(experts, dim, generator=generator).exp()
        given = ScaledTokens(x, scale, cluster_T)
    embedding = torch.randn(experts, dim, generator=generator)
    return given, embedding, torch.randn(experts, generator=generator) if bias else None


def by_loops(
    tokens: ScaledTokens, embedding: Tensor, bias: Tensor | None, top_k: int, temperature: float
) -> tuple[list[list[int]], list[list[float]], list[float]]:
    """Return the chosen experts, gates over the chosen, and gate sums, by loops in float64."""
    ids, gates, sums = [], [], [0.0] * len(embedding)
    for t, x_D in enumerate(tokens.x.double().tolist()):
        cluster = -1 if tokens.assignment is None else int(tokens.assignment[t])
        if tokens.scale is not None and cluster >= 0:
            scale_D = tokens.scale[cluster].double().tolist()
            x_D = [x * s for x, s in zip(x_D, scale_D, strict=True)]
        values = [
            sum(x * w for x, w in zip(x_D, w_D, strict=True)) for w_D in embedding.double().tolist()
        ]
        if bias is not None:
            values = [v + b for v, b in zip(values, bias.double().tolist(), strict=True)]
        best = sorted(range(len(values)), key=lambda e: -values[e])[:top_k]
        weights = [math.exp(values[e] - values[best[0]]) for e in best]
        ids.append(best)
        gates.append([one / sum(weights) for one in weights])
        all_of = [math.exp((v - values[best[0]]) / temperature) for v in values]
        sums = [total + one / sum(all_of) for total, one in zip(sums, all_of, strict=True)]
    return ids, gates, sums


def test_experts_are_ranked_and_their_gates_sum_to_one() -> None:
    assert kernel_of(ScaledTokens(X_TD), EMBEDDING_ED) == "native"
    check_by_hand()
    # M = diag(1, 3) for the second token alone: its affinities are 3 and 0 as before, and for the
    # first, whose cluster is -1, nothing changes.
    scale_CD = torch.tensor([[9.0, 9.0], [1.0, 3.0]])
    tokens = ScaledTokens(X_TD, scale_CD, torch.tensor([-1, 1]))
    assert route(tokens, EMBEDDING_ED, None, **OPTIONS).affinity.tolist() == [
        [1, 2, -3],
        [3, 0, -3],
    ]
    tokens = ScaledTokens(X_TD, scale_CD, torch.tensor([1, 1]))
    assert route(tokens, EMBEDDING_ED, None, **OPTIONS).affinity[0].tolist() == [1, 6, -7]


@given(
    tokens=st.integers(1, 40),
    dim=st.integers(1, 33),
    experts=st.integers(2, 19),
    top_k=st.integers(1, 19),
    scaled=st.booleans(),
    bias=st.booleans(),
    temperature=st.sampled_from([1.0, 0.7]),
    seed=st.integers(0, 99),
)
def test_results_are_those_of_loops_in_float64(
    tokens: int,
    dim: int,
    experts: int,
    top_k: int,
    scaled: bool,
    bias: bool,
    temperature: float,
    seed: int,
) -> None:
    top_k = min(top_k, experts)
    args = case(tokens, dim, experts, seed, scaled=scaled, bias=bias)
    options = {"top_k": top_k, "over_selected": True, "temperature": temperature}
    assert kernel_of(*args, **options) == "native"
    found = route(*args, **options)
    ids, gates, sums = by_loops(*args, top_k, temperature)
    assert found.expert_ids.tolist() == ids  # random float32 numbers have no ties here
    assert found.gate_sum is not None and found.load is not None
    torch.testing.assert_close(found.gate, torch.tensor(gates), rtol=2e-4, atol=1e-6)
    torch.testing.assert_close(found.gate_sum, torch.tensor(sums), rtol=2e-4, atol=1e-5)
    assert found.load.tolist() == torch.tensor(ids).flatten().bincount(minlength=experts).tolist()


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, 0.0, -0.0])
def test_bad_huge_and_equal_values_are_ranked_as_in_the_definition(
    value: float, top_k: int
) -> None:
    x_TD, embedding_ED = torch.ones(3, 3), torch.eye(4, 3)
    scale_CD, cluster_T = torch.ones(4, 3), torch.tensor([0, 1, 2])
    for bad in (x_TD, embedding_ED, scale_CD):
        kept = bad[0, 1].item()
        bad[0, 1] = value
        options = {**OPTIONS, "top_k": top_k, "temperature": 1.0}
        args = (ScaledTokens(x_TD, scale_CD, cluster_T), embedding_ED, None)
        assert kernel_of(*args, **options) == "native"
        found, wanted = route(*args, **options), route.definition(*args, **options)
        for one, other in zip(found[:8], wanted[:8], strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)
        bad[0, 1] = kept


def test_whole_numbers_have_ties_that_the_lowest_expert_wins() -> None:
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randint(-1, 2, (200, 3), generator=generator).float()
    embedding_ED = torch.randint(-1, 2, (9, 3), generator=generator).float()
    for top_k in range(1, 10):
        options = {"top_k": top_k, "over_selected": top_k % 2 == 0}
        found = route(ScaledTokens(x_TD), embedding_ED, None, **options)
        wanted = route.definition(ScaledTokens(x_TD), embedding_ED, None, **options)
        assert torch.equal(found.expert_ids, wanted.expert_ids)
        torch.testing.assert_close(found.gate, wanted.gate)


def objective(found: Route, upstream: list[Tensor], weight: float) -> Tensor:
    """Return a number that depends on everything that has a gradient."""
    balance = found.balance
    if balance is None and found.gate_sum is not None and found.load is not None:
        share_E = found.load / found.load.sum()
        mean_E = found.gate_sum / len(found.gate)
        balance = weight * len(share_E) * (share_E * mean_E).sum()
    total = 0.5 * (found.x.square() * upstream[2].view(found.x.shape)).sum()
    total = total + (found.gate * upstream[0]).sum() + (found.affinity.sin() * upstream[1]).sum()
    return total if balance is None else total + balance


@pytest.mark.parametrize("over_selected", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("temperature", [None, 1.0, 0.7])
def test_gradients_and_those_of_gradients_are_those_of_the_definition(
    temperature: float | None, scaled: bool, over_selected: bool
) -> None:
    T, D, E, K, weight = 9, 10, 11, 3, 0.3  # no multiples of 8, nor of 4
    tokens, embedding, bias = case(T, D, E, 3, scaled=scaled, bias=True)
    assert bias is not None
    embedding *= 0.2  # gates near 0 and 1 would have second derivatives of rounding alone
    upstream = [torch.randn(T, K), torch.randn(T, E), torch.randn(T, D)]
    options = {"top_k": K, "over_selected": over_selected, "temperature": temperature}
    found = []
    for run in (route, route.definition):
        x, *weights = (one.clone().requires_grad_() for one in (tokens.x, embedding, bias))
        leaves = [x, *weights]
        result = run(tokens._replace(x=x.view(3, 3, D)), *weights, **options, balance_weight=weight)
        assert (result.balance is not None) == (run is route and temperature is not None)
        loss = objective(result, upstream, weight)
        plain = torch.autograd.grad(loss, leaves, retain_graph=True)
        again = torch.autograd.grad(loss, leaves, create_graph=True)
        second = torch.autograd.grad(sum(one.square().sum() for one in again), leaves)
        found.append([*plain, *again, *second])
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() <= 5e-5 * other.abs().max() > 0


def test_a_sum_of_gates_without_a_weight_has_its_gradient() -> None:
    tokens, embedding, _ = case(7, 5, 6, 1, scaled=True, bias=False)
    upstream_E, found = torch.randn(6), []
    for run in (route, route.definition):
        learned = embedding.clone().requires_grad_()
        result = run(tokens, learned, None, **OPTIONS, temperature=0.5)
        assert result.balance is None and result.gate_sum is not None
        found += torch.autograd.grad((result.gate_sum * upstream_E).sum(), learned)
    torch.testing.assert_close(*found)


def test_many_gradients_at_once_and_missing_ones() -> None:
    tokens, embedding, _ = case(6, 4, 5, 2, scaled=True, bias=False)
    x = tokens.x.clone().requires_grad_()
    found = route(tokens._replace(x=x), embedding, None, **OPTIONS)
    upstream = torch.randn(3, *found.gate.shape)
    one = [torch.autograd.grad(found.gate, x, g, retain_graph=True)[0] for g in upstream]
    (batched,) = torch.autograd.grad(
        found.gate, x, upstream, is_grads_batched=True, retain_graph=True
    )
    torch.testing.assert_close(batched, torch.stack(one))
    (alone,) = torch.autograd.grad(found.x.sum(), x)  # nobody reads gates and affinities
    assert torch.equal(alone, torch.ones_like(x))


def test_gradients_inside_transforms_and_of_dual_numbers() -> None:
    tokens, embedding, _ = case(3, 8, 5, 4, scaled=True, bias=False)
    x = tokens.x.clone().requires_grad_()
    found = route(tokens._replace(x=x), embedding, None, **OPTIONS)

    def pulled(upstream: Tensor) -> Tensor:
        return torch.autograd.grad(found.gate, x, upstream, retain_graph=True)[0]

    upstream = torch.randn(4, *found.gate.shape)
    one_by_one = torch.stack([pulled(one) for one in upstream])
    torch.testing.assert_close(torch.func.vmap(pulled)(upstream), one_by_one)
    _, tangent = torch.func.jvp(pulled, (upstream[0],), (upstream[1],))
    torch.testing.assert_close(tangent, one_by_one[1])  # it is linear


@pytest.mark.parametrize("frozen", [True, False])
def test_only_what_a_gradient_reads_must_stay_as_it_is(frozen: bool) -> None:
    embedding = torch.randn(5, 8).requires_grad_(not frozen)
    begin = torch.randn(4, 8, requires_grad=True)
    x = begin * 2
    found = route(ScaledTokens(x), embedding, None, **OPTIONS)
    assert (found.x is x) == frozen
    x += 1  # as an in-place residual
    if frozen:
        (found.gate[:, 0].sum() + x.sum()).backward()
        assert begin.grad is not None and begin.grad.abs().max() > 0
    else:
        with pytest.raises(RuntimeError, match="inplace"):
            found.gate[:, 0].sum().backward()
    fixed = torch.randn(4, 8)
    trained = route(ScaledTokens(fixed), embedding.detach().requires_grad_(), None, **OPTIONS)
    assert trained.x is fixed and trained.gate.requires_grad


def test_whole_numbers_of_numpy_and_views_with_a_sign_are_taken() -> None:
    torch.manual_seed(0)
    moe = MoE(dim=8, hidden=4, num_experts=5, top_k=np.int64(2)).eval()
    x = torch.randn(6, 8)
    with torch.no_grad():
        wanted = moe(x)[0]
        torch.testing.assert_close(moe(torch._neg_view(-x))[0], wanted)
    assert moe(x)[0].requires_grad


def test_a_bias_of_another_size_is_none_of_its_business() -> None:
    x, embedding = torch.randn(5, 8), torch.randn(8, 8)
    with pytest.raises(RuntimeError, match="size"):
        route(ScaledTokens(x), embedding, torch.randn(3), **OPTIONS)
    found = route(ScaledTokens(x), embedding, torch.tensor([2.0]), **OPTIONS)
    torch.testing.assert_close(found.affinity, x @ embedding.T + 2)


def test_rescaled_tokens_are_routed_as_tokens_and_the_layer_keeps_its_own() -> None:
    tokens, embedding, bias = case(9, 5, 3, 4, scaled=False, bias=True)
    x = tokens.x.requires_grad_()
    found = native.route_in_c(ScaledTokens(x, product=2 * x), embedding, bias, **OPTIONS)
    wanted = native.route_in_c(ScaledTokens(2 * x), embedding, bias, **OPTIONS)
    assert kernel_of(ScaledTokens(x, product=2 * x), embedding) == "native"
    assert found.x is x
    for one, other in zip(found[:3], wanted[:3], strict=True):
        assert torch.equal(one, other)
    given = torch.randn(9, 2)
    expected = torch.autograd.grad(wanted.gate, x, given)[0]
    assert torch.equal(torch.autograd.grad(found.gate, x, given)[0], expected)


class Watched(Tensor):
    """A subclass, whose calls somebody may observe."""


def test_other_calls_run_other_kernels() -> None:
    x, embedding = torch.randn(3, 4), torch.randn(5, 4)
    many = torch.randn(native.MOST // 20 + 1, 4)
    few = torch.randn(native.MOST_WITH_GRADIENT // 20 + 1, 4)
    assert kernel_of(ScaledTokens(x), embedding, top_k=1) == "native"
    assert kernel_of(ScaledTokens(x), embedding.clone().requires_grad_()) == "native"
    others = [
        ScaledTokens(x[:0]),
        ScaledTokens(many),
        ScaledTokens(few.requires_grad_()),
        ScaledTokens(x.bfloat16()),
        ScaledTokens(torch.randn(4, 3).T),
        ScaledTokens(x.bfloat16(), product=2 * x),
        ScaledTokens(x.as_subclass(Watched)),
        ScaledTokens(x, torch.ones(5, 4).requires_grad_(), torch.tensor([0, 1, 2])),
    ]
    for one in others:
        assert kernel_of(one, embedding) != "native"
    assert kernel_of(ScaledTokens(few.detach()), embedding) == "native"
    wide = torch.randn(1, native.MOST_WEIGHTS // 5 + 1)
    assert kernel_of(ScaledTokens(wide), wide.repeat(5, 1)) == "cpu"
    assert kernel_of(ScaledTokens(x), embedding, noise=torch.randn(3, 5)) == "torch"
    assert kernel_of(ScaledTokens(x), embedding, token_mask=torch.ones(3).bool()) == "torch"
    with torch.autocast("cpu", torch.bfloat16):
        assert kernel_of(ScaledTokens(x), embedding) == "torch"
    with torch.inference_mode():
        frozen = embedding.clone()
    assert kernel_of(ScaledTokens(x), frozen) == "native"
    with pytest.raises(RuntimeError, match="Inference tensors"):  # of torch, in the definition
        route(ScaledTokens(x.clone().requires_grad_()), frozen, None, **OPTIONS)


def test_a_cluster_that_does_not_exist_is_named() -> None:
    tokens = ScaledTokens(torch.randn(2, 4), torch.ones(3, 4), torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="id 3"):
        route(tokens, torch.randn(3, 4), None, **OPTIONS)


def test_identity_scales_change_no_bit() -> None:
    x, embedding = torch.randn(30, 12), torch.randn(7, 12)
    plain = route(ScaledTokens(x), embedding, None, **OPTIONS)
    ones = ScaledTokens(x, torch.ones(7, 12), torch.arange(30) % 7)
    for one, other in zip(plain[:5], route(ones, embedding, None, **OPTIONS)[:5], strict=True):
        assert torch.equal(one, other)


def test_a_layer_trains_as_with_the_definition(without_native: Any) -> None:
    """The fixture leaves the C kernels out of the second training."""
    losses = []
    for leave in (False, True):
        if leave:
            without_native()
        torch.manual_seed(0)
        moe = MoE(dim=16, hidden=8, num_experts=6, top_k=3, router="adaptive")
        after = MoE(dim=16, hidden=8, num_experts=6, top_k=3, router="adaptive")
        optimizer = torch.optim.SGD([*moe.parameters(), *after.parameters()], lr=0.5)
        x = torch.randn(4, 8, 16)
        for _ in range(4):
            with record_choices() as choices:
                y, state = moe(x)
                y, state = after(x + y, state)
            assert ("native" in {one.kernel for one in choices}) != leave
            loss = (y - x).square().mean() + state.aux_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:4] == pytest.approx(losses[4:], rel=1e-5)
    assert losses[3] < losses[0]


def test_a_profiler_sees_the_calls_that_run_without_it() -> None:
    moe = MoE(dim=4, hidden=4, num_experts=3, top_k=2, router="adaptive")
    x = torch.randn(5, 4)

    def step() -> Tensor:
        y, state = moe(x)
        (y.sum() + state.aux_loss).backward()
        return y

    with record_choices() as alone:
        y = step()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu) as profile, record_choices() as observed:
        torch.testing.assert_close(step(), y, rtol=0, atol=0)
    assert [one.kernel for one in observed] == [one.kernel for one in alone]
    names = {event.key for event in profile.key_averages()}
    assert names >= {"acmoe::route in C", "acmoe::route_backward in C", "acmoe::sort_rows in C"}
