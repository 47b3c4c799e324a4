"""Matched temperatures: rescaled affinities that vary over experts as much as plain ones.

T tokens, D features, E experts, C = E clusters.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from variant_router_cases import drawn, router_of

from acmoe import CosineConfig, SMoEConfig, UserError, build_router, fold_statistics
from acmoe.lab.variants import VariantConfig, VariantRouter


def variances(affinity, bias, cluster, mask=None):
    """Per cluster: the mean over tokens of the variance over experts, by a loop."""
    found = {}
    for t, c in enumerate(cluster):
        if c >= 0 and (mask is None or mask[t]):
            inner = affinity[t] - bias
            found.setdefault(c, []).append((inner - inner.mean()).square().mean())
    return {c: sum(values) / len(values) for c, values in found.items()}


@given(
    seed=st.integers(0, 99),
    statistics_of=st.sampled_from(["previous", "current"]),
    center=st.booleans(),
    masked=st.booleans(),
)
def test_matched_affinities_vary_over_experts_as_much_as_plain_ones(
    seed, statistics_of, center, masked
):
    center = center and statistics_of == "current"
    router = router_of(
        statistics="batch", statistics_of=statistics_of, match=True, center=center, seed=seed
    )
    x, state = drawn(seed=seed)
    mask = torch.arange(24) % 5 > 0 if masked else None
    found = router(x, state, token_mask=mask)
    plain = router.base(x, state)
    cluster, bias = state.assignment[:, 0].tolist(), router.base.bias
    wanted = variances(plain.affinity, bias, cluster, mask)
    for c, value in variances(found.affinity, bias, cluster, mask).items():
        torch.testing.assert_close(value, wanted[c], rtol=1e-5, atol=0.0)
    nowhere = (state.assignment[:, 0] < 0) & (torch.ones(24) > 0 if mask is None else mask)
    assert torch.equal(found.affinity[nowhere], plain.affinity[nowhere])


def test_matching_leaves_the_order_of_experts_as_it_is():
    x, state = drawn()
    for base in (SMoEConfig(gate="all"), SMoEConfig(gate="all", normalize_embeddings=True)):
        matched, other = (
            router_of(statistics="batch", base=base, match=match)(x, state)
            for match in (True, False)
        )
        assert torch.equal(matched.expert_ids, other.expert_ids)
        assert not torch.allclose(matched.gate, other.gate)


def test_matched_temperatures_of_running_statistics_are_updated_like_the_scale():
    router = router_of(match=True, momentum=0.5)
    average, weight = {}, {}
    for seed in range(4):
        x, state = drawn(seed=seed)
        router(x, state)
        fold_statistics(router)
        cluster = state.assignment[:, 0].tolist()
        both = [
            variances(router.base.affinity(tokens), router.base.bias, cluster)
            for tokens in (x, stretched(x, state))
        ]
        for c in both[0]:
            count, old = cluster.count(c), 0.5 * weight.get(c, 0.0)
            weight[c] = old + count
            new = torch.stack([part[c].detach() for part in both])
            average[c] = (old * average.get(c, 0.0) + count * new) / weight[c]
    x, state = drawn(seed=9)
    tau = torch.stack([(average[c][1] / average[c][0]).sqrt() for c in range(3)])
    cluster = state.assignment[:, 0]
    divided = stretched(x, state)
    divided = torch.where((cluster < 0)[:, None], x, divided / tau[cluster.clamp(min=0), None])
    found = router.eval().rescale(x, state).dense()
    torch.testing.assert_close(found, divided, rtol=1e-5, atol=1e-6)


def stretched(x, state):
    """M h, and h for a token in no cluster."""
    cluster = state.assignment[:, 0]
    return torch.where((cluster < 0)[:, None], x, x * state.scale[cluster.clamp(min=0)])


def test_before_the_first_update_a_matched_router_divides_by_one():
    x, state = drawn()
    router = router_of(match=True).eval()
    assert torch.equal(router.rescale(x, state).dense(), stretched(x, state))


def test_match_needs_a_base_with_inner_products():
    cosine = build_router(CosineConfig(), dim=4, num_experts=3, top_k=1)
    with pytest.raises(UserError, match=r"match=True around a CosineRouter; .*TopKRouter"):
        VariantRouter(VariantConfig(match=True), cosine)


def test_a_matched_scale_stays_one_scale_per_cluster():
    """The fused router kernel reads a (C, D) scale; a mean per cluster needs the product."""
    x, state = drawn()
    matched = router_of(match=True).rescale(x, state)
    assert matched.product is None
    assert matched.scale.shape == (3, 4)
    centred = router_of(statistics_of="current", center=True).rescale(x, state)
    assert centred.product is not None
