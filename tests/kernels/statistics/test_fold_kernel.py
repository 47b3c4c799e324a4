"""A batch folded into its average in one launch, against the plain form and a float64 loop.

C clusters, D features.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from acmoe import AdaptiveConfig
from acmoe.ops.dispatch import use_backend
from acmoe.ops.statistics import running as ops
from acmoe.ops.statistics.running import update_average, update_average_and_scale, update_op
from acmoe.ops.statistics.scale import ScaleOptions, scale_of
from acmoe.routing.statistics import ClusterStatistics
from slow_cases import mostly_slow

pytest.importorskip("triton")

DIRECT = ScaleOptions(
    normalize="cluster", strength=None, floor=1e-3, eps=0.0, clamp=None, min_tokens=2
)


def halved(scale: Tensor, spread: Tensor, count: Tensor) -> Tensor:
    """A transform of the scale, as a variant of the router may have one."""
    return scale / 2


class Buffers:
    """Random inputs of a fold; `fold` calls one of the two functions on a backend."""

    def __init__(self, clusters: int, dim: int, device: str, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(2, clusters, dim, generator=generator).exp()
        self.average, self.last = drawn.to(device).unbind()
        self.weight = 10 * torch.rand(clusters, generator=generator).to(device)
        self.count = torch.randint(0, 5, (clusters,), generator=generator).float().to(device)
        self.scale = torch.full_like(self.average, torch.nan)

    @property
    def all(self) -> tuple[Tensor, ...]:
        return self.average, self.weight, self.last, self.count

    def copy(self) -> "Buffers":
        other = object.__new__(Buffers)
        other.__dict__ = {name: value.clone() for name, value in self.__dict__.items()}
        return other

    def folded(self, backend: str, momentum: float, options: ScaleOptions | None) -> "Buffers":
        other = self.copy()
        with use_backend(backend):
            if options is None:
                update_average(*other.all, momentum)
            else:
                update_average_and_scale(*other.all, other.scale, momentum, options)
        return other


def assert_equal_to(found: Buffers, wanted: Buffers) -> None:
    for name, value in wanted.__dict__.items():
        torch.testing.assert_close(
            getattr(found, name), value, rtol=1e-6, atol=0, equal_nan=True, msg=name
        )


def exact(before: Buffers, momentum: float, options: ScaleOptions) -> tuple[list[Any], ...]:
    """Average, weight and scale by a loop over Python's floats."""
    averages, weights, scales = [], [], []
    rows = (value.tolist() for value in (before.average, before.weight, before.last, before.count))
    for average, weight, last, count in zip(*rows, strict=True):
        if count >= 2 and all(map(math.isfinite, last)):
            total = momentum * weight + count
            pairs = zip(average, last, strict=True)
            average = [(momentum * weight * a + count * b) / total for a, b in pairs]
            weight = total
        mean = sum(average) / len(average)
        ones = [1.0] * len(average)
        if weight >= options.min_tokens and (mean > 0 or options.eps > 0):
            ones = [1 / (max(s, options.floor * mean) + options.eps) for s in average]
        averages.append(average)
        weights.append(weight)
        scales.append([one * len(ones) / sum(ones) for one in ones])
    return averages, weights, scales


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_without_momentum_the_average_is_the_batch_whatever_it_was(
    backend: str, device: str
) -> None:
    before = Buffers(2, 3, device)
    before.average.fill_(1e8)  # float32 numbers lie 8 apart there: 0.75 - 1e8 is -1e8
    before.last.fill_(0.75)
    before.count.fill_(4.0)
    assert (before.folded(backend, 0.0, None).average == 0.75).all()


@given(
    clusters=st.integers(1, 5),
    dim=st.integers(1, 70),
    momentum=st.sampled_from([0.0, 0.9, 1.0]),
    floor=st.sampled_from([1e-3, 0.5]),
    eps=st.sampled_from([0.0, 1e-2]),
    min_tokens=st.sampled_from([1, 2, 6]),
    seed=st.integers(0, 99),
)
def test_the_kernel_is_the_plain_form_and_a_float64_loop(
    clusters: int,
    dim: int,
    momentum: float,
    floor: float,
    eps: float,
    min_tokens: int,
    seed: int,
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = DIRECT._replace(floor=floor, eps=eps, min_tokens=min_tokens)
    before = Buffers(clusters, dim, device, seed)
    before.weight[0], before.average[0] = 0, 0  # no past
    before.average[-1, 0] *= 1e-6  # below its floor
    before.last[-1, 0] *= 1e-6
    found = before.folded("triton", momentum, options)
    assert_equal_to(found, before.folded("torch", momentum, options))
    assert (found.count == 0).all()
    results = (found.average, found.weight, found.scale)
    for result, wanted in zip(results, exact(before, momentum, options), strict=True):
        close = torch.tensor(wanted, dtype=torch.float64, device=device)
        torch.testing.assert_close(result.double(), close, rtol=2e-6, atol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 36])
def test_a_batch_that_is_not_finite_leaves_its_cluster_alone(
    bad: float, place: int, device: str
) -> None:
    before = Buffers(3, 37, device)
    before.count.fill_(4)
    before.last[1, place] = bad
    found = before.folded("triton", 0.9, DIRECT)
    assert_equal_to(found, before.folded("torch", 0.9, DIRECT))
    assert torch.equal(found.average[1], before.average[1])
    assert found.weight[1] == before.weight[1]
    assert (found.weight[[0, 2]] != before.weight[[0, 2]]).all()
    assert found.count.tolist() == [0, 0, 0]


def test_clusters_of_no_token_or_one_keep_average_and_weight_to_the_bit(device: str) -> None:
    before = Buffers(3, 5, device)
    before.count = torch.tensor([0.0, 1.0, 2.0], device=device)
    before.last[0] = torch.nan  # whatever it says
    found = before.folded("triton", 0.5, None)
    assert torch.equal(found.average[:2], before.average[:2])
    assert torch.equal(found.weight[:2], before.weight[:2])
    # Weight w becomes w/2 + 2 and the average moves by 2 / (w/2 + 2) of the way.
    wanted = before.average[2] + 2 / (before.weight[2] / 2 + 2) * (before.last - before.average)[2]
    torch.testing.assert_close(found.average[2], wanted, rtol=1e-6, atol=0)
    assert found.scale.isnan().all()  # nobody asked for it


def test_momentum_zero_forgets_and_momentum_one_counts_all(device: str) -> None:
    before = Buffers(1, 4, device)
    before.weight.fill_(6)
    before.count.fill_(2)
    forgot = before.folded("triton", 0.0, None)
    assert forgot.weight.item() == 2
    torch.testing.assert_close(forgot.average, before.last, rtol=1e-6, atol=0)
    kept = before.folded("triton", 1.0, None)
    assert kept.weight.item() == 8
    wanted = (6 * before.average + 2 * before.last) / 8
    torch.testing.assert_close(kept.average, wanted, rtol=1e-6, atol=0)


def test_a_cluster_that_tells_nothing_has_a_scale_of_ones(device: str) -> None:
    before = Buffers(3, 4, device)
    before.average[0] = before.last[0] = 0  # equal tokens
    before.weight[1] = before.count[1] = 0  # never seen
    before.average[2] = torch.tensor([1.0, 2.0, 4.0, 8.0], device=device)
    before.weight[2], before.count[2] = 9, 0
    found = before.folded("triton", 0.9, DIRECT)
    assert (found.scale[:2] == 1).all()
    # 1/s = (8, 4, 2, 1) / 8 averages 15/32.
    assert found.scale[2].tolist() == pytest.approx([32 / 15, 16 / 15, 8 / 15, 4 / 15], rel=1e-6)
    # With eps and min_tokens=0, as in the published code, both inform: s = 0 everywhere.
    published = DIRECT._replace(floor=0.0, eps=1e-4, min_tokens=0)
    assert_equal_to(before.folded("triton", 0.9, published), before.folded("torch", 0.9, published))


@pytest.mark.parametrize(
    "change",
    [
        {"normalize": "feature"},
        {"normalize": "global"},
        {"clamp": 1.2},
        {"strength": 0.5},
        pytest.param({"transform": halved}, id="transform"),
        {},
    ],
    ids=str,
)
def test_a_scale_that_compares_clusters_is_worked_out_apart(
    change: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales = []

    def counted(*arguments: Any) -> Tensor:
        scales.append(arguments)
        return scale_of(*arguments)

    monkeypatch.setattr(ops, "scale_of", counted)
    options = DIRECT._replace(**change)
    before = Buffers(4, 9, device)
    found = before.folded("triton", 0.9, options)
    assert len(scales) == (1 if change else 0)
    wanted = scale_of(found.average.double(), found.weight, options)
    torch.testing.assert_close(found.scale.double(), wanted, rtol=1e-6, atol=0)


def test_averages_that_do_not_lie_together_are_folded_by_torch(device: str) -> None:
    before = Buffers(4, 6, device)
    wanted = before.folded("torch", 0.9, DIRECT)
    before.average = before.average.T.contiguous().T
    with use_backend("triton"):
        update_average_and_scale(*before.all, before.scale, 0.9, DIRECT)
    assert not before.average.is_contiguous()
    assert_equal_to(before, wanted)


def test_the_op_is_well_formed_and_compiles_to_one_call(device: str) -> None:
    args = (0.9, 1e-3, 0.0, 2)
    for scaled in (True, False):
        drawn = Buffers(3, 5, device)
        buffers = (*drawn.all, drawn.scale if scaled else None)
        utils = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(update_op, (*buffers, *args), test_utils=utils)
    before = Buffers(3, 5, device)
    wanted = before.folded("triton", 0.9, DIRECT)
    seen = []

    def inspect(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    with use_backend("triton"):
        compiled = torch.compile(update_average_and_scale, backend=inspect, fullgraph=True)
        compiled(*before.all, before.scale, 0.9, DIRECT)
    assert_equal_to(before, wanted)
    assert [str(target) for target in seen if "acmoe" in str(target)] == ["acmoe.fold.default"]


def statistics(device: str, **options: Any) -> ClusterStatistics:
    return ClusterStatistics(AdaptiveConfig(**options), num_clusters=3, dim=7).to(device)


@mostly_slow(
    ("mode", "change"),
    [
        *[("running", {}), ("batch", {"normalize": "global"})],
        *[("batch", {}), ("running", {"normalize": "global"})],
    ],
    keep={0, 1},
    ids=str,
)
def test_training_folds_to_the_same_buffers_and_a_fresh_scale(
    mode: str, change: dict[str, Any], device: str
) -> None:
    by_backend = {}
    for backend in ("torch", "triton"):
        taken = statistics(device, statistics=mode, momentum=0.8, **change)
        generator = torch.Generator().manual_seed(0)
        with use_backend(backend):
            for _ in range(3):
                x = torch.randn(1, 20, 7, generator=generator).exp().to(device)
                cluster = torch.randint(0, 2, (1, 20), generator=generator).to(device)
                taken.cluster_scale(x, cluster, None, None)
                taken.update()
                kept = taken.running_scale.clone()
                wanted = scale_of(taken.dispersion, taken.weight, taken.options)
                torch.testing.assert_close(kept, wanted, rtol=1e-6, atol=0)
                # A reader finds it fresh, and does not work it out again.
                taken.running_scale.mul_(2)
                assert torch.equal(taken.average_scale(), 2 * kept)
        by_backend[backend] = dict(taken.named_buffers())
    for name, value in by_backend["torch"].items():
        torch.testing.assert_close(by_backend["triton"][name], value, rtol=1e-5, atol=1e-7)
    assert by_backend["triton"]["weight"].tolist()[2] == 0


def test_the_next_read_follows_a_change_after_the_fold(device: str) -> None:
    taken = statistics(device)
    with use_backend("triton"):
        taken.cluster_scale(
            torch.randn(1, 9, 7, device=device),
            torch.zeros(1, 9, dtype=torch.int64, device=device),
            None,
            None,
        )
        versions = taken.dispersion._version, taken.weight._version
        taken.update()
        # Whoever else caches by versions learns of the fold.
        assert taken.dispersion._version > versions[0] and taken.weight._version > versions[1]
        taken.weight.zero_()
        assert (taken.average_scale() == 1).all()
