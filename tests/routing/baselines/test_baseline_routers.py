"""Random scales, hashed token ids and expert choice.

T tokens, D features, E experts, C = E clusters, K experts per token.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acmoe import (
    ExpertChoiceConfig,
    HashConfig,
    LossConfig,
    RandomConfig,
    RoutingState,
    SMoEConfig,
    build_router,
)


def build(config, *, dim=6, num_experts=4, top_k=2, seed=0, **losses):
    torch.manual_seed(seed)
    weights = LossConfig(**losses) if losses else LossConfig()
    return build_router(config, dim=dim, num_experts=num_experts, top_k=top_k, losses=weights)


def in_clusters(assignment, router):
    """A state whose tokens stand in these clusters; (T, J), equal membership."""
    assignment = torch.as_tensor(assignment)
    assignment = assignment[:, None] if assignment.dim() == 1 else assignment
    state = RoutingState.identity(
        num_tokens=len(assignment), num_clusters=router.num_experts, dim=router.dim
    )
    share = torch.full(assignment.shape, 1 / assignment.shape[1])
    return state._replace(assignment=assignment, membership=share)


class TestRandom:
    def test_scales_are_normal_around_one_clipped_at_zero(self):
        # The part of N(1, 0.5) below 0 is Phi(-2) = 0.02275. With z = -2, phi(2) = 0.05399:
        # mean of the clipped value = 1 * Phi(2) + 0.5 * phi(2) = 0.97725 + 0.02700 = 1.00425.
        router = build(RandomConfig(), dim=50, num_experts=8)
        state = in_clusters(torch.arange(8), router)
        scale = torch.stack([router.rescale(torch.ones(8, 50), state).dense() for _ in range(200)])
        assert scale.min() == 0
        n = scale.numel()
        assert n == 80_000
        assert abs((scale == 0).float().mean().item() - 0.02275) < 5 * math.sqrt(0.02275 / n)
        assert abs(scale.mean().item() - 1.00425) < 5 * 0.5 / math.sqrt(n)
        assert abs(scale[scale > 1].mean().item() - (1 + 0.5 * math.sqrt(2 / math.pi))) < 0.01

    def test_tokens_of_one_cluster_share_their_factor_and_others_do_not(self):
        router = build(RandomConfig())
        state = in_clusters([2, 0, 2, 0, 1], router)
        factor = router.rescale(torch.ones(5, 6), state).dense()
        assert torch.equal(factor[0], factor[2])
        assert torch.equal(factor[1], factor[3])
        assert not torch.equal(factor[0], factor[1])
        assert not torch.equal(factor[1], factor[4])

    def test_every_call_draws_anew_and_the_seed_decides(self):
        router = build(RandomConfig()).eval()
        state, x = in_clusters([0, 1], router), torch.ones(2, 6)
        torch.manual_seed(7)
        first, second = router.rescale(x, state).dense(), router.rescale(x, state).dense()
        assert not torch.equal(first, second)
        torch.manual_seed(7)
        assert torch.equal(router.rescale(x, state).dense(), first)

    def test_a_token_in_no_cluster_is_left_alone(self):
        router = build(RandomConfig())
        x = torch.randn(3, 6)
        assert torch.equal(router.rescale(x, in_clusters([-1, -1, -1], router)).dense(), x)

    def test_a_token_in_several_clusters_gets_their_mean(self):
        router = build(RandomConfig(mix=2))
        state = in_clusters([[0, 1], [0, 0], [1, 1]], router)
        factor = router.rescale(torch.ones(3, 6), state).dense()
        torch.testing.assert_close(factor[0], (factor[1] + factor[2]) / 2)

    def test_without_deviation_it_is_its_base_router(self):
        router = build(RandomConfig(std=0.0, base=SMoEConfig(bias=True)))
        x, state = torch.randn(4, 6), in_clusters([0, 1, 2, 3], router)
        for a, b in zip(router(x, state)[:4], router.base(x, state)[:4], strict=True):
            assert torch.equal(a, b)


class TestHash:
    def test_a_token_id_has_the_same_experts_wherever_and_whenever_it_comes(self):
        router = build(HashConfig())
        ids = torch.tensor([5, 9, 5, 0, 9])
        state = in_clusters([-1] * 5, router)
        first = router(torch.randn(5, 6), state, token_ids=ids)
        again = build(HashConfig(), seed=1)(torch.randn(5, 6), state, token_ids=ids)
        assert torch.equal(first.expert_ids, again.expert_ids)
        assert torch.equal(first.expert_ids[0], first.expert_ids[2])
        assert torch.equal(first.expert_ids[1], first.expert_ids[4])

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
    def test_a_narrow_id_has_the_experts_of_the_wide_one(self, dtype):
        # 200 * 16 exceeds 255: in uint8 the product would be that of another id.
        router = build(HashConfig(), num_experts=16)
        ids, x = torch.tensor([200, 3, 255]), torch.zeros(3, 6)
        wanted = router(x, token_ids=ids).expert_ids
        assert torch.equal(router(x, token_ids=ids.to(dtype)).expert_ids, wanted)

    @pytest.mark.parametrize("num_experts", [2, 7, 16, 64])
    def test_ids_are_spread_evenly_over_distinct_experts(self, num_experts):
        router = build(HashConfig(), num_experts=num_experts)
        count = 20_000
        routing = router(
            torch.zeros(count, 6), in_clusters([-1] * count, router), token_ids=torch.arange(count)
        )
        assert (routing.expert_ids[:, 0] != routing.expert_ids[:, 1]).all()
        for column in routing.expert_ids.unbind(1):
            load = torch.bincount(column, minlength=num_experts).double()
            fair = count / num_experts
            # Chi-squared with E - 1 degrees of freedom: five deviations above its mean.
            statistic = ((load - fair) ** 2 / fair).sum().item()
            assert statistic < num_experts - 1 + 5 * math.sqrt(2 * num_experts)

    def test_another_seed_is_another_choice(self):
        ids = torch.arange(100)
        chosen = []
        for seed in (0, 1):
            router = build(HashConfig(seed=seed))
            state = in_clusters([-1] * 100, router)
            chosen.append(router(torch.zeros(100, 6), state, token_ids=ids).expert_ids)
        assert (chosen[0] != chosen[1]).any(1).sum() > 50

    def test_experts_are_weighted_equally_and_nothing_is_learned(self):
        router = build(HashConfig(), top_k=3)
        routing = router(
            torch.randn(2, 6), in_clusters([-1, -1], router), token_ids=torch.tensor([1, 2])
        )
        assert torch.equal(routing.gate, torch.full((2, 3), 1 / 3))
        assert list(router.parameters()) == []
        assert routing.loss == 0

    def test_the_first_choice_has_the_highest_affinity(self):
        router = build(HashConfig(), num_experts=16)
        ids = torch.arange(5000)
        routing = router(torch.zeros(5000, 6), in_clusters([-1] * 5000, router), token_ids=ids)
        assert torch.equal(routing.affinity.argmax(1), routing.expert_ids[:, 0])


class TestExpertChoice:
    @given(
        num_tokens=st.integers(1, 40),
        num_experts=st.integers(1, 9),
        top_k=st.integers(1, 3),
        padding=st.integers(0, 3),
        seed=st.integers(0, 99),
    )
    def test_every_expert_takes_exactly_its_capacity_of_best_tokens(
        self, num_tokens, num_experts, top_k, padding, seed
    ):
        top_k = min(top_k, num_experts)
        router = build(ExpertChoiceConfig(), num_experts=num_experts, top_k=top_k, seed=seed)
        total = num_tokens + padding
        x = torch.randn(total, 6)
        mask = torch.arange(total) < num_tokens
        routing = router(x, in_clusters([-1] * total, router), token_mask=mask)
        # ceil(k T / E) of the T tokens that count, in integers.
        capacity = min(num_tokens, -(-top_k * num_tokens // num_experts))
        gate = routing.affinity.softmax(-1)
        for expert in range(num_experts):
            best = sorted(range(num_tokens), key=lambda t: (-gate[t, expert].item(), t))[:capacity]
            taken = (routing.expert_ids[:, expert] == expert).nonzero().flatten().tolist()
            assert taken == sorted(best)
            assert torch.equal(routing.gate[taken, expert], gate[taken, expert])
        left_out = routing.expert_ids == num_experts
        assert (routing.gate[left_out] == 0).all()
        assert (routing.expert_ids[left_out.logical_not()] < num_experts).all()

    def test_a_whole_number_of_rows_is_not_rounded_up(self):
        # 21 tokens for 7 experts, k = 1: 3 each, though 21 * (1 / 7) exceeds 3 in float32.
        router = build(ExpertChoiceConfig(), num_experts=7, top_k=1)
        routing = router(torch.randn(21, 6), in_clusters([-1] * 21, router))
        assert (routing.expert_ids < 7).sum(0).tolist() == [3] * 7

    def test_the_factor_scales_the_capacity(self):
        router = build(ExpertChoiceConfig(capacity_factor=1.5), num_experts=4, top_k=1)
        routing = router(torch.randn(16, 6), in_clusters([-1] * 16, router))
        assert (routing.expert_ids < 4).sum(0).tolist() == [6] * 4

    def test_it_is_not_causal_and_says_so(self):
        # One place per expert: a later token that suits expert 0 better takes the first one's.
        router = build(ExpertChoiceConfig(), num_experts=2, top_k=1)
        towards = (router.embedding[0] - router.embedding[1]).detach()
        state = in_clusters([-1, -1], router)
        before = router(torch.stack([towards, 0.5 * towards]), state).expert_ids
        after = router(torch.stack([towards, 2.0 * towards]), state).expert_ids
        assert router.causal is False
        assert before[0].tolist() == [0, 2]
        assert after[0].tolist() == [2, 1]

    def test_only_the_z_loss_is_added(self):
        x = torch.randn(8, 6)
        router = build(ExpertChoiceConfig(), balance=0.5, z=0.25)
        routing = router(x, in_clusters([-1] * 8, router))
        z = (routing.affinity.exp().sum(1).log() ** 2).mean()
        torch.testing.assert_close(routing.loss, 0.25 * z)
