"""Kernels write the batch that a training forward leaves for `update`; one op adds it up.

T tokens, D features, C clusters.
"""

import itertools
from typing import Any

import pytest
import torch
from route_cases import sorted_by
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from acmoe import AdaptiveConfig
from acmoe.lab.variants import variant_of
from acmoe.ops.dispatch import use_backend
from acmoe.ops.sort.order import TokenOrder
from acmoe.ops.statistics import recorded, scale_op, sorted_op
from acmoe.ops.statistics.dispersion import dispersion_and_count
from acmoe.ops.statistics.dispersion_op import as_sets
from acmoe.ops.statistics.pending import LEAST
from acmoe.ops.statistics.scale_op import ScaleSettings
from acmoe.routing.statistics import ClusterStatistics, build_statistics
from slow_cases import mostly_slow

pytest.importorskip("triton")

T, D, C = 40, 7, 3


def taker(device: str, **options: Any) -> ClusterStatistics:
    config = variant_of(AdaptiveConfig(), **options)
    return build_statistics(config, num_clusters=C, dim=D).to(device)


def tokens(device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, T, D, generator=generator).to(device)
    cluster = torch.randint(0, C, (T, 1), generator=generator).to(device)
    return x, cluster, sorted_by(cluster[:, 0], C)


def look(taken: ClusterStatistics, x: Tensor, cluster: Tensor, clusters: Tensor | None) -> Tensor:
    with use_backend("triton"):
        return taken.cluster_scale(x, cluster.view(1, T), None, None, clusters)


def assert_noted(taken: ClusterStatistics, x: Tensor, cluster: Tensor) -> None:
    measure = taken.config.measure
    wanted, count = dispersion_and_count(x[0].double(), cluster[:, 0], C, measure=measure)
    torch.testing.assert_close(taken.last_dispersion.double(), wanted, rtol=1e-5, atol=0)
    assert torch.equal(taken.last_count, count.float())


class Copies(TorchDispatchMode):
    """Counts the copies into tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


@mostly_slow(
    ("mode", "is_sorted", "measure"),
    [
        *[("batch", True, "mad"), ("running", False, "mad")],
        *[("batch", False, "std"), ("running", True, "std")],
        *[("batch", False, "mad"), ("running", True, "mad")],
        *[("batch", True, "std"), ("running", False, "std")],
        *itertools.product(("batch", "running"), (True, False), ("iqr",)),
    ],
    keep=range(4),
)
def test_the_batch_is_noted_by_every_way(
    mode: str, is_sorted: bool, measure: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = taker(device, statistics=mode, measure=measure)
    x, cluster, clusters = tokens(device)
    look(taken, x, cluster, clusters if is_sorted else None)
    assert_noted(taken, x, cluster)
    # The interpreter copies the arguments of a kernel: count without the one that adds the batch.
    monkeypatch.setattr(recorded, "record_batch", lambda *args, **options: None)
    with Copies() as copies:
        look(taken, x, cluster, clusters if is_sorted else None)
    fused = measure != "iqr" and (is_sorted or mode == "batch")
    assert copies.number == (0 if fused else 2)  # kernels write the batch where it is read from


@pytest.mark.parametrize("is_sorted", [True, False])
def test_evaluation_leaves_the_note_alone(is_sorted: bool, device: str) -> None:
    taken = taker(device, statistics="batch")
    x, cluster, clusters = tokens(device)
    scale = look(taken, x, cluster, clusters if is_sorted else None)
    taken.eval()
    other, other_cluster, other_clusters = tokens(device, seed=1)
    # Another batch, and another scale; what training noted is as it was.
    found = look(taken, other, other_cluster, other_clusters if is_sorted else None)
    assert not torch.equal(found, scale)
    assert_noted(taken, x, cluster)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strength": 0.5},
    ],
    ids=str,
)
def test_a_scale_outlives_the_next_forward(options: dict[str, Any], device: str) -> None:
    """Two micro-batches, two backwards after them: the second writes no memory of the first."""
    taken = taker(device, statistics="batch", **options)
    batches = [tokens(device, seed) for seed in range(2)]
    alone = []
    for batch in batches:
        scale = look(taken, *batch)
        alone.append(scale.clone())
        assert not scale.requires_grad
    scales = [look(taken, *batch) for batch in batches]
    for scale, wanted in zip(scales, alone, strict=True):
        assert torch.equal(scale, wanted)
    taken.last_count.zero_()
    look(taken, *batches[1])
    assert_noted(taken, *batches[1][:2])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at it
@pytest.mark.parametrize(
    ("mode", "is_sorted"),
    [
        ("batch", True),
        pytest.param("running", False, marks=pytest.mark.slow),
        pytest.param("batch", False, marks=pytest.mark.slow),
        pytest.param("running", True, marks=pytest.mark.slow),
    ],
)
def test_compiled_and_recomputed_forwards_note_the_same(
    mode: str, is_sorted: bool, device: str
) -> None:
    taken = taker(device, statistics=mode)
    x, cluster, clusters = tokens(device)
    x.requires_grad_()

    def forward(x: Tensor) -> Tensor:
        given = clusters if is_sorted else None
        return x.square() * taken.cluster_scale(x, cluster.view(1, T), None, None, given)[0]

    ways = {
        "compiled": torch.compile(forward, backend="aot_eager", fullgraph=True),
        "recomputed": lambda x: checkpoint(forward, x, use_reentrant=False),
    }
    with use_backend("triton"):
        wanted = forward(x)
        for way in ways.values():
            taken.last_dispersion.zero_()
            taken.last_count.zero_()
            y = way(x)
            torch.testing.assert_close(y, wanted)
            y.sum().backward()
            assert_noted(taken, x.detach(), cluster)


@mostly_slow(
    ("is_sorted", "tokens", "features"),
    [(True, 700, 24), (False, 40, 7), (True, 40, 1024), (True, 40, 7)],
    keep=(0, 1),
    gpu=(2, 3),
)
@pytest.mark.parametrize("scaled", [False, True])
def test_the_kernel_that_measures_adds_the_batch_as_its_op_does(
    scaled: bool, is_sorted: bool, tokens: int, features: int, device: str
) -> None:
    """Of clusters in several chunks, in one, and of few tokens: all bits are equal.

    The clusters have many tokens; one, which has no dispersion; none; and some, one of them NaN.
    """
    from acmoe.ops.statistics.triton.pending import add_batch

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, features, generator=generator).bfloat16()
    cluster = torch.zeros(tokens, dtype=torch.int64)
    cluster[-9:] = torch.tensor([1, 3, 3, 3, 4, 4, 4, 4, 4])
    x[-7] = torch.nan
    x, cluster = x.to(device), cluster.to(device)
    given = (x, cluster, None)
    if is_sorted:
        order = TokenOrder.unpack(sorted_by(cluster, 5), 5)
        assert order is not None
        given = (x, *order)
    ops = sorted_op if is_sorted else scale_op
    run = ops.launched_scale if scaled else ops.launched_dispersion
    settings = ScaleSettings() if scaled else ("mad",)

    def measured(pending: Any) -> tuple[list[Tensor], Tensor, Tensor]:
        batch = torch.empty(5, features, device=device), torch.empty(5, device=device)
        tensors = given if is_sorted else as_sets(*given)
        return list(run(*tensors, None, *batch, *settings, pending=pending)), *batch

    start = torch.randn(5, features, generator=generator).to(device)
    counts = torch.tensor([3.0, 1, 2, 5, 0], device=device)
    found, wanted = (start.clone(), counts.clone()), (start.clone(), counts.clone())
    mine, *batch = measured(found)
    apart, *_ = measured(None)
    add_batch(*wanted, *batch, LEAST)
    for one, other in zip([*mine, *found], [*apart, *wanted], strict=True):
        assert torch.equal(one, other)
    assert found[1].tolist() == [tokens - 6, 1, 2, 5, 5]
    assert torch.equal(found[0][4], batch[0][4])  # the first batch of its cluster


@pytest.mark.parametrize("is_sorted", [True, False])
def test_the_kernel_that_measures_copies_the_scale_of_the_running_average(
    is_sorted: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state that a layer hands on keeps its scale when the next update writes a new one."""
    taken = taker(device, statistics="running").train()
    x, cluster, order = tokens(device)
    look(taken, x, cluster, order if is_sorted else None)
    taken.update()
    monkeypatch.setattr(recorded, "snapshot", None)  # a call of it would raise
    scale = look(taken, 2 * x, cluster, order if is_sorted else None)
    before = taken.running_scale.clone()
    assert not torch.equal(before, torch.ones_like(before))
    assert torch.equal(scale, before)
    taken.running_scale.fill_(7.0)
    assert torch.equal(scale, before)
    assert_noted(taken, 2 * x, cluster)


@pytest.mark.parametrize("learns", [True, False])
def test_a_scale_that_the_kernel_cannot_copy_is_cloned(learns: bool, device: str) -> None:
    """A learned strength is in the scale's gradient; a buffer may be a transposed view."""
    taken = taker(device, statistics="running", strength=0.5, learn_strength=learns).train()
    x, cluster, order = tokens(device)
    look(taken, x, cluster, order)
    taken.update()
    if not learns:
        taken.running_scale = taken.running_scale.T.contiguous().T
    scale = look(taken, x, cluster, order)
    assert scale.requires_grad == learns
    before = scale.detach().clone()
    taken.running_scale.fill_(7.0)
    assert torch.equal(scale.detach(), before)
    assert not torch.equal(before, torch.ones_like(before))
