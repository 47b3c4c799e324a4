"""The kernels of the cluster statistics for CPUs: numbers by hand, and what they hand over."""

import math

import pytest
import torch

from acmoe.errors import UserError
from acmoe.ops.dispatch import record_choices, use_backend
from acmoe.ops.statistics.op import measure_dispersion, measure_scale
from acmoe.ops.statistics.pending import add_batch
from acmoe.ops.statistics.recorded import record_dispersion, record_scale
from acmoe.ops.statistics.scale import ScaleOptions

X = torch.tensor([[0.0, 5.0], [2.0, 5.0], [7.0, 7.0]])
OPTIONS = ScaleOptions(
    normalize="cluster", strength=None, floor=1e-3, eps=0.0, clamp=None, min_tokens=2
)


@pytest.fixture(autouse=True)
def _cpu():
    with use_backend("cpu"):
        yield


@pytest.mark.parametrize(
    ("measure", "first"), [("mad", [1.0, 0.0]), ("variance", [1.0, 0.0]), ("std", [1.0, 0.0])]
)
def test_the_dispersion_of_two_clusters(measure: str, first: list[float]) -> None:
    with record_choices() as choices:
        spread, count = measure_dispersion(X, torch.tensor([0, 0, 2]), 3, measure=measure)
    assert [choice.kernel for choice in choices] == ["cpu"]
    assert spread.tolist() == [first, [0.0, 0.0], [0.0, 0.0]]
    assert count.tolist() == [2.0, 0.0, 1.0] and count.dtype == torch.float32


def test_the_scale_is_one_over_s_with_mean_one_and_ones_where_nothing_is_known() -> None:
    x = torch.tensor([[0.0, 0.0], [2.0, 6.0], [9.0, 9.0]])  # s = (1, 3): 1/s has mean 2/3
    with record_choices() as choices:
        scale = measure_scale(x, torch.tensor([0, 0, 1]), 2, OPTIONS, measure="mad")
    assert [choice.kernel for choice in choices] == ["cpu"]
    torch.testing.assert_close(scale, torch.tensor([[1.5, 0.5], [1.0, 1.0]]))


def test_a_feature_of_equal_values_far_from_zero_has_dispersion_zero() -> None:
    x = torch.tensor([[16777215.0, 1e6], [16777215.0, 1e6 + 1]] * 3)
    spread, _ = measure_dispersion(x, torch.zeros(6, dtype=torch.int64), 1, measure="mad")
    assert spread.tolist() == [[0.0, 0.5]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_token_spoils_its_own_cluster_alone(bad: float) -> None:
    x = torch.cat([X, torch.tensor([[bad, 0.0]])])
    spread, _ = measure_dispersion(x, torch.tensor([0, 0, 1, 1]), 2, measure="mad")
    assert spread[0].tolist() == [1.0, 0.0] and spread[1].isnan().all()
    scale = measure_scale(x, torch.tensor([0, 0, 1, 1]), 2, OPTIONS, measure="mad")
    assert scale[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_float64_dispersion_beyond_float32_leaves_the_pending_means_alone(backend: str) -> None:
    x = torch.tensor([[0.0, 1.0], [1e40, 3.0], [0.0, 1.0], [2.0, 5.0]], dtype=torch.float64)
    pending = torch.full((2, 2), 7.0), torch.zeros(2)
    with use_backend(backend):
        record_dispersion(pending, x, torch.tensor([0, 0, 1, 1]), 2, measure="mad")
    assert pending[0].tolist() == [[7.0, 7.0], [1.0, 2.0]]
    assert pending[1].tolist() == [0.0, 2.0]


def test_a_token_in_no_cluster_counts_nowhere_and_a_wrong_id_raises() -> None:
    spread, count = measure_dispersion(X, torch.tensor([0, 0, -1]), 1, measure="mad")
    assert spread.tolist() == [[1.0, 0.0]] and count.tolist() == [2.0]
    with pytest.raises(UserError, match="id 3"):
        measure_dispersion(X, torch.tensor([0, 0, 3]), 3, measure="mad")


def test_batches_add_up_to_the_mean_over_all_tokens() -> None:
    mean, count = torch.zeros(3, 2), torch.tensor([0.0, 4.0, 4.0])
    mean[1] = 8.0
    new = torch.tensor([[1.0, 3.0], [2.0, 5.0], [math.nan, 1.0]])
    before = mean._version
    with record_choices() as choices:
        add_batch(mean, count, new, torch.tensor([2.0, 2.0, 9.0]), 2)
    assert [choice.kernel for choice in choices] == ["cpu"]
    assert mean.tolist() == [[1.0, 3.0], [6.0, 7.0], [0.0, 0.0]]  # (4 * 8 + 2 * 2) / 6 = 6
    assert count.tolist() == [2.0, 6.0, 4.0]
    assert mean._version > before  # autograd sees the change


@pytest.mark.parametrize("measure", ["mad", "variance", "std"])
def test_the_dispersion_is_that_of_the_definition(measure: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(601, 7) + torch.tensor([0.0, 0.0, 1e3, 0.0, 0.0, 0.0, 0.0])
    cluster = torch.randint(4, (601,))
    with record_choices() as choices:
        found = measure_dispersion(x, cluster, 5, measure=measure)
    assert [choice.kernel for choice in choices] == ["cpu"]
    with use_backend("torch"):
        wanted = measure_dispersion(x, cluster, 5, measure=measure)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


def test_a_layer_measures_and_records_a_batch_in_one_call() -> None:
    x = torch.tensor([[0.0, 0.0], [2.0, 6.0], [9.0, 9.0]])  # s = (1, 3), as above
    pending = torch.tensor([[3.0, 7.0], [5.0, 5.0]]), torch.tensor([2.0, 0.0])
    versions = [one._version for one in pending]
    arguments = (x[None], torch.tensor([[0, 0, 1]]), 2)
    scale = record_scale(pending, *arguments, OPTIONS, measure="mad")
    assert scale.tolist() == [[1.5, 0.5], [1.0, 1.0]]
    # The mean of two tokens with (3, 7) and two with (1, 3); one token alone is not recorded.
    assert pending[0].tolist() == [[2.0, 5.0], [5.0, 5.0]] and pending[1].tolist() == [4.0, 0.0]
    record_dispersion(pending, *arguments, measure="mad")
    torch.testing.assert_close(pending[0], torch.tensor([[5 / 3, 13 / 3], [5.0, 5.0]]))
    assert pending[1].tolist() == [6.0, 0.0]
    assert all(one._version > old for one, old in zip(pending, versions, strict=True))


def test_tokens_with_a_gradient_are_measured_where_none_is_recorded() -> None:
    x = X.clone().requires_grad_()
    with torch.no_grad(), record_choices() as choices:
        spread, _ = measure_dispersion(x, torch.tensor([0, 0, 1]), 2, measure="mad")
    assert [choice.kernel for choice in choices] == ["cpu"]
    assert spread.tolist() == [[1.0, 0.0], [0.0, 0.0]]
