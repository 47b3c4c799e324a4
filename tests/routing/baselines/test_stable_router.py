"""StableMoE's two stages.

T tokens, D features, E experts, K experts per token.
"""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from acmoe import LossConfig, RoutingState, StableConfig, UserError, build_router
from acmoe.routing.baselines.stable import StableRouter
from acmoe.routing.topk import TopKRouter


def build(*, top_k=1, seed=0, z=0.0, **options):
    torch.manual_seed(seed)
    config = StableConfig(vocab_size=10, **options)
    losses = LossConfig(z=z)
    return build_router(config, dim=4, num_experts=3, top_k=top_k, losses=losses)


def route(router, x, ids, **arguments):
    state = RoutingState.identity(num_tokens=len(x), num_clusters=3, dim=4)
    return router(x, state, token_ids=ids, **arguments)


def by_hand(**options):
    """Affinity = the first three features of x; the light router's logits = rows of a table."""
    router = build(light_dim=3, **options)
    with torch.no_grad():
        router.embedding.copy_(torch.eye(3, 4))
        router.light_experts.copy_(torch.eye(3))
        router.light_tokens.weight.copy_(torch.eye(3)[torch.arange(10) % 3] * 2.0)
    return router


X = torch.tensor([[2.0, 0, 0, 0], [1.0, 0, 0, 0], [3.0, 0, 0, 0], [0, 1.0, 0, 0]])
IDS = torch.tensor([0, 1, 2, 3])  # the light router chooses experts 0, 1, 2, 0


def sigmoid(value):
    return 1 / (1 + math.exp(-value))


def test_stage_one_routes_by_the_centroids_and_weighs_by_their_sigmoid():
    routing = route(by_hand(), X, IDS)
    assert routing.expert_ids.tolist() == [[0], [0], [0], [1]]
    expected = torch.tensor([[sigmoid(2)], [sigmoid(1)], [sigmoid(3)], [sigmoid(1)]])
    torch.testing.assert_close(routing.gate, expected)
    assert torch.equal(routing.affinity, X[:, :3])


def test_the_losses_of_stage_one_by_hand():
    # Loads (3, 1, 0), mean 4/3: surplus (3/(4/3) - 1, 1/(4/3) - 1) = (5/4, -1/4).
    # Balance: (5/4 (s(2) + s(1) + s(3)) - 1/4 s(1)) / 4 tokens.
    balance = (1.25 * (sigmoid(2) + sigmoid(1) + sigmoid(3)) - 0.25 * sigmoid(1)) / 4
    # Light logits: 2 at experts 0, 1, 2, 0 and 0 elsewhere. The choices to imitate are 0, 0, 0, 1:
    # one hit, three misses.
    hit, miss = math.log(math.exp(2) + 2) - 2, math.log(math.exp(2) + 2)
    distill = (hit + 3 * miss) / 4
    loss = route(by_hand(), X, IDS).loss
    torch.testing.assert_close(loss, torch.tensor(0.3 * balance + 0.3 * distill))
    loss = route(by_hand(balance=1.0, distill=0.0), X, IDS).loss
    torch.testing.assert_close(loss, torch.tensor(balance))
    loss = route(by_hand(balance=0.0, distill=1.0), X, IDS).loss
    torch.testing.assert_close(loss, torch.tensor(distill))


def test_the_balance_loss_lowers_the_gate_of_a_crowded_expert():
    router = by_hand(distill=0.0)
    x = X.clone().requires_grad_()
    grad = torch.autograd.grad(route(router, x, IDS).loss, x)[0]
    assert (grad[:3, 0] > 0).all()  # expert 0 has three tokens: descending shrinks their scores
    assert grad[3, 1] < 0  # expert 1 has one, under the mean


def test_distillation_teaches_the_light_router_alone():
    router = by_hand(balance=0.0)
    route(router, X, IDS).loss.backward()
    assert router.light_tokens.weight.grad.abs().max() > 0
    assert router.light_experts.grad.abs().max() > 0
    assert router.embedding.grad is None or router.embedding.grad.abs().max() == 0


def test_the_light_router_learns_to_repeat_the_choice():
    router = build()
    generator = torch.Generator().manual_seed(1)
    words = torch.randn(10, 4, generator=generator) * 3
    ids = torch.arange(10)
    optimizer = torch.optim.Adam([*router.light_tokens.parameters(), router.light_experts], lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        route(router, words, ids).loss.backward()
        optimizer.step()
    learned = route(router, words, ids).expert_ids
    router.eval()
    assert torch.equal(route(router, words, ids).expert_ids, learned)


def test_evaluation_asks_the_light_router_in_both_stages():
    router = by_hand().eval()
    for _ in range(2):
        routing = route(router, X, IDS)
        assert routing.expert_ids.tolist() == [[0], [1], [2], [0]]
        # The gate is still the centroid's: affinities 2, 0, 0, 0 at those experts.
        expected = torch.tensor([[sigmoid(2)], [0.5], [0.5], [0.5]])
        torch.testing.assert_close(routing.gate, expected)
        assert routing.loss == 0
        router.freeze()


def test_stage_two_obeys_the_light_router_and_no_longer_teaches_it():
    router = by_hand()
    router.freeze()
    routing = route(router, X, IDS)
    assert routing.expert_ids.tolist() == [[0], [1], [2], [0]]
    assert routing.affinity.argmax(1).tolist() == [0, 1, 2, 0]  # the cluster is where it was sent
    assert routing.loss == 0
    (routing.gate.sum() + routing.loss).backward()
    assert router.embedding.grad.abs().max() > 0
    assert router.light_experts.grad is None
    assert router.light_tokens.weight.grad is None


def test_no_optimizer_moves_the_light_router_of_stage_two():
    router = by_hand()
    optimizer = torch.optim.AdamW(router.parameters(), lr=0.1, weight_decay=0.1)
    for stage in (1, 2):
        if stage == 2:
            router.freeze()
        before = [one.clone() for one in (router.light_experts, router.light_tokens.weight)]
        routing = route(router, X, IDS)
        optimizer.zero_grad(set_to_none=False)
        (routing.gate.sum() + routing.loss).backward()
        optimizer.step()
        after = (router.light_experts, router.light_tokens.weight)
        assert all(map(torch.equal, before, after)) is (stage == 2)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("other", [1, 2])
def test_the_stage_survives_a_checkpoint_whatever_stage_loads_it(tmp_path, stage, other):
    saved, loaded = build(seed=0), build(seed=1)
    if stage == 2:
        saved.freeze()
    if other == 2:
        loaded.freeze()
    save_file(saved.state_dict(), tmp_path / "router.safetensors")
    loaded.load_state_dict(load_file(tmp_path / "router.safetensors"))
    assert loaded.stage == stage
    assert loaded.light_experts.requires_grad is (stage == 1)
    assert loaded.light_tokens.weight.requires_grad is (stage == 1)
    for training in (True, False):
        saved.train(training)
        loaded.train(training)
        x, ids = torch.randn(6, 4), torch.arange(6)
        for a, b in zip(route(saved, x, ids)[:4], route(loaded, x, ids)[:4], strict=True):
            assert torch.equal(a, b)


def test_loading_the_same_stage_leaves_frozen_parameters_frozen():
    router = build().requires_grad_(False)
    router.load_state_dict(build(seed=1).state_dict())
    assert not any(parameter.requires_grad for parameter in router.parameters())


def test_several_experts_have_a_sigmoid_each():
    routing = route(build(top_k=2), X, IDS)
    expected = routing.affinity.sigmoid().gather(1, routing.expert_ids)
    torch.testing.assert_close(routing.gate, expected)
    assert torch.equal(routing.expert_ids, routing.affinity.topk(2).indices)


def test_the_z_loss_is_added_when_asked_for():
    plain, with_z = (route(build(z=z), X, IDS) for z in (0.0, 0.5))
    z = (plain.affinity.exp().sum(1).log() ** 2).mean()
    torch.testing.assert_close(with_z.loss - plain.loss, 0.5 * z)


def test_the_token_ids_of_padding_may_be_anything():
    router = build()
    mask = torch.tensor([True, True, False, False])
    found = [
        route(router, X, torch.tensor([4, 5, *rest]), token_mask=mask)
        for rest in ([0, 0], [-100, 10_000])
    ]
    assert torch.equal(found[0].expert_ids[:2], found[1].expert_ids[:2])
    assert torch.equal(found[0].loss, found[1].loss)
    with pytest.raises(UserError, match=r"token_ids holds id -100; ids must lie in \[0, 10\)"):
        route(router, X, torch.tensor([4, 5, -100, 0]))


def test_the_published_form_has_one_stage_and_unit_embeddings():
    router = build_router(StableConfig(legacy=True), dim=4, num_experts=3, top_k=2)
    assert isinstance(router, TopKRouter)
    assert not isinstance(router, StableRouter)
    routing = router(X, RoutingState.identity(num_tokens=4, num_clusters=3, dim=4))
    unit = router.embedding / router.embedding.norm(dim=1, keepdim=True)
    torch.testing.assert_close(routing.affinity, X @ unit.T)
    torch.testing.assert_close(routing.gate, routing.affinity.topk(2).values.softmax(-1))
