"""T tokens, D features, C clusters."""

from dataclasses import replace

import pytest
import torch

from acmoe.config.routing import AdaptiveConfig, RandomConfig, SMoEConfig
from acmoe.lab.study.synthetic.measures import (
    adjusted_rand,
    condition_number,
    correlation_with_truth,
    scale_used,
    steps_to,
)
from acmoe.lab.study.synthetic.model import SyntheticModel
from acmoe.lab.study.synthetic.task import SyntheticConfig, SyntheticTask
from acmoe.ops.statistics.scale import cluster_scale
from acmoe.routing.statistics.step import fold_statistics

PREVIOUS = AdaptiveConfig(statistics="batch", statistics_of="previous")
CURRENT = AdaptiveConfig(statistics="batch", statistics_of="current")


def built(config):
    torch.manual_seed(0)
    return SyntheticModel(config, SyntheticTask(config))


def passed(config, tokens=200):
    model = built(config)
    batch = SyntheticTask(config).sample(tokens, torch.Generator().manual_seed(1))
    return model, batch, model(batch.x, batch.cluster)


@pytest.mark.parametrize("layers", [1, 2])
def test_every_router_begins_with_the_same_weights(layers):
    plain = list(built(SyntheticConfig(layers=layers)).parameters())
    for router in (CURRENT, RandomConfig()):
        other = list(built(SyntheticConfig(layers=layers, router=router)).parameters())
        assert len(plain) == len(other)
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


def test_a_single_layer_takes_its_clusters_from_a_plain_pass_of_its_own_router():
    model, batch, out = passed(SyntheticConfig(layers=1, router=CURRENT))
    embedding_ED = model.moe(0).router.base.embedding
    expected_T = (batch.x @ embedding_ED.mT).argmax(-1)
    assert torch.equal(out.states[0].assignment[:, 0], expected_T)
    scale_CD = scale_used(model.moe(0).router, batch.x, out.states[0])
    torch.testing.assert_close(scale_CD, cluster_scale(batch.x, expected_T, 4))


def test_a_single_plain_layer_is_told_of_no_cluster():
    _, _, out = passed(SyntheticConfig(layers=1, router=SMoEConfig()))
    assert (out.states[0].assignment == -1).all()


def test_after_a_permutation_the_previous_scale_is_of_other_features_and_the_current_is_not():
    # Experts that say nothing: the second layer's input is the first one's, permuted.
    for router in (PREVIOUS, CURRENT):
        config = SyntheticConfig(router=router, between="permutation")
        model = built(config)
        with torch.no_grad():
            model.moe(0).experts.down.zero_()
        batch = SyntheticTask(config).sample(300, torch.Generator().manual_seed(1))
        out = model(batch.x, batch.cluster)
        first_T = out.states[1].assignment[:, 0]
        order_D = SyntheticTask(config).between_DD.argmax(1)
        torch.testing.assert_close(out.inputs[1], batch.x[:, order_D])
        expected_CD = cluster_scale(batch.x, first_T, 4)
        if router is CURRENT:
            expected_CD = expected_CD[:, order_D]
        torch.testing.assert_close(
            scale_used(model.moe(1).router, out.inputs[1], out.states[1]), expected_CD
        )


def test_the_oracle_of_clusters_tells_each_token_its_true_scale():
    config = SyntheticConfig(router=PREVIOUS, oracle="cluster", feature_range=4.0)
    _, batch, out = passed(config)
    state = out.states[-1]
    assert torch.equal(state.assignment[:, 0], batch.cluster)
    inverse_CD = 1 / SyntheticTask(config).stds(1)
    expected_CD = inverse_CD / inverse_CD.mean(1, keepdim=True)
    torch.testing.assert_close(state.scale.double(), expected_CD, rtol=1e-6, atol=0)


def test_the_oracle_of_scales_looks_up_the_most_frequent_true_cluster():
    model, _, out = passed(SyntheticConfig(router=PREVIOUS, oracle="scale"), tokens=6)
    told_TJ = torch.tensor([[0], [0], [0], [2], [2], [3]])
    state = out.states[-1]._replace(assignment=told_TJ)
    # Cluster 0 holds two of true cluster 3, cluster 2 two of 1, cluster 3 one of 0; 1 is empty, and
    # its row, which no token reads, is that of the first.
    scale_CD = model.with_oracle(state, torch.tensor([3, 1, 3, 1, 1, 0])).scale
    assert torch.equal(scale_CD, model.true_scale[[3, 0, 1, 0]])


def test_norms_stand_in_front_of_the_routers_when_asked_for():
    _, _, out = passed(SyntheticConfig(norm=True))
    for h_TD in out.inputs:
        torch.testing.assert_close(h_TD.mean(-1), torch.zeros(200), atol=1e-5, rtol=0)
        torch.testing.assert_close(h_TD.var(-1, correction=0), torch.ones(200), atol=1e-3, rtol=0)


def test_the_readout_sees_the_sum_of_both_layers():
    model, batch, out = passed(SyntheticConfig())
    first_TD, state = model.moe(0)(batch.x, out.states[0])
    second_TD, _ = model.moe(1)(batch.x + first_TD, state)
    expected_TO = model.readout(batch.x + first_TD + second_TD)
    torch.testing.assert_close(out.prediction, expected_TO)


def test_the_condition_number_of_two_axes():
    # Second moment diag(9 / 2, 1 / 2).
    assert condition_number(torch.tensor([[3.0, 0.0], [0.0, 1.0]])) == pytest.approx(9)


def test_the_condition_number_of_tokens_on_a_line_is_infinite_or_astronomic():
    assert condition_number(torch.tensor([[3.0, 0.0], [1.0, 0.0]])) > 1e15


def test_agreement_does_not_depend_on_the_numbers_of_clusters():
    first_T = torch.tensor([0, 0, 1, 1, 2])
    assert adjusted_rand(first_T, torch.tensor([2, 2, 0, 0, 1]), 3) == 1
    # One cluster holds all: as unlike as chance.
    assert adjusted_rand(first_T, torch.zeros_like(first_T), 3) == 0


def test_the_truth_of_a_scale_is_the_correlation_over_tokens_and_features():
    generator = torch.Generator().manual_seed(0)
    scale_CD = torch.rand(3, 5, generator=generator).double() + 0.1
    stds_CD = torch.rand(3, 5, generator=generator).double() + 0.1
    told_T = torch.randint(3, (40,), generator=generator)
    cluster_T = torch.randint(3, (40,), generator=generator)
    pairs = torch.stack([scale_CD[told_T].log().flatten(), -stds_CD[cluster_T].log().flatten()])
    expected = torch.corrcoef(pairs)[0, 1].item()
    assert correlation_with_truth(scale_CD, told_T, cluster_T, stds_CD) == pytest.approx(expected)


def test_a_scale_that_does_not_vary_has_no_truth():
    cluster_T = torch.tensor([0, 1, 1])
    stds_CD = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
    assert correlation_with_truth(torch.ones(2, 2), cluster_T, cluster_T, stds_CD) == 0
    assert correlation_with_truth(1 / stds_CD, cluster_T, cluster_T, stds_CD) == pytest.approx(1)


def test_the_first_step_at_the_threshold_counts_even_if_it_is_lost_again():
    assert steps_to(0.8, [0, 20, 40, 60], [0.1, 0.8, 0.2, 0.9]) == 20
    assert steps_to(0.95, [0, 20], [0.1, 0.8]) is None


def test_running_statistics_change_between_updates_and_never_inside_one():
    config = SyntheticConfig(router=replace(PREVIOUS, statistics="running"))
    model, batch, out = passed(config)
    assert torch.equal(out.states[1].scale, torch.ones(4, 16))
    assert torch.equal(model(batch.x, batch.cluster).states[1].scale, torch.ones(4, 16))
    fold_statistics(model)
    # The first batch is the whole average, so the scale is that of its dispersions.
    found = model(batch.x, batch.cluster).states[1]
    expected_CD = cluster_scale(batch.x, found.assignment[:, 0], 4)
    torch.testing.assert_close(found.scale, expected_CD)
