"""The four presets against loops that follow the paper, and its published code, to the constant.

Published: w = 1 / (mad + eps), empty clusters and single tokens counting as mad = 0; w at most
`clamp` times the mean of all w; divided by its mean over clusters (language) or over everything
(vision; in Swin by the mean before the clamp). Statistics are those of the current layer's tokens
by the previous layer's clusters. There are as many clusters as the highest expert id among all
choices of all tokens, plus one. Cases of empty clusters are in test_published_empty.py.

T tokens, D features, E experts, C = E clusters.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acmoe import AdaptiveConfig, LossConfig, MoE, RoutingState, SoftMoE, UserError, build_router
from acmoe.routing.adaptive import AdaptiveRouter
from published_gate import PUBLISHED, clusters_state, mean, published_weights


@pytest.mark.parametrize("name", ["reference-lm", "reference-swin"])
@given(
    num_tokens=st.integers(1, 12),
    dim=st.integers(1, 4),
    num_experts=st.integers(2, 5),
    seed=st.integers(0, 99),
)
def test_published_presets_rescale_tokens_as_the_published_code_does(
    name, num_tokens, dim, num_experts, seed
):
    torch.manual_seed(seed)
    router = build_router(
        AdaptiveConfig.preset(name), dim=dim, num_experts=num_experts, top_k=2
    ).double()
    x = torch.randn(num_tokens, dim, dtype=torch.float64)
    clusters = torch.randint(num_experts, (num_tokens,)).tolist()
    scale = published_weights(x.tolist(), [[c] for c in clusters], PUBLISHED[name])
    expected = x * torch.tensor([scale[c] for c in clusters], dtype=torch.float64)
    found = router.rescale(x, clusters_state([[c] for c in clusters], router)).dense()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_an_empty_cluster_reaches_the_clamp_and_lowers_all_others_by_hand():
    # Language: eps 1e-4, clamp 10. Cluster 1 holds 0 and 2 (mad 1, w = 1/1.0001), cluster 0 is
    # empty (w = 1e4). Mean of all w: 5000.49995; the limit 50,005 cuts nothing. The mean over
    # clusters is the same, so the tokens of cluster 1 shrink to 1/5001.
    # Swin: clamp 1.5. The limit 7500.74993 cuts the empty cluster, but the mean is the one before.
    for name in ("reference-lm", "reference-swin"):
        config = AdaptiveConfig.preset(name)
        router = build_router(config, dim=1, num_experts=2, top_k=1).double()
        x = torch.tensor([[0.0], [2.0]], dtype=torch.float64)
        w1 = 1 / 1.0001
        scale = w1 / ((w1 + 1e4) / 2)
        assert scale == pytest.approx(0.99990 / 5000.49995, rel=1e-5)
        found = router.rescale(x, clusters_state([[1], [1]], router)).dense()
        assert found[1, 0].item() == pytest.approx(2 * scale, rel=1e-9)


def test_the_language_preset_gates_by_unit_embeddings_over_the_selected_experts():
    torch.manual_seed(0)
    config = AdaptiveConfig.preset("reference-lm")
    router = build_router(config, dim=5, num_experts=4, top_k=2, losses=LossConfig(balance=1.0))
    router = router.double()
    x = torch.randn(8, 5, dtype=torch.float64)
    state = clusters_state([[c] for c in (0, 1, 2, 3, 0, 1, 2, 0)], router)
    routing = router(x, state)
    unit = router.base.embedding / router.base.embedding.norm(dim=1, keepdim=True)
    affinity = router.rescale(x, state).dense() @ unit.T
    torch.testing.assert_close(routing.affinity, affinity)
    torch.testing.assert_close(routing.gate, affinity.topk(2).values.softmax(-1))
    # The balance loss softens the affinities by 0.3.
    share = torch.bincount(routing.expert_ids.flatten(), minlength=4) / 16
    expected = 4 * (share * (affinity / 0.3).softmax(-1).mean(0)).sum()
    torch.testing.assert_close(routing.loss, expected)
    assert config.scale_experts is False


def test_the_swin_preset_gates_over_all_experts_with_noise_and_feeds_scaled_tokens():
    torch.manual_seed(0)
    config = AdaptiveConfig.preset("reference-swin")
    moe = MoE(dim=5, hidden=7, num_experts=4, top_k=2, router=config, activation="gelu").double()
    x = torch.randn(8, 5, dtype=torch.float64)
    clusters = [0, 1, 2, 3, 0, 1, 2, 0]
    state = clusters_state([[c] for c in clusters], moe.router)
    assert not torch.equal(moe.router(x, state).affinity, moe.router(x, state).affinity)  # noise

    moe.eval()
    choices = [[c] for c in clusters]
    scale = published_weights(x.tolist(), choices, PUBLISHED["reference-swin"])
    scaled = x * torch.tensor([scale[c] for c in clusters], dtype=torch.float64)
    affinity = scaled @ moe.router.base.embedding.T
    gate, ids = affinity.softmax(-1).topk(2)
    expected = torch.zeros_like(x)
    experts = moe.experts
    for t in range(8):
        for g, e in zip(gate[t], ids[t], strict=True):
            hidden = experts.up[e] @ scaled[t] + experts.up_bias[e]
            hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
            expected[t] += g * (experts.down[e] @ hidden + experts.down_bias[e])
    torch.testing.assert_close(moe(x, state)[0], expected)


@pytest.mark.parametrize("drawn", [9, 8])  # 8: no token has the last cluster, which then is none
def test_the_soft_preset_mixes_eight_scales_and_fills_slots_with_scaled_tokens(drawn):
    torch.manual_seed(0)
    config = AdaptiveConfig.preset("reference-soft")
    moe = SoftMoE(dim=4, hidden=6, num_experts=9, router=config).double()
    x = torch.randn(1, 12, 4, dtype=torch.float64)
    order = torch.rand(12, drawn).argsort(1)[:, :8].tolist()
    share = torch.rand(12, 8, dtype=torch.float64)
    share = share / share.sum(1, keepdim=True)
    state = clusters_state(order, moe.router, membership=share)

    scale = published_weights(x[0].tolist(), order, PUBLISHED["reference-soft"])
    factor = [
        [sum(share[t, j].item() * scale[c][q] for j, c in enumerate(order[t])) for q in range(4)]
        for t in range(12)
    ]
    scaled = x[0] * torch.tensor(factor, dtype=torch.float64)
    slots = moe.base.slots / moe.base.slots.norm(dim=1, keepdim=True)
    logits = moe.base.logit_scale * (scaled / scaled.norm(dim=1, keepdim=True)) @ slots.T
    filled = logits.softmax(0).T @ scaled
    outputs = []
    for e in range(9):
        hidden = torch.nn.functional.gelu(moe.experts.up[e] @ filled[e] + moe.experts.up_bias[e])
        outputs.append(moe.experts.down[e] @ hidden + moe.experts.down_bias[e])
    expected = logits.softmax(1) @ torch.stack(outputs)
    torch.testing.assert_close(moe(x, state)[0][0], expected)


@given(
    num_tokens=st.integers(2, 12),
    dim=st.integers(1, 4),
    num_experts=st.integers(2, 4),
    seed=st.integers(0, 99),
)
def test_the_paper_preset_is_definition_one(num_tokens, dim, num_experts, seed):
    # s of the previous layer's router inputs by its first choice; M = 1/s over its mean, per
    # cluster; the affinity alone is rescaled; clusters under two tokens keep M = I.
    torch.manual_seed(seed)
    config = AdaptiveConfig.preset("paper")
    size = {"dim": dim, "hidden": 3, "num_experts": num_experts, "top_k": 1}
    first, second = (MoE(**size, router=config).double() for _ in range(2))
    x, h = torch.randn(2, num_tokens, dim, dtype=torch.float64)
    _, state = first(
        x, RoutingState.identity(num_tokens=num_tokens, num_clusters=num_experts, dim=dim)
    )
    routing = second.router(h, state)

    chosen = (x @ first.router.base.embedding.T).argmax(1).tolist()
    assert state.assignment.flatten().tolist() == chosen
    scale = []
    for c in range(num_experts):
        members = [row for row, own in zip(x.tolist(), chosen, strict=True) if own == c]
        if len(members) < 2:
            scale.append([1.0] * dim)
            continue
        centre = [mean(row[q] for row in members) for q in range(dim)]
        s = [mean(abs(row[q] - centre[q]) for row in members) for q in range(dim)]
        s = [max(value, 1e-3 * mean(s)) for value in s]
        scale.append([1 / value / mean(1 / other for other in s) for value in s])
    moved = h * torch.tensor([scale[c] for c in chosen], dtype=torch.float64)
    expected = moved @ second.router.base.embedding.T
    torch.testing.assert_close(routing.affinity, expected, rtol=1e-9, atol=1e-12)


def test_an_unknown_preset_is_refused_with_the_names_there_are():
    names = "paper, reference-lm, reference-swin, reference-soft"
    with pytest.raises(UserError, match=f"preset='lm' is unknown; choose one of {names}"):
        AdaptiveRouter.preset("lm")
