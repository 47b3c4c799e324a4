"""The diagonal of each token's M, as rows that the router reads: numbers by hand, and sequences.

B sequences, L tokens in each, D features, C clusters.
"""

import pytest
import torch

from acmoe import AdaptiveConfig, RoutingState, build_router
from acmoe.ops.route.rescaled import rows_of
from acmoe.routing.token_scale import own_rows, token_scale


def state_of(assignment: list[list[int]], membership: list[list[float]]) -> RoutingState:
    scale = torch.tensor([[2.0], [3.0]])
    return RoutingState(torch.tensor(assignment), torch.tensor(membership), scale, torch.zeros(()))


def rows(scale: torch.Tensor, state: RoutingState, x: torch.Tensor) -> list[float]:
    return rows_of(*own_rows(scale, state, x)).flatten().tolist()


def test_each_sequence_has_scales_of_its_own() -> None:
    x = torch.zeros(2, 3, 1)
    scale = torch.tensor([[[2.0], [3.0]], [[5.0], [7.0]]])  # (B, C, D)
    state = state_of([[0], [1], [-1], [1], [0], [-1]], [[1.0]] * 6)
    assert rows(scale, state, x) == [2.0, 3.0, 1.0, 7.0, 5.0, 1.0]


def test_each_token_may_have_a_scale_of_its_own() -> None:
    x = torch.zeros(2, 2, 1)
    scale = torch.tensor([2.0, 3.0, 5.0, 7.0]).view(2, 2, 1, 1)  # (B, L, J, D)
    state = state_of([[0], [-1], [1], [0]], [[1.0]] * 4)
    assert rows(scale, state, x) == [2.0, 1.0, 5.0, 7.0]


def test_several_clusters_are_averaged_by_membership() -> None:
    x = torch.zeros(3, 1)
    state = state_of([[0, 1], [1, 0], [0, -1]], [[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]])
    # 2/2 + 3/2; 3; 2/4 + 1 * 3/4
    assert rows(state.scale, state, x) == [2.5, 3.0, 1.25]
    of_sequence = torch.stack([state.scale, 10 * state.scale])  # (B, C, D)
    twice = state_of(state.assignment.repeat(2, 1).tolist(), state.membership.repeat(2, 1).tolist())
    assert rows(of_sequence, twice, torch.zeros(2, 3, 1)) == [2.5, 3.0, 1.25, 25.0, 30.0, 5.75]


@pytest.mark.parametrize("mix", [1, 2])
@pytest.mark.parametrize("mode", ["batch", "running", "prefix", "sequence"])
def test_rows_are_the_scales_of_the_tokens(mode: str, mix: int, generator: torch.Generator) -> None:
    B, L, D, C = 2, 7, 3, 4
    config = AdaptiveConfig(statistics=mode, statistics_of="current", mix=mix)  # type: ignore[arg-type]
    router = build_router(config, dim=D, num_experts=C, top_k=2)
    x = torch.randn(B, L, D, generator=generator)
    state = RoutingState(
        torch.randint(-1, C, (B * L, mix), generator=generator),
        torch.rand(B * L, mix, generator=generator),
        torch.rand(C, D, generator=generator) + 0.5,
        torch.zeros(()),
    )
    scale = router.cluster_scale(x, state, None, None)
    wanted = token_scale(scale, state, x)
    assert torch.equal(rows_of(*own_rows(scale, state, x)).view_as(x), wanted)
    torch.testing.assert_close(router.rescale(x, state).dense(), x * wanted)


def test_statistics_of_a_sequence_do_not_see_other_sequences(generator: torch.Generator) -> None:
    B, L, D, C = 3, 12, 4, 2
    router = build_router(AdaptiveConfig(statistics="sequence"), dim=D, num_experts=C, top_k=1)
    x = torch.randn(B, L, D, generator=generator)
    ids = torch.randint(C, (B * L, 1), generator=generator)

    def state_for(ids: torch.Tensor) -> RoutingState:
        blank = RoutingState.identity(num_tokens=len(ids), num_clusters=C, dim=D)
        return blank._replace(assignment=ids)

    together = router.rescale(x, state_for(ids)).dense()
    alone = [
        router.rescale(x[b : b + 1], state_for(ids[b * L : (b + 1) * L])).dense() for b in range(B)
    ]
    assert torch.equal(together, torch.cat(alone))
    assert not torch.allclose(together, x)
