"""The state that a layer hands to the next: clusters and their weights; the state before any.

T tokens, E experts, J clusters per token.
"""

import re

import numpy as np
import pytest
import torch

from acmoe import AdaptiveConfig, MoE, RoutingState, UserError, build_router
from acmoe.routing.state import check_state, clusters_of


def test_the_first_cluster_is_the_argmax_of_the_affinity():
    affinity = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    for mix in (1, 2, 7):
        assignment, membership = clusters_of(affinity, mix)
        assert torch.equal(assignment[:, 0], affinity.argmax(1))
        assert assignment.shape == membership.shape == (50, mix)
        torch.testing.assert_close(membership.sum(1), torch.ones(50))
        assert assignment.is_contiguous()


def test_clusters_come_best_first_with_renormalised_gates():
    # Gates proportional to 1, 6, 3: the two best are experts 1 and 2 with shares 2/3 and 1/3.
    affinity = torch.tensor([[1.0, 6.0, 3.0]]).log()
    assignment, membership = clusters_of(affinity, 2)
    assert assignment.tolist() == [[1, 2]]
    torch.testing.assert_close(membership, torch.tensor([[2 / 3, 1 / 3]]))


def test_ties_go_to_the_first_expert_however_many_clusters_are_read():
    affinity = torch.zeros(3, 5)
    assert clusters_of(affinity, 1)[0].flatten().tolist() == [0, 0, 0]
    assert clusters_of(affinity, 2)[0].tolist() == [[0, 1]] * 3


def test_the_weights_of_one_cluster_per_token_serve_the_next_state_again():
    affinity = torch.randn(4, 3)
    ones = torch.ones(4, 1)
    assert clusters_of(affinity, 1, before=ones)[1] is ones
    for other in (ones[:3], torch.ones(4, 2) / 2, ones.double(), ones.to("meta")):
        found = clusters_of(affinity, 1, before=other)[1]
        assert found.dtype == torch.float32 and found.tolist() == [[1.0]] * 4
    assert clusters_of(affinity, 2, before=ones)[1].shape == (4, 2)


def test_membership_has_a_gradient_only_where_the_scale_has():
    affinity = torch.randn(4, 3, requires_grad=True)
    for mix in (1, 2):
        assert not any(value.requires_grad for value in clusters_of(affinity, mix))
    assignment, membership = clusters_of(affinity, 2, detach=False)
    assert not assignment.requires_grad  # which cluster is a label
    assert membership.requires_grad  # how much of it is part of M


def test_the_identity_holds_every_token_in_no_cluster_under_scale_one():
    state = RoutingState.identity(num_tokens=4, num_clusters=3, dim=2, mix=2)
    assert state.assignment.tolist() == [[-1, -1]] * 4
    assert state.membership.tolist() == [[1.0, 0.0]] * 4
    assert torch.equal(state.scale, torch.ones(3, 2))
    assert state.aux_loss == 0
    assert all(value.is_contiguous() for value in state[:4])


@pytest.mark.parametrize("name", ["num_tokens", "num_clusters", "dim"])
@pytest.mark.parametrize("size", [-1, 2.0, True, None, "4", torch.tensor(-1), torch.tensor(2.0)])
def test_a_size_of_the_identity_that_is_no_count_is_named(name, size):
    sizes = {"num_tokens": 4, "num_clusters": 3, "dim": 2, name: size}
    message = re.escape(f"{name}={size!r}; it must be a whole number, 0 or more")
    with pytest.raises(UserError, match=f"^{message}"):
        RoutingState.identity(**sizes)


def test_sizes_may_be_numbers_of_numpy_and_torch():
    for size in (np.int64(4), torch.tensor(4)):
        state = RoutingState.identity(num_tokens=size, num_clusters=size, dim=size)
        assert state.assignment.shape == (4, 1) and state.scale.shape == (4, 4)


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, and warns of what it fixes
def test_a_router_is_traced_by_torch_jit_which_makes_sizes_tensors():
    router = build_router("adaptive", dim=2, num_experts=3, top_k=1).eval()
    router.requires_grad_(False)
    traced = torch.jit.trace(lambda x: router(x).affinity, torch.randn(4, 2), check_trace=False)
    x = torch.randn(4, 2)
    torch.testing.assert_close(traced(x), router(x).affinity)


@pytest.mark.filterwarnings("ignore")
def test_a_layer_is_traced_by_torch_jit_for_any_number_of_choices():
    for top_k in (1, 2, 3, 4):
        moe = MoE(dim=2, hidden=3, num_experts=5, top_k=top_k).eval().requires_grad_(False)
        traced = torch.jit.trace(lambda x, moe=moe: moe(x)[0], torch.randn(4, 2), check_trace=False)
        x = torch.randn(4, 2)
        torch.testing.assert_close(traced(x), moe(x)[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_tokens": 5},
            r"assignment has shape \(5, 1\); x has 6 tokens: pass the state of the same tokens",
        ),
        ({"mix": 2}, r"state.assignment has shape \(6, 2\).*give the layer before"),
        ({"num_clusters": 3}, r"state.scale has 3 clusters; this router has 4"),
        ({"dim": 1}, r"state.scale has 1 features; the tokens have 2.*RoutingState.identity"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(changes, message):
    size = {"num_tokens": 6, "num_clusters": 4, "dim": 2, "mix": 1}
    for x in (torch.zeros(6, 2), torch.zeros(2, 3, 2)):
        check_state(RoutingState.identity(**size), x, 1, 4, AdaptiveConfig())
        with pytest.raises(UserError, match=message):
            check_state(RoutingState.identity(**(size | changes)), x, 1, 4, AdaptiveConfig())


@pytest.mark.parametrize("mix", [0, -1, 1.5, True, None])
def test_a_token_belongs_to_one_cluster_or_more(mix):
    with pytest.raises(UserError, match=f"^mix={mix}; it must be a whole number of clusters, 1 or"):
        RoutingState.identity(num_tokens=6, num_clusters=4, dim=2, mix=mix)
