"""Statistics by a tape: a tape for each kind of call, no memory in common, and who gets none.

The definition is computed from the same tokens in float64 (ops/statistics/dispersion.py). Without a
GPU the kernels run in Triton's interpreter, and `tapes` stands for the launcher.
"""

from typing import Any

import pytest
import torch
from route_cases import sorted_by
from test_taped_steps import tapes
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import acmoe
from acmoe.ops.device import tape
from acmoe.ops.dispatch import use_backend
from acmoe.ops.statistics.dispersion import dispersion_and_count
from acmoe.ops.statistics.scale import scale_of
from acmoe.routing.statistics import ClusterStatistics, build_statistics

C, D = 3, 16
# Each differs from the first in one thing that launches depend on.
KINDS: list[dict[str, Any]] = [
    {},
    {"measure": "std"},
    {"floor": 0.5},
    {"eps": 0.25},
    {"clamp": 1.1},
    {"min_tokens": 6},
    {"normalize": "feature"},
    {"tokens": 9},
    {"clusters": 4},
    {"masked": True},
    {"is_sorted": True},
    {"training": False},
    {"dtype": torch.float16},
]


def taker(device: str, clusters: int = C, **options: Any) -> ClusterStatistics:
    config = acmoe.AdaptiveConfig(**({"statistics": "batch"} | options))
    return build_statistics(config, num_clusters=clusters, dim=D).to(device)


class Case:
    """Statistics of one kind and two batches for them."""

    def __init__(
        self,
        device: str,
        *,
        tokens: int = 11,
        clusters: int = C,
        masked: bool = False,
        is_sorted: bool = False,
        training: bool = True,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.taken = taker(device, clusters, **options).train(training)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2, 1, tokens, D, generator=generator)
        self.x = x.to(device, dtype)
        self.cluster = torch.randint(0, 3, (2, 1, tokens), generator=generator).to(device)
        mask = torch.arange(tokens, device=device)[None] < tokens - 4
        self.mask = mask if masked else None
        self.orders = [
            sorted_by(own.flatten(), clusters) if is_sorted else None for own in self.cluster
        ]

    def measured(self, at: int) -> Tensor:
        with use_backend("triton"):
            tokens = self.x[at], self.cluster[at], self.mask
            return self.taken.cluster_scale(*tokens, None, self.orders[at])

    def defined(self, at: int) -> Tensor:
        """Return the scale by the definition, in float64."""
        kept = slice(None) if self.mask is None else self.mask[0]
        x, cluster = self.x[at, 0].double()[kept], self.cluster[at, 0][kept]
        measure = self.taken.config.measure
        found = dispersion_and_count(x, cluster, self.taken.num_clusters, measure=measure)
        return scale_of(*found, self.taken.options)


def test_each_kind_of_call_has_a_tape_and_results_of_its_own(device: str) -> None:
    cases = [Case(device, **kind) for kind in KINDS]
    for kind in ({}, {"is_sorted": True}):
        Case(device, **kind).measured(0)  # imports all kernels
    with tapes():
        first = [case.measured(0) for case in cases]
        assert len(tape._tapes) == len(KINDS) and all(tape._tapes.values())
        second = [case.measured(1) for case in cases]  # repeated, while `first` is still held
        assert len(tape._tapes) == len(KINDS)
    for case, *found in zip(cases, first, second, strict=True):
        for at, scale in enumerate(found):
            torch.testing.assert_close(scale.double(), case.defined(at), rtol=5e-5, atol=0)


def test_a_forward_that_a_backward_repeats_is_counted_once(device: str) -> None:
    case = Case(device)
    x = case.x[0].clone().requires_grad_()

    def forward(x: Tensor) -> Tensor:
        return x.square() * case.taken.cluster_scale(x, case.cluster[0], None, None)[0]

    case.measured(0)  # imports all kernels
    case.taken.last_count.zero_()
    with tapes(), use_backend("triton"):
        for _ in range(2):  # recorded, then repeated
            checkpoint(forward, x, use_reentrant=False).sum().backward()
    assert torch.equal(case.taken.last_count, 2 * case.cluster[0].flatten().bincount().float())


def test_a_transform_gets_no_tape(device: str) -> None:
    case = Case(device, training=False)
    with tapes(), use_backend("triton"):
        found = torch.vmap(lambda x, own: case.taken.cluster_scale(x, own, None, None))(
            case.x, case.cluster
        )
        assert not tape._tapes
    wanted = torch.stack([case.defined(at) for at in range(2)])
    torch.testing.assert_close(found.double(), wanted, rtol=5e-5, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("mode", ["batch", "running"])
def test_a_tape_runs_on_the_current_stream_and_in_a_cuda_graph(mode: str, is_sorted: bool) -> None:
    case = Case("cuda", statistics=mode, is_sorted=is_sorted)
    wanted = [case.measured(at).clone() for at in range(2)]
    tape.forget()
    case.measured(0)  # recorded on the default stream
    case.taken.last_count.zero_()

    def counted(*batches: int) -> Tensor:
        return case.cluster[list(batches)].flatten().bincount(minlength=C).float()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # what runs on another stream would be done before
        case.taken.last_count.zero_()
        found = case.measured(1)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    assert torch.equal(found, wanted[1])
    assert torch.equal(case.taken.last_count, counted(1))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.measured(0)
    for times in (1, 2):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, wanted[0])
        assert torch.equal(case.taken.last_count, counted(1, *[0] * times))
