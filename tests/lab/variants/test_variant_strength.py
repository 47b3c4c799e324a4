"""Lambda of Theorem 1 on a schedule, and learned.

T tokens, D features, C clusters.
"""

import copy
import math

import pytest
import torch
from filled_layers import see
from router_loops import dispersion, matrix, rows, scales
from variant_cases import taker

from acmoe import MoE, RoutingState, UserError, fold_statistics, override_statistics
from acmoe.lab.variants import VariantConfig
from acmoe.ops.statistics.scale import scale_from_dispersion

SCHEDULE = {"strength": 4.0, "strength_end": 0.25, "strength_steps": 4}


def tokens(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(12, 4, generator=generator), torch.arange(12) % 3


def test_lambda_moves_by_one_factor_a_step_and_then_stays():
    # From 4 to 1/4 in 4 steps: a factor of 2 each.
    strength = taker(**SCHEDULE).strength
    seen = []
    for _ in range(6):
        seen.append(strength().item())
        strength.record()
        fold_statistics(strength)
        fold_statistics(strength)  # no forward has come since: it counts nothing
    assert seen == pytest.approx([4.0, 2.0, 1.0, 0.5, 0.25, 0.25], rel=1e-12)


@pytest.mark.parametrize("mode", ["batch", "running"])
def test_a_scheduled_scale_is_that_of_the_steps_own_lambda(mode):
    statistics = taker(statistics=mode, momentum=0.0, **SCHEDULE)
    x, cluster = tokens()
    see(statistics, x, cluster)
    fold_statistics(statistics)  # step 1: lambda 2, and the average is this batch's
    for lam in (2.0, 1.0, 0.5, 0.25, 0.25):
        spreads = dispersion(rows(x.double()), cluster.tolist(), 3)
        wanted = matrix(scales(spreads, 4, strength=lam))
        found = see(statistics, x, cluster)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-6)
        fold_statistics(statistics)


def test_what_an_update_leaves_in_the_buffer_is_the_next_steps_scale():
    # A captured CUDA graph reads `running_scale` and asks nobody whether it is fresh.
    statistics = taker(momentum=0.0, **SCHEDULE)
    see(statistics, *tokens())
    fold_statistics(statistics)
    kept = statistics.running_scale.clone()
    assert torch.equal(see(statistics, *tokens()), kept)
    fold_statistics(statistics)
    assert not torch.equal(statistics.running_scale, kept)


def test_the_schedule_goes_on_where_a_checkpoint_was_made():
    first = taker(**SCHEDULE)
    for seed in range(2):
        see(first, *tokens(seed))
        fold_statistics(first)
    second = taker(**SCHEDULE)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for seed in range(2, 5):
        found = [see(each, *tokens(seed)) for each in (first, second)]
        assert torch.equal(*found)
        fold_statistics(first)
        fold_statistics(second)
    assert second.strength().item() == pytest.approx(0.25)


def test_a_constant_lambda_adds_nothing_to_a_checkpoint():
    names = set(taker(strength=1.0).state_dict())
    assert names == {"dispersion", "weight"}
    assert set(taker(**SCHEDULE).state_dict()) == names | {"strength.step"}
    learned = taker(strength=1.0, learn_strength=True)
    assert set(learned.state_dict()) == names | {"strength.log_strength"}


def test_steps_are_counted_in_float32_whatever_the_model_is_cast_to():
    statistics = taker(**SCHEDULE)
    see(statistics, *tokens())
    fold_statistics(statistics)
    assert statistics.bfloat16().strength.step.dtype == torch.float32
    assert statistics.strength().item() == pytest.approx(2.0)


@pytest.mark.parametrize("mode", ["batch", "running", "prefix", "sequence"])
@pytest.mark.parametrize("power", [1.0, 0.5])
def test_the_gradient_of_log_lambda_is_that_of_finite_differences(mode, power):
    statistics = taker(statistics=mode, strength=0.7, learn_strength=True, power=power).double()
    x, cluster = tokens()
    x = x.double().requires_grad_()
    see_all = {
        "prefix": lambda: statistics.prefix_scale(x[None], cluster[None, :, None], None, None)
    }.get(mode, lambda: see(statistics, x, cluster))
    see_all()
    fold_statistics(statistics)
    cotangent = torch.randn(see_all().shape, generator=torch.Generator().manual_seed(1)).double()

    def value():
        return (see_all() * cotangent).sum()

    value().backward()
    log_strength = statistics.strength.log_strength
    # Running statistics are float32 buffers, and so are scales made of them: a wider difference.
    step, tolerance = (1e-2, 1e-3) if mode == "running" else (1e-5, 1e-6)
    found = log_strength.grad.item()
    assert x.grad is None  # the dispersion stays a constant
    with torch.no_grad():
        log_strength.add_(step)
        above = value().item()
        log_strength.sub_(2 * step)
        below = value().item()
    assert abs(found) > 1e-3
    assert found == pytest.approx((above - below) / (2 * step), rel=tolerance)


def test_a_learned_lambda_is_reached_from_the_next_layers_gates():
    torch.manual_seed(0)
    config = VariantConfig(statistics="batch", strength=0.5, learn_strength=True)
    layers = torch.nn.ModuleList(
        MoE(dim=4, hidden=8, num_experts=3, top_k=2, router=config) for _ in range(2)
    )
    state = RoutingState.identity(num_tokens=30, num_clusters=3, dim=4)
    y, state = layers[0](torch.randn(30, 4), state)
    assert state.scale.requires_grad
    y, _ = layers[1](y, state)
    y.square().sum().backward()
    strength = layers[0].next_state.statistics.strength.log_strength
    assert strength.exp().item() == pytest.approx(0.5)
    assert strength.grad.abs() > 0


def test_at_its_first_value_a_learned_lambda_gives_the_scale_of_a_constant_one():
    s_CD, count_C = torch.rand(3, 4) + 0.1, torch.full((3,), 9.0)
    statistics = taker(strength=0.5, learn_strength=True)
    statistics.dispersion.copy_(s_CD)
    statistics.weight.copy_(count_C)
    wanted = scale_from_dispersion(s_CD, count_C, strength=math.exp(math.log(0.5)))
    found = see(statistics.eval(), *tokens())
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_learned_lambda_cannot_be_overridden():
    moe = MoE(
        dim=4,
        hidden=8,
        num_experts=3,
        top_k=2,
        router=VariantConfig(strength=0.5, learn_strength=True),
    )
    with (
        pytest.raises(UserError, match=r"strength=2.0 cannot be overridden where it is learned"),
        override_statistics(moe, strength=2.0),
    ):
        pass


def test_variant_fields_can_be_overridden_but_those_a_model_is_built_with():
    moe = MoE(dim=4, hidden=8, num_experts=3, top_k=2, router=VariantConfig(power=0.5))
    with override_statistics(moe, power=0.25, part="own"):
        assert moe.next_state.statistics.config.power == 0.25
        assert moe.router.config.part == "own"
    assert moe.next_state.statistics.config == VariantConfig(power=0.5)
    for name in ("center", "match", "learn_strength", "strength_end"):
        with (
            pytest.raises(UserError, match=rf"{name}=True cannot be overridden"),
            override_statistics(moe, **{name: True}),
        ):
            pass
    plain = MoE(dim=4, hidden=8, num_experts=3, top_k=2, router="adaptive")
    with (
        pytest.raises(UserError, match=r"power=0.5 cannot be overridden"),
        override_statistics(plain, power=0.5),
    ):
        pass
