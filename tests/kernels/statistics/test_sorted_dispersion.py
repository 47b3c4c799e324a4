"""Chunks of sorted clusters: their tiles, where their tokens lie, and bad tokens among them.

T = 300 tokens of C = 3 clusters in chunks of 64: cluster 1 has about 225, four chunks of which the
last is not full; cluster 0 has two, cluster 2 none. D = 20 features: no multiple of a block.
"""

import itertools
from typing import Any

import pytest
import torch
from route_cases import sorted_by
from torch import Tensor

from acmoe.ops.sort.order import TokenOrder
from acmoe.ops.statistics.dispersion import dispersion_and_count
from acmoe.ops.statistics.scale_op import ScaleSettings
from acmoe.ops.statistics.sorted_op import sorted_cluster_scale, sorted_dispersion
from slow_cases import mostly_slow

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_empty")

T, D, C = 300, 20, 3


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    from acmoe.ops.statistics.triton import sorted_dispersion

    monkeypatch.setattr(sorted_dispersion, "FEWEST_ROWS", 64)
    monkeypatch.setattr(sorted_dispersion, "MOST_ROWS", 64)
    for dim, is_float32 in itertools.product((D, 1024), (True, False)):
        assert sorted_dispersion.chunk_rows(T, C, dim, is_float32) == 64
    return sorted_dispersion


@pytest.fixture
def clusters(generator: torch.Generator, device: str) -> TokenOrder:
    assignment = (torch.rand(T, 1, generator=generator) < 0.75).long().to(device)
    found = TokenOrder.unpack(sorted_by(assignment[:, 0], C), C)
    assert found is not None
    return found


def assignment_of(order: TokenOrder) -> Tensor:
    """(T,) the cluster of each token, read from the sorted slots."""
    assignment = torch.full((T,), -1, device=order.token.device)
    for cluster in range(C):
        members = order.token[order.begin[cluster] : order.end[cluster]]
        assignment[members.long()] = cluster
    return assignment


def drawn(generator: torch.Generator, device: str, dim: int = D) -> Tensor:
    return torch.randn(T, dim, generator=generator).to(device, torch.bfloat16)


@pytest.mark.parametrize("rows", [256, 512, 1024, 2048])
@pytest.mark.parametrize("dim", [16, 1024])
@pytest.mark.parametrize("is_float32", [True, False])
def test_a_steps_tokens_fold_evenly_into_its_sums(
    kernels: Any, dim: int, rows: int, is_float32: bool
) -> None:
    tile = kernels.launch_table(dim, rows, is_float32=is_float32)
    assert tile.sums > 0 and tile.tokens % tile.sums == 0


@pytest.mark.parametrize(
    ("tokens", "clusters", "dim", "is_float32", "rows"),
    [
        (100, 16, 352, False, 256),  # no fewer
        (8192, 8, 352, False, 2048),  # twice an even share
        (8192, 8, 4096, False, 2048),
        (24576, 16, 4096, False, 2048),  # no more: an even share is 1,536
        (24576, 16, 352, False, 1024),  # most clusters have two chunks then
        (8192, 16, 352, True, 1024),  # twice an even share
        (8192, 8, 4096, True, 1024),  # float32 tokens: no more
    ],
)
def test_the_tokens_of_a_chunk(
    tokens: int, clusters: int, dim: int, is_float32: bool, rows: int
) -> None:
    from acmoe.ops.statistics.triton.sorted_dispersion import chunk_rows

    assert chunk_rows(tokens, clusters, dim, is_float32) == rows


# Each tile of a wide model; 1030 features end in a block that is not full.
@pytest.mark.parametrize(
    "rows", [*(pytest.param(rows, marks=pytest.mark.slow) for rows in (512, 1024)), 2048]
)
def test_a_wide_models_tiles_give_the_references_statistics(
    rows: int,
    kernels: Any,
    clusters: TokenOrder,
    generator: torch.Generator,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "FEWEST_ROWS", rows)
    x = drawn(generator, device, 1030)
    found, count = sorted_dispersion(x, clusters)
    wanted, wanted_count = dispersion_and_count(x.double(), assignment_of(clusters), C)
    # Sums of at most 300 float32 terms, and a mean rounded to 2^-24 of the values.
    assert torch.allclose(found.double(), wanted, rtol=2e-6, atol=0)
    assert torch.equal(count, wanted_count)


def test_offsets_of_either_width_find_the_same_tokens(
    kernels: Any,
    clusters: TokenOrder,
    generator: torch.Generator,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = drawn(generator, device)
    short = sorted_cluster_scale(x, clusters)
    monkeypatch.setattr(kernels, "INT32_LIMIT", 0)
    long = sorted_cluster_scale(x, clusters)
    assert all(torch.equal(*pair) for pair in zip(short, long, strict=True))


@mostly_slow(
    ("bad", "measure"),
    [
        ([float("nan")], "variance"),
        ([float("inf")], "mad"),
        ([-float("inf"), float("inf")], "mad"),
        ([3e38, 3e38], "mad"),  # their sum is not finite
    ],
    keep=(0, 3),
)
def test_one_chunks_bad_tokens_spoil_all_chunks_of_their_cluster_and_no_other(
    bad: list[float],
    measure: str,
    kernels: Any,
    clusters: TokenOrder,
    generator: torch.Generator,
    device: str,
) -> None:
    x = drawn(generator, device)
    clean_scale, clean, _ = sorted_cluster_scale(x, clusters, ScaleSettings(measure))
    first = int(clusters.begin[1])
    for place, value in enumerate(bad, start=first + 5):
        x[clusters.token[place], 7] = value
    scale, spread, count = sorted_cluster_scale(x, clusters, ScaleSettings(measure))
    alone, _ = sorted_dispersion(x, clusters, measure=measure)
    assert spread[1].isnan().all() and (scale[1] == 1).all()
    assert count[1] == clusters.end[1] - clusters.begin[1]
    others = [0, 2]
    assert torch.equal(spread[others], clean[others])
    assert torch.equal(scale[others], clean_scale[others])
    assert torch.equal(alone.nan_to_num(-1), spread.nan_to_num(-1))
