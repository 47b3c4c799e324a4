"""Unit-length expert embeddings whose stored length is restored after every optimizer step."""

import copy
import logging

import pytest
import torch
from torch.nn.utils import parametrize, prune
from torch.optim.swa_utils import AveragedModel

from acmoe import SMoEConfig, UserError, build_router, fold_statistics
from acmoe.ops import dispatch

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


def test_a_frozen_or_loaded_router_keeps_its_bits_in_the_steps_of_another_models_optimizer():
    trained = one_router(embedding_length=1.5)
    optimizer = torch.optim.Adam(trained.parameters(), lr=0.1)
    trained.affinity(torch.randn(8, 6)).square().sum().backward()
    optimizer.step()
    loaded, frozen = (one_router(embedding_length=1.5) for _ in range(2))
    loaded.load_state_dict(trained.state_dict())
    frozen.requires_grad_(False)
    others = torch.nn.Linear(2, 2)
    other = torch.optim.SGD(others.parameters(), lr=0.1)
    before = frozen.embedding.clone()
    for _ in range(8):
        others(torch.randn(1, 2)).sum().backward()
        other.step()
    assert torch.equal(loaded.embedding, trained.embedding)
    assert torch.equal(frozen.embedding, before)


def test_an_average_of_the_weights_keeps_its_own_length():
    """AveragedModel stays in training mode, and no optimizer holds its parameters."""
    router = one_router(embedding_length=1.5)
    average = AveragedModel(router, avg_fn=lambda old, new, _: 0.5 * old + 0.5 * new)
    average.update_parameters(router)  # the first call copies
    expected = router.embedding.detach().clone()
    optimizer = torch.optim.SGD(router.parameters(), lr=5.0)
    for seed in range(3):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        router.affinity(torch.randn(8, 6)).square().sum().backward()
        optimizer.step()
        average.update_parameters(router)
        expected = 0.5 * expected + 0.5 * router.embedding.detach()
    assert expected.norm(dim=1).min() < 1.4  # a mean of directions is shorter than each
    torch.testing.assert_close(average.module.embedding, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(router.embedding.norm(dim=1), torch.full((4,), 1.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_setting_the_length_twice_is_setting_it_once(dtype):
    router = build_router(
        SMoEConfig(**UNIT, embedding_length=1.5), dim=300, num_experts=64, top_k=2
    ).to(dtype)
    with torch.no_grad():
        router.embedding.copy_(torch.randn(64, 300))
    fold_statistics(router)
    once = router.embedding.clone()
    torch.testing.assert_close(
        once.double().norm(dim=1), torch.full((64,), 1.5).double(), rtol=1e-2, atol=0
    )
    fold_statistics(router)
    assert torch.equal(router.embedding, once)


class Doubled(torch.nn.Module):
    def forward(self, embedding):
        return 2 * embedding


@pytest.mark.parametrize(
    "change",
    [
        lambda router: parametrize.register_parametrization(router, "embedding", Doubled()),
        lambda router: prune.random_unstructured(router, "embedding", 0.5),
    ],
    ids=["parametrized", "pruned"],
)
def test_a_length_that_cannot_be_restored_is_reported_once(change, monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_logged", set())
    caplog.set_level(logging.WARNING, logger="acmoe")
    router = one_router(embedding_length=1.5)
    fold_statistics(router)
    assert caplog.messages == []
    change(router)
    optimizer = torch.optim.SGD(router.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.step()
    assert len(caplog.messages) == 1
    assert "embedding_length=1.5 is not restored" in caplog.messages[0]


def test_a_length_without_unit_embeddings_is_refused():
    with pytest.raises(UserError, match="set normalize_embeddings=True"):
        SMoEConfig(embedding_length=1.5)
    with pytest.raises(UserError, match="embedding_length=0"):
        SMoEConfig(embedding_length=0, normalize_embeddings=True)
