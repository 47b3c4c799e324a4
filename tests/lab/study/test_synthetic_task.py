"""T tokens, D features, C clusters, O outputs."""

import math
from dataclasses import replace

import pytest
import torch

from acmoe.config.routing import AdaptiveConfig
from acmoe.data.synthetic import GaussianClusters
from acmoe.errors import UserError
from acmoe.lab.study.synthetic.task import SyntheticConfig, SyntheticTask

PREVIOUS = AdaptiveConfig(statistics="batch", statistics_of="previous")


def drawn(config, tokens=50, **options):
    return SyntheticTask(config).sample(tokens, torch.Generator().manual_seed(3), **options)


@pytest.mark.parametrize("teacher", ["linear", "mlp"])
def test_each_token_is_taught_by_its_own_cluster(teacher):
    config = SyntheticConfig(teacher=teacher)
    task = SyntheticTask(config)
    batch = drawn(config)
    for x_D, target_O, cluster in zip(*batch, strict=True):
        expected_O = task.first_COD[cluster] @ x_D.double()
        if teacher == "mlp":
            expected_O = task.second_COH[cluster] @ torch.tanh(2 * expected_O)
        torch.testing.assert_close(target_O.double(), expected_O, atol=1e-5, rtol=1e-5)


def test_contamination_moves_tokens_and_leaves_targets_alone():
    config = SyntheticConfig(feature_range=4.0)
    clean, noisy = drawn(config, 4000), drawn(config, 4000, contamination=0.5)
    assert torch.equal(clean.target, noisy.target)
    assert torch.equal(clean.cluster, noisy.cluster)
    # Noise is measured in the units of each feature; the error of a std is 1 / sqrt(2 * 4000).
    moved_D = ((noisy.x - clean.x).double() / SyntheticTask(config).unit_D).std(0)
    assert (moved_D / 0.5 - 1).abs().max() < 5 / math.sqrt(8000)


def test_units_of_features_span_the_range_asked_for():
    unit_D = SyntheticTask(SyntheticConfig(feature_range=16.0)).unit_D
    assert (unit_D.max() / unit_D.min()).item() == pytest.approx(16)
    # Their geometric mean is one.
    assert unit_D.log().mean().item() == pytest.approx(0, abs=1e-12)


def test_tasks_depend_on_the_seed_and_not_on_the_router():
    config = SyntheticConfig(between="rotation")
    same = SyntheticTask(replace(config, router=PREVIOUS))
    other = SyntheticTask(replace(config, seed=1))
    assert torch.equal(SyntheticTask(config).first_COD, same.first_COD)
    assert torch.equal(SyntheticTask(config).between_DD, same.between_DD)
    assert not torch.equal(SyntheticTask(config).first_COD, other.first_COD)


def test_a_permutation_between_layers_deals_the_deviations_out_anew():
    task = SyntheticTask(SyntheticConfig(between="permutation"))
    order_D = task.between_DD.argmax(1)  # feature q of the second layer was order[q] of the first
    assert order_D.tolist() != list(range(16))
    torch.testing.assert_close(task.stds(1), task.stds(0)[:, order_D])


def test_deviations_after_a_rotation_are_those_of_the_rotated_tokens():
    config = SyntheticConfig(between="rotation")
    task = SyntheticTask(config)
    torch.testing.assert_close(
        task.between_DD @ task.between_DD.mT, torch.eye(16, dtype=torch.float64)
    )
    batch = drawn(config, 40_000)
    turned_TD = batch.x.double() @ task.between_DD.mT
    for c in range(4):
        found_D = turned_TD[batch.cluster == c].std(0)
        # About 10,000 tokens a cluster: 5 standard errors.
        assert (found_D / task.stds(1)[c] - 1).abs().max() < 5 / math.sqrt(2 * 9_500)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 3}, "layers=3"),
        ({"layers": 1, "router": PREVIOUS}, "use statistics_of='current'"),
        ({"layers": 1, "between": "rotation"}, "use layers=2"),
        ({"oracle": "scale"}, "use an AdaptiveConfig"),
        ({"oracle": "cluster", "router": replace(PREVIOUS, mix=2)}, "mix=1"),
        ({"router": AdaptiveConfig(statistics="prefix")}, "use batch or running"),
        ({"feature_range": 0.5}, "feature_range=0.5"),
        ({"contamination": (0.0,)}, "contamination=0.0"),
        ({"steps": 0}, "steps=0"),
        ({"threshold": 0.0}, "threshold=0.0"),
        ({"lr": 0.0}, "lr=0.0"),
        ({"between": "drift"}, "between='drift'"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(changes, message):
    with pytest.raises(UserError, match=message) as error:
        SyntheticConfig(**changes)
    assert "\n" not in str(error.value)


def test_impossible_clusters_are_refused_by_the_mixture_itself():
    with pytest.raises(UserError, match="dim=8"):
        SyntheticConfig(clusters=GaussianClusters(num_clusters=4, dim=8, tight_features=4))
