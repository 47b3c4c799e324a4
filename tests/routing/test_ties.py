"""Equal affinities: highest first, lowest index among equals, and k* among the chosen experts.

T tokens, D features, E experts, K experts per token.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acmoe import (
    AdaptiveConfig,
    CosineConfig,
    ExpertChoiceConfig,
    HashConfig,
    MoE,
    RoutingState,
    SMoEConfig,
    SoftConfig,
    StableConfig,
    ThresholdConfig,
    build_router,
)
from acmoe.config.routing import MetricConfig
from acmoe.ops.route import reference
from acmoe.ops.route.reference import best_first, first_chosen
from acmoe.routing.state import clusters_of, first_choice

LEVELS = [-2.0, -1.0, -0.0, 0.0, 1.0, 3.0]
ODD = [*LEVELS, math.nan, math.inf, -math.inf, torch.finfo(torch.float64).min]


def ranked(row, top_k):
    """The columns of a row, best first, by comparing pairs."""
    rest, found = list(range(len(row))), []
    for _ in range(top_k):
        best = rest[0]
        for column in rest[1:]:
            larger = math.isnan(row[column]) or row[column] > row[best]
            if larger and not math.isnan(row[best]):
                best = column
        rest.remove(best)
        found.append(best)
    return found


@given(
    data=st.data(),
    num_experts=st.integers(1, 20),
    odd=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_best_come_first_and_equals_by_index(data, num_experts, odd, dtype):
    top_k = data.draw(st.integers(1, num_experts))
    # -inf and the lowest number are equals; a row may hold one of them.
    levels = ODD[:-1] if odd else LEVELS
    row = st.lists(st.sampled_from(levels), min_size=num_experts, max_size=num_experts)
    rows = data.draw(st.lists(row, min_size=0, max_size=3))
    value = torch.tensor(rows, dtype=dtype).view(-1, num_experts)
    for few in (0, 512):  # one by one, and sorted
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "_FEW", few)
            found = best_first(value, top_k)
        assert found.tolist() == [ranked(row, top_k) for row in rows]


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("few", [0, 512])
def test_every_expert_is_chosen_once_whatever_the_row_holds(few, top_k, monkeypatch):
    monkeypatch.setattr(reference, "_FEW", few)
    value = torch.tensor([[1.0, -math.inf, -math.inf, ODD[-1]], [math.nan] * 4, [-math.inf] * 4])
    for row in best_first(value, top_k).tolist():
        assert len(set(row)) == top_k and set(row) <= set(range(4))


def test_the_first_choice_is_the_best_of_the_chosen():
    affinity = torch.tensor([[5.0, 1.0, 3.0, 3.0]] * 4)
    none = 4
    chosen = torch.tensor([[3, 2], [1, 0], [none, 1], [none, none]])
    assert first_chosen(affinity, chosen).tolist() == [2, 0, 1, 0]


def test_a_first_cluster_of_lower_affinity_comes_first_and_keeps_its_weight():
    # Affinities ln 1, ln 6, ln 3; k* = 0: its share beside expert 1 is 1 / 7.
    affinity = torch.tensor([[1.0, 6.0, 3.0]]).log()
    assignment, membership = clusters_of(affinity, 2, first_T=torch.tensor([0]))
    assert assignment.tolist() == [[0, 1]]
    torch.testing.assert_close(membership, torch.tensor([[1 / 7, 6 / 7]]))


ROUTERS = {
    "smoe": SMoEConfig(),
    "all": SMoEConfig(gate="all", normalize_embeddings=True),
    "noisy": SMoEConfig(noise=1.0),
    "biased": SMoEConfig(bias_balancing=0.1),
    "cosine": CosineConfig(),
    "threshold": ThresholdConfig(threshold=0.3),
    "learned": ThresholdConfig(threshold=0.3, learnable=True),
    "stable": StableConfig(vocab_size=5),
    "legacy": StableConfig(legacy=True),
    "hash": HashConfig(),
    "expert-choice": ExpertChoiceConfig(),
    "soft": SoftConfig(),
    "metric": MetricConfig(),
    "adaptive": AdaptiveConfig(base=SMoEConfig(bias_balancing=0.1), statistics="batch"),
}


def quantised(shape, generator):
    return torch.randint(-1, 2, shape, generator=generator).float()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_a_cluster_is_a_chosen_expert_under_many_ties(name, training, generator):
    num_tokens, dim, num_experts, top_k = 24, 3, 6, 2
    router = build_router(ROUTERS[name], dim=dim, num_experts=num_experts, top_k=top_k)
    router.train(training)
    with torch.no_grad():
        for key, parameter in router.named_parameters():
            if key.endswith(("embedding", "slots", "light_tokens.weight", "light_experts")):
                parameter.copy_(quantised(parameter.shape, generator))
        for key, buffer in router.named_buffers():
            if key.endswith("selection.bias"):
                buffer.copy_(torch.tensor([-9.0, -9.0, 0.0, 0.0, 0.1, 0.1]))
    x = quantised((num_tokens, dim), generator)
    x[:3] = 0
    state = RoutingState.identity(num_tokens=num_tokens, num_clusters=num_experts, dim=dim)
    ids = torch.randint(0, 5, (num_tokens,), generator=generator)
    routing = router(x, state, token_ids=ids)
    assert all(value.isfinite().all() for value in (routing.gate, routing.affinity, routing.loss))
    first, biased = first_choice(routing).tolist(), 0
    for t, row in enumerate(routing.expert_ids.tolist()):
        affinity = [round(a, 6) for a in routing.affinity[t].tolist()]
        chosen = [e for e in row if e < num_experts]
        assert len(set(chosen)) == len(chosen)
        best = ranked(affinity, num_experts)[0]
        if not chosen:
            assert name == "expert-choice" and first[t] == best
        elif name == "hash":  # its keys have more digits than its affinities
            assert first[t] == chosen[0]
        else:
            assert first[t] == min(chosen, key=lambda e: (-affinity[e], e))
            biased += first[t] != best
        if name not in ("biased", "adaptive", "expert-choice", "hash"):
            assert chosen == ranked(affinity, len(chosen))
    assert (biased > 0) == (name in ("biased", "adaptive", "expert-choice"))


@pytest.mark.parametrize("mix", [1, 2])
def test_the_state_holds_the_best_chosen_expert_before_rows_are_dropped(mix, generator):
    config = AdaptiveConfig(base=SMoEConfig(bias_balancing=0.1), statistics="batch", mix=mix)
    moe = MoE(dim=3, hidden=4, num_experts=4, top_k=2, router=config, capacity_factor=0.5).eval()
    moe.router.base.selection.bias.copy_(torch.tensor([-9.0, 0.0, 0.0, 0.0]))
    x = quantised((16, 3), generator)
    begin = RoutingState.identity(num_tokens=16, num_clusters=4, dim=3, mix=mix)
    _, state = moe(x, begin)
    routing = moe.router(x, begin)
    for t, row in enumerate(routing.expert_ids.tolist()):
        wanted = min(row, key=lambda e: (-routing.affinity[t, e].item(), e))
        assert state.assignment[t, 0] == wanted != 0
    assert mix == 1 or (state.assignment[:, 1] == 0).any()  # the others follow by affinity alone
