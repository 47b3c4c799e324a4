"""The metric router: every expert judges a token by its own cluster's spread."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import acmoe
from acmoe.config.routing import MetricConfig, SMoEConfig
from acmoe.errors import UserError
from acmoe.routing.build import build_router
from acmoe.routing.metric import MetricRouter
from acmoe.routing.state import RoutingState
from acmoe.routing.statistics.step import fold_statistics


def router_of(config: MetricConfig | SMoEConfig, *, dim: int = 3, experts: int = 4, top_k: int = 2):
    torch.manual_seed(0)
    return build_router(config, dim=dim, num_experts=experts, top_k=top_k)


def state_of(num_tokens: int, dim: int = 3, experts: int = 4) -> RoutingState:
    return RoutingState.identity(num_tokens=num_tokens, num_clusters=experts, dim=dim)


def trained(config: MetricConfig, steps: int = 3, tokens: int = 40) -> MetricRouter:
    router = router_of(config)
    assert isinstance(router, MetricRouter)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        router(torch.randn(tokens, 3, generator=generator), state_of(tokens))
        fold_statistics(router)
    return router


def test_a_token_goes_to_the_expert_whose_spread_it_fits_as_worked_out_by_hand() -> None:
    # One feature, both means 0, variances 1 and 16. Half of x^2 / v + log v, at x = 1: 0.5 and
    # (1/16 + ln 16) / 2 = 1.4175; at x = 3: 4.5 and (9/16 + ln 16) / 2 = 1.6675.
    router = router_of(MetricConfig(strength=1.0), dim=1, experts=2, top_k=1)
    assert isinstance(router, MetricRouter)
    with torch.no_grad():
        router.embedding.zero_()
        router.statistics.moments.copy_(torch.tensor([[0.0, 1.0], [0.0, 16.0]]))
        router.statistics.weight.fill_(1e9)  # the prior's 16 tokens are nothing beside these
        affinity = router.affinity(torch.tensor([[1.0], [3.0]]))
    wanted = torch.tensor([[-0.5, -1.417545], [-4.5, -1.667545]])
    assert torch.allclose(affinity, wanted, atol=1e-5)
    routing = router.eval()(torch.tensor([[1.0], [3.0]]), state_of(2, 1, 2))
    assert routing.expert_ids[:, 0].tolist() == [0, 1]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 9))
def test_the_opened_square_is_the_distance(seed: int, tokens: int) -> None:
    router = trained(MetricConfig()).double()
    x_TD = torch.randn(tokens, 3, generator=torch.Generator().manual_seed(seed)).double()
    mean_ED, variance_ED = (m.double() for m in router.statistics.mean_and_variance())
    found_TE = router.distance(x_TD)
    for t in range(tokens):
        for e in range(4):
            wanted = sum(
                (x_TD[t, d] - mean_ED[e, d]) ** 2 / variance_ED[e, d] + math.log(variance_ED[e, d])
                for d in range(3)
            )
            assert found_TE[t, e].item() == pytest.approx(wanted.item() / 3, rel=1e-6, abs=1e-6)


@pytest.mark.usefixtures("no_native")
def test_strength_zero_is_the_plain_router() -> None:
    plain, metric = router_of(SMoEConfig()), trained(MetricConfig(strength=0.0))
    with torch.no_grad():
        metric.embedding.copy_(plain.embedding)
    x_TD = torch.randn(20, 3, generator=torch.Generator().manual_seed(2))
    one, other = plain(x_TD, state_of(20)), metric(x_TD, state_of(20))
    assert torch.equal(one.expert_ids, other.expert_ids)
    assert torch.equal(one.gate, other.gate)


def test_before_the_first_fold_it_chooses_as_the_plain_router() -> None:
    plain, metric = router_of(SMoEConfig()), router_of(MetricConfig(strength=5.0))
    x_TD = torch.randn(20, 3, generator=torch.Generator().manual_seed(2))
    one, other = plain(x_TD, state_of(20)), metric(x_TD, state_of(20))
    assert torch.equal(one.expert_ids, other.expert_ids)
    assert torch.allclose(one.gate, other.gate, atol=1e-6)


def test_moments_are_those_of_the_tokens_that_chose_the_expert_first() -> None:
    router = router_of(MetricConfig(momentum=0.5))
    assert isinstance(router, MetricRouter)
    generator = torch.Generator().manual_seed(3)
    total, weight = torch.zeros(4, 6, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for _ in range(3):
        x_TD = torch.randn(30, 3, generator=generator)
        mask_T = torch.rand(30, generator=generator) > 0.2
        first_T = router(x_TD, state_of(30), token_mask=mask_T).affinity.argmax(-1)
        fold_statistics(router)
        for e in range(4):
            own = x_TD[(first_T == e) & mask_T].double()
            if len(own) < 2:
                continue
            both = torch.cat([own, own**2], -1)
            total[e] = 0.5 * total[e] + both.sum(0)
            weight[e] = 0.5 * weight[e] + len(own)
    assert torch.allclose(router.statistics.weight.double(), weight, rtol=1e-6)
    # The moments of all tokens enter as 16 more tokens of each expert.
    pooled = total.sum(0) / weight.sum()
    mean, square = ((total + 16 * pooled) / (weight[:, None] + 16)).chunk(2, -1)
    found_mean, found_variance = router.statistics.mean_and_variance()
    assert torch.allclose(found_mean.double(), mean, atol=1e-5)
    assert torch.allclose(found_variance.double(), square - mean**2, atol=1e-5)


def test_a_large_common_offset_costs_no_digits() -> None:
    # Tokens 300 + N(0, 0.1^2): every expert's variance is near 0.01. The same tokens without the
    # offset, in float64, give the moments to compare with.
    router = router_of(MetricConfig(momentum=0.5))
    assert isinstance(router, MetricRouter)
    generator = torch.Generator().manual_seed(3)
    total, weight = torch.zeros(4, 6, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for drift in (0.0, 0.0, 50.0, 50.0):  # the tokens may move: the origin follows them
        x_TD = 300 + drift + 0.1 * torch.randn(200, 3, generator=generator)
        first_T = torch.arange(200) % 4
        router.statistics.record(x_TD, first_T, None)
        fold_statistics(router)
        for e in range(4):
            own = x_TD[first_T == e].double() - 300
            total[e] = 0.5 * total[e] + torch.cat([own, own**2], -1).sum(0)
            weight[e] = 0.5 * weight[e] + len(own)
        pooled = total.sum(0) / weight.sum()
        mean, square = ((total + 16 * pooled) / (weight[:, None] + 16)).chunk(2, -1)
        found_mean, found_variance = router.statistics.mean_and_variance()
        assert torch.allclose(found_variance.double(), square - mean**2, rtol=1e-3)
        assert torch.allclose(found_mean.double() - 300, mean, atol=1e-4)
        exact_TE = ((x_TD[:, None].double() - 300 - mean) ** 2 / (square - mean**2)).mean(-1)
        exact_TE = exact_TE + (square - mean**2).log().mean(-1)
        assert torch.allclose(router.distance(x_TD).double(), exact_TE, atol=0.02)
    assert found_variance.min() > 0.005


def test_a_checkpoint_without_an_origin_has_the_origin_zero() -> None:
    old = trained(MetricConfig())
    moments = old.state_dict()
    origin = moments.pop("statistics.origin")
    mean, square = moments["statistics.moments"].chunk(2, -1)  # of x - o; as they were, of x
    moments["statistics.moments"] = torch.cat(
        [mean + origin, square + 2 * origin * mean + origin**2], -1
    )
    new = router_of(MetricConfig())
    new.load_state_dict(moments)
    for found, wanted in zip(
        new.statistics.mean_and_variance(), old.statistics.mean_and_variance(), strict=True
    ):
        assert torch.allclose(found, wanted, atol=1e-5)


def test_single_tokens_count_within_a_step_and_not_over_steps() -> None:
    router = router_of(MetricConfig())
    assert isinstance(router, MetricRouter)
    moments, first_T = router.statistics, torch.tensor([0, 1, 1])
    for _ in range(3):  # a step of one batch
        moments.record(torch.randn(3, 3), first_T, None)
        fold_statistics(router)
    assert moments.weight[0] == 0 < moments.weight[1]
    for _ in range(2):  # a step of two micro-batches
        moments.record(torch.randn(3, 3), first_T, None)
    fold_statistics(router)
    assert moments.weight[0] == 2


def test_an_expert_nobody_chose_has_the_moments_of_all_tokens() -> None:
    router = trained(MetricConfig())
    with torch.no_grad():
        router.statistics.weight[2] = 0
    mean_ED, _ = router.statistics.mean_and_variance()
    weight_E1, moments = router.statistics.weight[:, None], router.statistics.moments[:, :3]
    wanted = router.statistics.origin + (weight_E1 * moments).sum(0) / weight_E1.sum()
    assert torch.allclose(mean_ED[2], wanted, atol=1e-6)


def test_no_token_reads_another_and_evaluation_changes_nothing() -> None:
    router = trained(MetricConfig()).eval()
    before = {name: value.clone() for name, value in router.state_dict().items()}
    x_TD = torch.randn(10, 3, generator=torch.Generator().manual_seed(4))
    other_TD = x_TD.clone()
    other_TD[5:] = 100.0
    one, two = router(x_TD, state_of(10)), router(other_TD, state_of(10))
    assert torch.equal(one.affinity[:5], two.affinity[:5])
    fold_statistics(router)
    assert all(torch.equal(value, before[name]) for name, value in router.state_dict().items())


def test_the_strength_learns_and_the_statistics_carry_no_gradient() -> None:
    router = trained(MetricConfig())
    routing = router(torch.randn(20, 3), state_of(20))
    (routing.gate[:, 0].sum() + routing.loss).backward()
    assert router.strength.grad is not None and router.strength.grad.abs() > 0
    assert router.embedding.grad is not None and router.embedding.grad.isfinite().all()


def test_a_layer_takes_it_by_name() -> None:
    moe = acmoe.MoE(dim=8, hidden=8, num_experts=4, top_k=2, router="metric")
    x_TD = torch.randn(12, 8)
    y_TD, state = moe(x_TD, state_of(12, 8))
    assert y_TD.shape == x_TD.shape and state.aux_loss.isfinite()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strength": -1.0}, "strength=-1.0"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"prior_tokens": 0.0}, "prior_tokens=0.0"),
        ({"floor": 0.0}, "floor=0.0"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MetricConfig(**options)
