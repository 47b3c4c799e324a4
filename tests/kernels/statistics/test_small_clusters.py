"""Many small clusters: a sort without gaps, and statistics over it.

T = 150 tokens of C = 7 clusters, of which one is empty and one has more than half of all tokens;
some tokens are in none. D = 70 features: no multiple of a block.
"""

import itertools
from typing import Any

import pytest
import torch
from route_cases import fused_route, sorted_by
from torch import Tensor

from acmoe import AdaptiveConfig, MoE, Routing
from acmoe.ops.sort import order as order_module
from acmoe.ops.sort import sort_rows
from acmoe.ops.sort.order import ALIGNMENT, TokenOrder, alignment, num_slots, worth_sorting
from acmoe.ops.statistics.dispersion import dispersion_and_count
from acmoe.ops.statistics.scale import scale_from_dispersion
from acmoe.ops.statistics.scale_op import ScaleSettings
from acmoe.ops.statistics.sorted_op import sorted_cluster_scale
from slow_cases import mostly_slow

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_empty")

T, D, C, K = 150, 70, 7, 3


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let C clusters be many."""
    monkeypatch.setattr(order_module, "MANY_CLUSTERS", C - 1)


@pytest.fixture
def assignment(generator: torch.Generator, device: str) -> Tensor:
    found = torch.randint(-1, C - 1, (T,), generator=generator)  # the last cluster is empty
    found[torch.rand(T, generator=generator) < 0.5] = 2
    return found.to(device)


@pytest.mark.parametrize(
    ("clusters", "tokens", "sort", "gaps"),
    [
        (128, 128 * 128, True, True),
        (128, 128 * 128 - 1, False, True),
        (512, 128 * 512, True, True),
        (512, 128 * 512 - 1, True, False),
        (512, 32 * 512, True, False),
        (512, 32 * 512 - 1, False, False),
    ],
)
def test_many_small_clusters_are_sorted_without_gaps(
    clusters: int, tokens: int, sort: bool, gaps: bool
) -> None:
    assert worth_sorting(tokens, clusters) == sort
    assert alignment(tokens, clusters) == (ALIGNMENT if gaps else 1)
    # A kernel's tile of 128 tokens ends within the slots.
    slots = num_slots(tokens, clusters)
    assert slots >= tokens and (gaps or slots - tokens < 128 == slots % 128 + 128)


@pytest.mark.usefixtures("many")
def test_the_order_is_a_stable_sort(assignment: Tensor) -> None:
    token, begin, end = TokenOrder.unpack(sorted_by(assignment, C), C)
    key = torch.where(assignment < 0, C, assignment)
    assert torch.equal(token[:T].long(), key.sort(stable=True).indices)
    assert token.numel() == 256 and (token[T:] == -1).all()
    count = torch.bincount(key, minlength=C + 1)
    assert torch.equal(end.long(), count.cumsum(0))
    assert torch.equal(begin.long(), count.cumsum(0) - count)


@mostly_slow(("rows", "steps"), [(64, 1), (599, 8), (600, 8), (100, 3)], keep={1}, gpu={0})
def test_a_block_of_many_experts_is_sorted_in_steps(
    rows: int,
    steps: int,
    generator: torch.Generator,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from acmoe.ops.sort.triton import sort

    monkeypatch.setattr(sort, "FEWEST_BLOCKS", 1)
    monkeypatch.setattr(sort, "FEW_ROWS", 0)
    experts = 300  # 32 rows a step
    assert steps == (1 if rows == 64 else sort.steps_of(rows, 32))
    if steps == 1:
        monkeypatch.setattr(sort, "MOST_STEPS", 1)
    ids = torch.randint(0, experts + 1, (rows, 1), generator=generator).to(device)
    cluster = torch.randint(-1, experts, (rows,), generator=generator).to(device)
    found, order = sort.sort_rows_and_tokens(ids, cluster, experts)
    for one, other in zip(found, sort_rows.definition(ids, experts), strict=False):
        assert torch.equal(one, other)
    token, _, end = TokenOrder.unpack(order, experts)
    key = torch.where(cluster < 0, experts, cluster)
    assert torch.equal(token[:rows].long(), key.sort(stable=True).indices)
    assert torch.equal(end.long(), torch.bincount(key, minlength=experts + 1).cumsum(0))


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize(
    ("statistics", "training", "tokens", "sorts"),
    [
        ("running", True, 32 * C, True),  # for the statistics
        ("batch", False, 32 * C, True),  # likewise
        ("sequence", False, 32 * C, True),
        ("running", False, 32 * C, False),  # nobody reads the order
        ("running", False, 128 * C, True),  # the next router does
    ],
)
def test_a_layer_sorts_tokens_only_if_somebody_reads_the_order(
    statistics: str, training: bool, tokens: int, sorts: bool, device: str
) -> None:
    config = AdaptiveConfig(statistics=statistics)
    moe = MoE(dim=8, hidden=8, num_experts=C, top_k=2, router=config).train(training)
    ids = torch.zeros(tokens, 2, dtype=torch.int64, device=device)
    affinity = torch.zeros(tokens, C, device=device)
    routing = Routing(ids, affinity[:, :2], affinity, affinity[0, 0], ids[:, 0])
    found = moe.next_state.clusters(routing)
    assert found is routing.first if sorts else found is None


def test_no_order_is_asked_for_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    moe = MoE(dim=8, hidden=8, num_experts=C, top_k=2, router="adaptive")
    ids, affinity = torch.zeros(900, 2, dtype=torch.int64), torch.zeros(900, C)
    routing = Routing(ids, affinity[:, :2], affinity, torch.zeros(()), ids[:, 0])
    assert moe.next_state.clusters(routing) is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the interpreter runs kernels that read it
    assert moe.next_state.clusters(routing) is routing.first


@pytest.mark.usefixtures("many")
def test_the_router_reads_tokens_in_their_own_order(
    assignment: Tensor, generator: torch.Generator, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from acmoe.ops.route import op

    given = []
    through = op.route_through

    def noted(*arguments: Any, **options: Any) -> Any:
        given.append(arguments[9])
        return through(*arguments, **options)

    monkeypatch.setattr(op, "route_through", noted)
    x = torch.randn(T, D, generator=generator).to(device)
    scale = torch.randn(C, D, generator=generator).exp().to(device)
    order = sorted_by(assignment, C)
    fused_route(x, x[:5], None, scale, assignment, K, False, order=order)
    assert given == [None]


@pytest.mark.usefixtures("many")
@mostly_slow(
    ("dtype", "dim", "measure"),
    [
        (torch.bfloat16, 1030, "mad"),  # all features in one program
        (torch.bfloat16, 5000, "mad"),  # in two programs
        (torch.float32, 1030, "std"),
        (torch.float16, 2048, "variance"),
    ],
)
def test_statistics_of_small_clusters_are_the_references(
    dtype: torch.dtype,
    dim: int,
    measure: str,
    assignment: Tensor,
    generator: torch.Generator,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from acmoe.ops.statistics.triton import sorted_dispersion as kernels

    assert T <= kernels.SMALL * C
    tile = kernels.launch_table(dim, 64, True)
    assert tile.sums == 1 and (tile.features >= dim) == (dim <= 4096)
    # Cluster 2 has two chunks of 64 tokens, the others one or none.
    monkeypatch.setattr(kernels, "FEWEST_ROWS", 64)
    monkeypatch.setattr(kernels, "MOST_ROWS", 64)
    x = (3 + torch.randn(T, dim, generator=generator)).to(device, dtype)
    x[assignment == 1] = x[0].clone()  # equal tokens deviate by exactly 0
    x[assignment == 3, 7] = float("nan")
    order = TokenOrder.unpack(sorted_by(assignment, C), C)
    scale, spread, count = sorted_cluster_scale(x, order, ScaleSettings(measure))
    wanted, wanted_count = dispersion_and_count(x.double(), assignment, C, measure=measure)
    assert torch.equal(count, wanted_count) and 64 < count[2] <= 128 and count[C - 1] == 0
    assert (spread[1] == 0).all() and spread[3].isnan().all()
    # Sums of at most 128 float32 terms, and a mean rounded to 2^-24 of the values.
    torch.testing.assert_close(spread.double(), wanted, rtol=2e-6, atol=0, equal_nan=True)
    wanted_scale = scale_from_dispersion(wanted, wanted_count)
    torch.testing.assert_close(scale.double(), wanted_scale, rtol=5e-6, atol=0)


@mostly_slow(
    ("dim", "dtype"),  # all features of a program exist, or not
    list(itertools.product([1024, 1030], [torch.bfloat16, torch.float16])),
    keep={0, 3},
    gpu=range(4),
)
def test_clusters_end_anywhere_in_a_step_of_eight_tokens(
    dtype: torch.dtype,
    dim: int,
    generator: torch.Generator,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cluster c has c tokens, infinite ones for c = 17; tokens of no cluster are NaN."""
    clusters = 26
    monkeypatch.setattr(order_module, "MANY_CLUSTERS", clusters - 1)
    own = torch.arange(clusters).repeat_interleave(torch.arange(clusters))
    own = torch.cat([own, torch.full((5,), -1)])
    own = own[torch.randperm(len(own), generator=generator)].to(device)
    x = (3 + torch.randn(len(own), dim, generator=generator)).to(device, dtype)
    x[own == -1] = float("nan")
    x[own == 17, 5] = float("-inf")
    order = TokenOrder.unpack(sorted_by(own, clusters), clusters)
    _, spread, count = sorted_cluster_scale(x, order, ScaleSettings("mad"))
    wanted, _ = dispersion_and_count(x.double(), own, clusters, measure="mad")
    assert count.tolist() == [*range(clusters)]
    # As above; a mean below 8 is rounded by 2^-22 at most.
    torch.testing.assert_close(spread.double(), wanted, rtol=2e-6, atol=2**-22, equal_nan=True)
