"""Routing by a distance in M. T tokens, D features, E experts, C = E clusters."""

import pytest
import torch

from acmoe import CosineConfig, RoutingState, SMoEConfig, UserError, build_router, fold_statistics
from acmoe.lab.variants import VariantConfig, VariantRouter
from acmoe.lab.variants.distance import DistanceRouter, with_ones
from acmoe.ops.route import ScaledTokens

T, D, E = 30, 5, 4


def built(seed=0, dtype=torch.float64, top_k=2, **options):
    torch.manual_seed(seed)
    config = VariantConfig(distance=True, **options)
    return build_router(config, dim=D, num_experts=E, top_k=top_k).to(dtype)


def drawn(seed=0):
    """Tokens off the origin, and a state in which some stand in no cluster."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, D, generator=generator, dtype=torch.float64) + 1.0
    state = RoutingState.identity(num_tokens=T, num_clusters=E, dim=D, dtype=torch.float64)
    assignment = torch.randint(-1, E, (T, 1), generator=generator)
    scale = torch.rand(E, D, generator=generator, dtype=torch.float64) + 0.2
    return x, state._replace(assignment=assignment, scale=scale)


def loop(x, state, embedding, bias):
    """-1/2 (h - e)' M (h - e) + 1/2 h' M h + b, number by number."""
    found = []
    for h, (cluster,) in zip(x.tolist(), state.assignment.tolist(), strict=True):
        m = [1.0] * D if cluster < 0 else state.scale[cluster].tolist()
        row = []
        for k, e in enumerate(embedding.tolist()):
            far = sum(m[q] * (h[q] - e[q]) ** 2 for q in range(D))
            length = sum(m[q] * h[q] ** 2 for q in range(D))
            row.append((length - far) / 2 + (0.0 if bias is None else bias[k].item()))
        found.append(row)
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("base", [SMoEConfig(), SMoEConfig(bias=True, gate="all")])
def test_the_affinity_is_the_distance_of_a_loop_up_to_a_term_of_the_token(base):
    router = built(base=base)
    x, state = drawn()
    found = router(x, state)
    wanted_TE = loop(x, state, router.base.embedding.detach(), router.base.bias)
    torch.testing.assert_close(found.affinity, wanted_TE)
    assert torch.equal(found.expert_ids, wanted_TE.topk(2).indices)
    assert found.expert_input.shape == (T, D)


def test_unit_embeddings_are_normalised_before_they_are_squared():
    router = built(base=SMoEConfig(normalize_embeddings=True))
    x, state = drawn()
    unit_ED = torch.nn.functional.normalize(router.base.embedding.detach(), dim=-1)
    torch.testing.assert_close(router(x, state).affinity, loop(x, state, unit_ED, None))


def test_without_clusters_it_is_the_nearest_embedding_and_its_base_alone():
    router = built()
    x, _ = drawn()
    nothing = RoutingState.identity(num_tokens=T, num_clusters=E, dim=D, dtype=torch.float64)
    found = router(x, nothing)
    embedding_ED = router.base.embedding.detach()
    nearest_T = torch.cdist(x, embedding_ED).argmin(-1)
    assert torch.equal(found.expert_ids[:, 0], nearest_T)
    assert torch.equal(found.affinity, router.base(x, nothing).affinity)
    torch.testing.assert_close(router.base.affinity(x), found.affinity)
    assert not torch.equal((x @ embedding_ED.T).argmax(-1), nearest_T)


def test_the_gradient_is_that_of_the_written_out_distance():
    router = built(base=SMoEConfig(bias=True, gate="all"))
    x, state = drawn()
    x.requires_grad_()
    weight_TK = torch.randn(T, 2, dtype=torch.float64)
    found = router(x, state)
    (found.gate * weight_TK).sum().backward()
    ours = [x.grad.clone(), router.base.embedding.grad.clone(), router.base.bias.grad.clone()]

    own_T = state.assignment[:, 0]
    m_T1D = torch.where((own_T < 0)[:, None], 1.0, state.scale[own_T.clamp(min=0)])[:, None]
    leaves = [x, router.base.embedding, router.base.bias]
    for leaf in leaves:
        leaf.grad = None
    far_TE = (m_T1D * (x[:, None] - router.base.embedding).square()).sum(-1)
    gate_TE = ((m_T1D[:, 0] * x.square()).sum(-1, keepdim=True) - far_TE) / 2 + router.base.bias
    (gate_TE.softmax(-1).gather(1, found.expert_ids) * weight_TK).sum().backward()
    for mine, leaf in zip(ours, leaves, strict=True):
        torch.testing.assert_close(mine, leaf.grad)


def test_a_common_factor_of_m_keeps_the_choice_as_in_a_metric():
    router = built()
    x, state = drawn()
    inside = state._replace(assignment=state.assignment.clamp(min=0))
    larger = inside._replace(scale=7 * inside.scale)
    assert torch.equal(router(x, inside).expert_ids, router(x, larger).expert_ids)


@pytest.mark.parametrize("mode", ["batch", "running"])
def test_statistics_of_its_own_tokens_reach_the_bias_too(mode):
    router = built(statistics=mode, statistics_of="current", momentum=0.0)
    x, state = drawn()
    router(x, state)
    fold_statistics(router)
    router.eval()
    scale_CD = router.cluster_scale(x[None], state, None, None).double()
    found = router(x, state).affinity
    wanted_TE = loop(
        x, state._replace(scale=scale_CD), router.base.embedding.detach(), router.base.bias
    )
    torch.testing.assert_close(found, wanted_TE, rtol=1e-6, atol=1e-6)
    assert (scale_CD - 1).abs().max() > 0.1


def test_low_precision_tokens_keep_their_dtype_and_masked_ones_their_silence():
    router = built(dtype=torch.float32)
    x, state = drawn()
    state = state._replace(scale=state.scale.float(), membership=state.membership.float())
    mask_T = torch.arange(T) % 3 > 0
    found = router(x.bfloat16(), state, token_mask=mask_T)
    assert found.expert_input.dtype == torch.bfloat16 and found.affinity.dtype == torch.float32
    other = router(torch.where(mask_T[:, None], x, 9.0).bfloat16(), state, token_mask=mask_T)
    assert torch.equal(found.loss, other.loss)


def test_tokens_that_hold_only_a_product_are_refused():
    x = torch.ones(2, D)
    with pytest.raises(UserError, match=r"distance=True needs M itself"):
        with_ones(ScaledTokens(x, product=x))


def test_a_router_is_refused_around_the_wrong_base():
    plain = build_router(SMoEConfig(), dim=D, num_experts=E, top_k=1)
    with pytest.raises(UserError, match=r"distance=True around a TopKRouter; build the router"):
        VariantRouter(VariantConfig(distance=True), plain)
    near = DistanceRouter(SMoEConfig(), dim=D, num_experts=E, top_k=1)
    with pytest.raises(UserError, match=r"distance=False around a DistanceRouter"):
        VariantRouter(VariantConfig(), near)
    with pytest.raises(UserError, match=r"base='cosine'"):
        built(base=CosineConfig())
