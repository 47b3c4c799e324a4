"""Cluster statistics in C: numbers by hand, loops in float64, and what the definition serves.

T tokens, D features, C clusters.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from acmoe.errors import UserError
from acmoe.ops.dispatch import record_choices, use_backend
from acmoe.ops.native.library import missing
from acmoe.ops.statistics import native
from acmoe.ops.statistics.op import measure_dispersion, measure_scale
from acmoe.ops.statistics.recorded import record_dispersion, record_scale
from acmoe.ops.statistics.scale import ScaleOptions, scale_of

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no C kernels here: {missing()}")
OPTIONS = ScaleOptions(
    normalize="cluster", strength=None, floor=1e-3, eps=0.0, clamp=None, min_tokens=2
)
X = torch.tensor([[0.0, 5.0], [2.0, 5.0], [7.0, 7.0]])


def by_loops(x_TD: Tensor, cluster_T: Tensor, C: int, measure: str) -> list[list[float]]:
    found = []
    for c in range(C):
        rows = [row for row, own in zip(x_TD.double().tolist(), cluster_T, strict=True) if own == c]
        features = list(zip(*rows, strict=True)) or [()] * x_TD.shape[1]
        means = [math.fsum(one) / max(len(one), 1) for one in features]
        power = 1 if measure == "mad" else 2
        away = [
            math.fsum(abs(v - mean) ** power for v in one) / max(len(one), 1)
            for one, mean in zip(features, means, strict=True)
        ]
        found.append([math.sqrt(one) if measure == "std" else one for one in away])
    return found


def kernels_of(*args: object, **options: object) -> list[str]:
    with record_choices() as choices:
        measure_dispersion(*args, **options)  # type: ignore[arg-type]
    return [choice.kernel for choice in choices]


def test_a_scale_by_hand() -> None:
    cluster_T = torch.tensor([0, 0, 1])
    assert kernels_of(X, cluster_T, 2, measure="mad") == ["native"]
    spread, count = measure_dispersion(X, cluster_T, 2, measure="mad")
    assert spread.tolist() == [[1.0, 0.0], [0.0, 0.0]] and count.tolist() == [2.0, 1.0]
    x = torch.tensor([[0.0, 0.0], [2.0, 6.0], [1.0, 1.0]])  # mad (1, 3): 1/s = (1, 1/3), mean 2/3
    scale = measure_scale(x, cluster_T, 2, OPTIONS, measure="mad")
    assert scale.tolist() == [[1.5, 0.5], [1.0, 1.0]]
    # eps = 1: 1/(s + 1) = (1/2, 1/4), mean 3/8; the single token has s = 0 and all weights equal.
    scale = measure_scale(x, cluster_T, 2, OPTIONS._replace(eps=1.0, min_tokens=0), measure="mad")
    torch.testing.assert_close(scale, torch.tensor([[4 / 3, 2 / 3], [1.0, 1.0]]))
    # s = (1, 0): the floor raises 0 to a tenth of the mean, 0.05; 1/s = (1, 20), mean 10.5.
    scale = measure_scale(X, cluster_T, 2, OPTIONS._replace(floor=0.1), measure="mad")
    torch.testing.assert_close(scale[0], torch.tensor([1 / 10.5, 20 / 10.5]))


@given(
    tokens=st.integers(1, 60),
    dim=st.integers(1, 21),
    clusters=st.integers(1, 7),
    measure=st.sampled_from(["mad", "variance", "std"]),
    offset=st.sampled_from([0.0, 100.0]),
    seed=st.integers(0, 99),
)
def test_dispersions_are_those_of_loops_in_float64(
    tokens: int, dim: int, clusters: int, measure: str, offset: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(tokens, dim, generator=generator) + offset
    cluster_T = torch.randint(clusters, (tokens,), generator=generator)
    assert kernels_of(x_TD, cluster_T, clusters, measure=measure) == ["native"]
    spread, count = measure_dispersion(x_TD, cluster_T, clusters, measure=measure)
    wanted = torch.tensor(by_loops(x_TD, cluster_T, clusters, measure))
    torch.testing.assert_close(spread, wanted, rtol=1e-5, atol=1e-6)
    assert count.tolist() == cluster_T.bincount(minlength=clusters).tolist()
    scale = measure_scale(x_TD, cluster_T, clusters, OPTIONS, measure=measure)
    torch.testing.assert_close(scale, scale_of(spread, count, OPTIONS), rtol=1e-6, atol=0)


def test_equal_tokens_have_dispersion_0_whatever_they_are() -> None:
    x_TD = torch.tensor([1e30, 0.1, -3.7e-20]).repeat(50, 1)
    spread, _ = measure_dispersion(x_TD, torch.arange(50) % 3, 3, measure="variance")
    assert not spread.any()
    scale = measure_scale(x_TD, torch.arange(50) % 3, 3, OPTIONS, measure="mad")
    assert torch.equal(scale, torch.ones(3, 3))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_token_spoils_its_own_cluster_alone_and_no_pending_mean(bad: float) -> None:
    x_TD = torch.randn(20, 4)
    x_TD[3, 1] = bad
    cluster_T = torch.arange(20) % 2
    found, wanted = [], []
    for backend, results in (("native", found), ("torch", wanted)):
        pending = torch.full((2, 4), 5.0), torch.tensor([0.0, 6.0])
        with use_backend(backend):
            results += measure_dispersion(x_TD, cluster_T, 2, measure="mad")
            results.append(
                record_scale(pending, x_TD, cluster_T, 2, OPTIONS, measure="mad"),
            )
        results += pending
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    assert found[0][1].isnan().all() and found[0][0].isfinite().all()
    assert found[3][1].tolist() == [5.0] * 4 and found[4].tolist() == [10.0, 6.0]


def test_a_token_in_no_cluster_counts_nowhere_and_a_wrong_id_raises() -> None:
    spread, count = measure_dispersion(X, torch.tensor([0, 0, -1]), 1, measure="mad")
    assert spread.tolist() == [[1.0, 0.0]] and count.tolist() == [2.0]
    with pytest.raises(UserError, match="id 3"):
        measure_dispersion(X, torch.tensor([0, 0, 3]), 3, measure="mad")


def test_a_batch_is_added_to_the_pending_means_in_the_same_call() -> None:
    x = torch.tensor([[0.0, 0.0], [2.0, 6.0], [9.0, 9.0]])  # s = (1, 3)
    pending = torch.tensor([[3.0, 7.0], [5.0, 5.0]]), torch.tensor([2.0, 0.0])
    versions = [one._version for one in pending]
    arguments = (x[None], torch.tensor([[0, 0, 1]]), 2)
    with record_choices() as choices:
        scale = record_scale(pending, *arguments, OPTIONS, measure="mad")
    assert [choice.kernel for choice in choices] == ["native"]
    assert scale.tolist() == [[1.5, 0.5], [1.0, 1.0]]
    # The mean of two tokens with (3, 7) and two with (1, 3); one token alone is not recorded.
    assert pending[0].tolist() == [[2.0, 5.0], [5.0, 5.0]] and pending[1].tolist() == [4.0, 0.0]
    record_dispersion(pending, *arguments, measure="mad")
    torch.testing.assert_close(pending[0], torch.tensor([[5 / 3, 13 / 3], [5.0, 5.0]]))
    assert pending[1].tolist() == [6.0, 0.0]
    assert all(one._version > old for one, old in zip(pending, versions, strict=True))
    fresh = torch.full((2, 2), 8.0), torch.zeros(2)
    record_dispersion(fresh, *arguments, measure="mad")
    assert fresh[0].tolist() == [[1.0, 3.0], [8.0, 8.0]]  # the count was 0: exactly the batch


def test_other_calls_run_other_kernels() -> None:
    cluster_T = torch.tensor([0, 0, 1])
    mask_T = torch.tensor([True, True, False])
    assert kernels_of(X, cluster_T, 2, measure="gini") == ["torch"]
    assert kernels_of(X.clone().requires_grad_(), cluster_T, 2, measure="mad") == ["torch"]
    assert kernels_of(X, cluster_T, 2, measure="mad", token_mask=mask_T) == ["torch"]
    assert kernels_of(X.double(), cluster_T, 2, measure="mad") == ["cpu"]
    many = torch.zeros(native.MOST // 2 + 1, 2)
    ids = torch.zeros(len(many), dtype=torch.int64)
    assert kernels_of(many, ids, 1, measure="mad") == ["cpu"]
    transposed = torch.zeros(2, 3).T
    assert kernels_of(transposed, cluster_T, 2, measure="mad") == ["cpu"]


def test_sets_of_tokens_are_measured_one_by_one(generator: torch.Generator) -> None:
    B, T, D, C = 3, 20, 5, 4
    x = torch.randn(B, T, D, generator=generator)
    cluster = torch.randint(C, (B, T), generator=generator)
    cluster[1, 3] = -1  # the definition serves this set
    out = torch.empty(B, C, D), torch.empty(B, C)
    named = {"measure": "std", "out": out}
    with record_choices() as choices:
        scale = measure_scale(x, cluster, C, OPTIONS, **named)
    assert choices[0].kernel == "native"
    written = [one.clone() for one in out]
    found = measure_dispersion(x, cluster, C, **named)
    for b in range(B):
        one = measure_dispersion.definition(x[b].double(), cluster[b], C, measure="std")
        wanted = scale_of(*one, OPTIONS)
        torch.testing.assert_close(scale[b].double(), wanted, rtol=1e-5, atol=1e-6)
        for results in (written, out, found):
            torch.testing.assert_close(results[0][b].double(), one[0], rtol=1e-5, atol=1e-6)
            assert torch.equal(results[1][b].double(), one[1].double())
