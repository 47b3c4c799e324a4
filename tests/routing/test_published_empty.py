"""The published presets where clusters are empty, against an independent loop in float64.

The published code makes tables of 1 + the highest expert id among all choices of all tokens. An
empty cluster inside the table counts as mad = 0 and takes nearly all of the mean; one behind its
end does not exist.
"""

from dataclasses import replace

import pytest
import torch

from acmoe import AdaptiveConfig, MoE, RoutingState, SMoEConfig, UserError
from acmoe.lab.variants import VariantConfig
from acmoe.routing.statistics import ClusterStatistics
from published_gate import PUBLISHED, published_gate, published_weights

E, D, T = 6, 6, 48

# First choices, second choices: drawn from these experts.
CASES = {
    "none empty": (range(6), range(6)),
    "middle empty": ((0, 1, 3, 4, 5), range(6)),
    "last never first, but second": ((0, 1, 2, 3, 4), (4, 5)),
    "last empty": ((0, 1, 2, 3, 4), range(5)),
    "two last empty": ((0, 1, 2, 3), range(4)),
    "middle and last empty": ((0, 2, 3), (0, 2, 3)),
    "first empty": ((1, 2, 3, 4, 5), range(1, 6)),
    "all in one": ((2,), (1,)),
    "all in the last": ((5,), (0,)),
}


def choices_of(case):
    firsts, seconds = CASES[case]
    torch.manual_seed(0)
    made = []
    for t in range(T):
        first = firsts[t % len(firsts)]
        others = [e for e in seconds if e != first]
        made.append([first, others[int(torch.randint(len(others), ()))]])
    return made


def layers(name, choices):
    """Return two layers, the state between them, and h: the first layer makes these choices."""
    torch.manual_seed(1)
    config = AdaptiveConfig.preset(name)
    size = {"dim": D, "hidden": 4, "num_experts": E, "top_k": 2}
    first = MoE(**size, router=SMoEConfig(), next_router=config).double()
    second = MoE(**size, router=config).double().eval()
    with torch.no_grad():
        first.router.embedding.copy_(torch.eye(E))
    x = 0.1 * torch.rand(T, D, dtype=torch.float64)
    for t, (best, other) in enumerate(choices):
        x[t, best] += 2.0
        x[t, other] += 1.0
    identity = RoutingState.identity(num_tokens=T, num_clusters=E, dim=D, dtype=torch.float64)
    routing = first.router(x, identity)
    assert routing.expert_ids.tolist() == choices
    _, state = first(x, identity)
    return first, second, state, torch.randn(T, D, dtype=torch.float64)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["reference-lm", "reference-swin"])
def test_two_layers_rescale_as_the_published_code(name, case):
    choices = choices_of(case)
    _, second, state, h = layers(name, choices)
    scale = published_weights(h.tolist(), choices, PUBLISHED[name])
    expected = h * torch.tensor([scale[ids[0]] for ids in choices], dtype=torch.float64)
    found = second.router.rescale(h, state).dense()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_experts_and_gates_are_those_of_the_published_language_gate(case):
    choices = choices_of(case)
    _, second, state, h = layers("reference-lm", choices)
    routing = second.router(h, state)
    expected = published_gate(h.tolist(), choices, second.router.base.embedding.tolist())
    assert [tuple(ids) for ids in routing.expert_ids.tolist()] == [ids for ids, _ in expected]
    gates = torch.tensor([gate for _, gate in expected], dtype=torch.float64)
    torch.testing.assert_close(routing.gate, gates, rtol=1e-9, atol=1e-12)
    # Where a cluster inside the table is empty all others shrink, and the gates go to 1/2.
    flat = case not in ("none empty", "last empty", "two last empty")
    assert (routing.gate[:, 0].max().item() < 0.51) == flat


def test_one_empty_cluster_of_sixteen_scales_the_others_to_0_0032_by_hand():
    # 15 clusters of two tokens at +-0.8: w = 1 / 0.8001 = 1.24984. The empty one: 1e4. Mean of all
    # w = 626.17, limit 6261.7, mean over clusters (15 * 1.24984 + 6261.7) / 16 = 392.53.
    # 1.24984 / 392.53 = 0.00318. If the empty cluster is the last one, it does not exist: M = 1.
    config = AdaptiveConfig.preset("reference-lm")
    statistics = ClusterStatistics(config, num_clusters=16, dim=1).eval()
    x = torch.tensor([0.8, -0.8] * 15, dtype=torch.float64).view(1, 30, 1)
    for empty, wanted in ((5, 0.0031841), (15, 1.0)):
        live = [c for c in range(16) if c != empty]
        assignment = torch.tensor(live).repeat_interleave(2)[None]
        scale = statistics.cluster_scale(x, assignment)
        torch.testing.assert_close(
            scale[live], torch.full((15, 1), wanted, dtype=torch.float64), rtol=1e-4, atol=0
        )
    # The second choice of one token is enough to make the last cluster exist.
    scale = statistics.cluster_scale(x, assignment, chosen_C=torch.ones(16))
    assert float(scale[0]) == pytest.approx(0.0031841, rel=1e-4)


def test_padding_chooses_no_cluster():
    choices = choices_of("last empty")
    first, _, state, _ = layers("reference-lm", choices)
    x = torch.zeros(1, T + 1, D, dtype=torch.float64)
    x[0, :T] = torch.eye(E, dtype=torch.float64)[[ids[0] for ids in choices]] * 2
    x[0, :T] += torch.eye(E, dtype=torch.float64)[[ids[1] for ids in choices]]
    x[0, T, 5] = 3.0
    mask = torch.arange(T + 1)[None] < T
    identity = RoutingState.identity(num_tokens=T + 1, num_clusters=E, dim=D, dtype=torch.float64)
    _, masked = first(x, identity, token_mask=mask)
    assert torch.equal(masked.scale, state.scale)
    assert masked.scale[:, 0].tolist() == [1, 1, 1, 1, 1, 0]
    _, whole = first(x, identity)
    assert whole.scale[:, 0].tolist() == [1, 1, 1, 1, 1, 1]


def test_without_the_option_every_cluster_counts_and_the_state_is_ones():
    config = AdaptiveConfig.preset("reference-lm")
    old = replace(config, mean_over="all")
    x = torch.randn(1, 30, 2, dtype=torch.float64)
    assignment = torch.arange(15).repeat_interleave(2)[None]
    scale = ClusterStatistics(old, num_clusters=16, dim=2).cluster_scale(x, assignment)
    assert float(scale[:15].mean()) < 0.01
    moe = MoE(dim=D, hidden=4, num_experts=E, top_k=2, router=SMoEConfig(), next_router=old)
    _, state = moe(torch.randn(3, D), RoutingState.identity(num_tokens=3, num_clusters=E, dim=D))
    assert torch.equal(state.scale, torch.ones(E, D))


def test_running_statistics_count_up_to_the_last_cluster_ever_seen():
    # Cluster 1 of 4 was never seen, cluster 3 neither: the first counts as s = 0, the last not.
    config = replace(AdaptiveConfig.preset("reference-lm"), statistics="running")
    statistics = ClusterStatistics(config, num_clusters=4, dim=1).eval()
    statistics.dispersion.copy_(torch.tensor([[1.0], [0.0], [1.0], [0.0]]))
    statistics.weight.copy_(torch.tensor([5.0, 0.0, 5.0, 0.0]))
    # w = 1/1.0001, 1e4, 1/1.0001: mean 3334, limit 33,340.
    w = 1 / 1.0001
    expected = w / ((2 * w + 1e4) / 3)
    assert statistics.average_scale()[0, 0].item() == pytest.approx(expected, rel=1e-6)


def test_options_that_cannot_meet_are_refused():
    with pytest.raises(UserError, match=r"mean_over='some' is unknown; choose one of all, chosen"):
        AdaptiveConfig(mean_over="some")
    with pytest.raises(UserError, match="mean_over='chosen' counts clusters"):
        AdaptiveConfig(mean_over="chosen", statistics="prefix")
    with pytest.raises(UserError, match="mean_over='chosen' leaves clusters out of means"):
        VariantConfig(mean_over="chosen", part="own")
