"""Unit-length expert embeddings whose stored length is restored after every optimizer step."""

import copy

import pytest
import torch

from acmoe import SMoEConfig, UserError, build_router, fold_statistics

UNIT = {"normalize_embeddings": True, "init": "orthogonal"}


def one_router(**options):
    torch.manual_seed(0)
    return build_router(SMoEConfig(**UNIT, **options), dim=6, num_experts=4, top_k=2)


def test_steps_are_those_of_a_gate_that_sets_the_length_before_each_forward_pass():
    # The published gate: e <- 1.5 e / |e| in place, then the affinities of e / |e|.
    found, expected = one_router(embedding_length=1.5), one_router()
    x, target = torch.randn(8, 6), torch.randn(8, 4)
    optimizers = [torch.optim.Adam(router.parameters(), lr=0.1) for router in (found, expected)]
    for _ in range(4):
        with torch.no_grad():
            e = expected.embedding
            e.mul_(1.5 / e.norm(dim=1, keepdim=True))
        for router, optimizer in zip((found, expected), optimizers, strict=True):
            optimizer.zero_grad()
            (router.affinity(x) - target).square().mean().backward()
            optimizer.step()
        fold_statistics(found)
    unit = torch.nn.functional.normalize(expected.embedding, dim=1)
    torch.testing.assert_close(found.embedding, 1.5 * unit)
    free = one_router()
    optimizer = torch.optim.Adam(free.parameters(), lr=0.1)
    (free.affinity(x) - target).square().mean().backward()
    optimizer.step()
    assert (free.embedding.norm(dim=1) - 1.5).abs().min() > 0.5  # without the option it is free


def test_a_length_changes_no_affinity_and_stores_nothing():
    free, fixed = one_router(), one_router(embedding_length=1.5)
    x = torch.randn(5, 6)
    torch.testing.assert_close(fixed.affinity(x), free.affinity(x))
    assert set(fixed.state_dict()) == set(free.state_dict())
    torch.testing.assert_close(fixed.embedding.norm(dim=1), torch.full((4,), 1.5))


def test_a_copy_restores_its_own_embeddings():
    router = one_router(embedding_length=2.0)
    twin = copy.deepcopy(router)
    with torch.no_grad():
        twin.embedding.mul_(3)
    fold_statistics(router)
    assert twin.embedding.norm(dim=1)[0].item() == pytest.approx(6.0)
    fold_statistics(twin)
    assert twin.embedding.norm(dim=1)[0].item() == pytest.approx(2.0)


def test_a_length_without_unit_embeddings_is_refused():
    with pytest.raises(UserError, match="set normalize_embeddings=True"):
        SMoEConfig(embedding_length=1.5)
    with pytest.raises(UserError, match="embedding_length=0"):
        SMoEConfig(embedding_length=0, normalize_embeddings=True)
