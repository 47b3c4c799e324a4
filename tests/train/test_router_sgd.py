"""Plain SGD on the routers' matrices beside Adam on everything else."""

from pathlib import Path

import pytest
import torch
from interrupted_updates import stop_at

from acmoe import CosineConfig, HashConfig, MoE, UserError, create_model
from acmoe.data.text.corpus import load_corpus
from acmoe.lab.variants import VariantConfig
from acmoe.train.optim import (
    AdamAndSGD,
    adam,
    optimizer_tensors,
    router_matrices,
    set_learning_rate,
)
from acmoe.train.run import train
from acmoe.train.text import TextTrainer
from tiny_runs import QUIET, byte_corpus, everything, tiny_run, trained

VARIANT = "model.router=adaptive-variant"
ADAM = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.5}


def layer() -> MoE:
    torch.manual_seed(0)
    return MoE(dim=4, hidden=6, num_experts=3, top_k=2, router="adaptive").double()


def test_matrices_of_routers_follow_their_gradient_and_the_rest_follows_adam() -> None:
    model = layer()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = adam(model, **ADAM, router_sgd=0.02)  # type: ignore[arg-type]
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    set_learning_rate(optimizer, 0.05)  # half of Adam's rate, so half of SGD's: 0.01
    optimizer.step()
    for name, p in model.named_parameters():
        if name == "router.base.embedding":
            # w - 0.01 (g + 0.5 w)
            wanted = start[name] - 0.01 * (3.0 + 0.5 * start[name])
        else:
            # After bias correction Adam's first step is the learning rate, whatever the gradient.
            decay = 0.05 * 0.5 if p.dim() >= 2 else 0.0
            wanted = start[name] * (1 - decay) - 0.05
        torch.testing.assert_close(p.detach(), wanted, rtol=1e-6, atol=1e-7)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert not any("embedding" in name for name in optimizer_tensors(optimizer, model))


def test_a_flagged_update_leaves_routers_as_they_were() -> None:
    model = layer()
    optimizer = adam(model, **ADAM, router_sgd=0.02)  # type: ignore[arg-type]
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_the_matrices_are_those_tokens_are_compared_with() -> None:
    def names(router: object) -> set[str]:
        model = create_model("switch-nano", router=router)  # type: ignore[arg-type]
        chosen = router_matrices(model)
        return {name.split(".", 4)[-1] for name, p in model.named_parameters() if p in chosen}

    assert names("smoe") == {"embedding"}
    assert names(VariantConfig(statistics_of="current", strength=1.0, learn_strength=True)) == {
        "embedding",
        "base.embedding",
    }
    assert names(CosineConfig()) == {"embedding", "project"}
    model = create_model("switch-nano", router=HashConfig())
    with pytest.raises(UserError, match=r"router_optimizer='sgd' finds no router with a matrix"):
        adam(model, **ADAM, router_sgd=0.1)  # type: ignore[arg-type]


def test_a_rate_without_sgd_and_an_unknown_optimizer_are_refused(tmp_path: Path) -> None:
    corpus = byte_corpus(tmp_path)
    with pytest.raises(UserError, match=r"router_lr=0.1 is the rate of router_optimizer='sgd'"):
        tiny_run(corpus, "router_lr=0.1")
    with pytest.raises(UserError, match="router_optimizer"):
        tiny_run(corpus, "router_optimizer=lion")
    with pytest.raises(UserError, match=r"router_lr=0.0; it must be positive"):
        tiny_run(corpus, "router_optimizer=sgd", "router_lr=0.0")
    assert tiny_run(corpus).router_sgd is None
    assert tiny_run(corpus, "router_optimizer=sgd").router_sgd == tiny_run(corpus).lr
    assert tiny_run(corpus, "router_optimizer=sgd", "router_lr=0.5").router_sgd == 0.5


def test_a_run_trains_its_routers_by_the_optimizer_it_asks_for(tmp_path: Path) -> None:
    corpus = byte_corpus(tmp_path)
    config = tiny_run(corpus, "router_optimizer=sgd", "router_lr=0.5")
    trainer = TextTrainer(config, load_corpus(corpus), torch.device("cpu"))
    assert isinstance(trainer.optimizer, AdamAndSGD)
    assert trainer.optimizer.ratio == pytest.approx(0.5 / config.lr)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("router_optimizer=sgd", "router_lr=0.5"), marks=pytest.mark.slow),
        pytest.param(
            (
                VARIANT,
                "model.router.strength=1.0",
                "model.router.strength_end=0.1",
                "model.router.strength_steps=10",
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (VARIANT, "model.router.strength=0.5", "model.router.learn_strength=true"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (
                VARIANT,
                "model.router.statistics_of=current",
                "model.router.center=true",
                "model.router.match=true",
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (
                VARIANT,
                "model.router.part=own",
                "model.router.power=0.5",
                "model.router.read=residual",
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["sgd", "scheduled lambda", "learned lambda", "centred and matched", "own part"],
)
def test_stopped_at_5_and_continued_equals_one_run(
    overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_run(byte_corpus(tmp_path, lines=20), *overrides, "steps=12")
    trained(config, tmp_path / "whole")
    stop_at(TextTrainer, [5], monkeypatch)
    assert train(config, tmp_path / "parts", console=QUIET).step == 5
    assert train(config, tmp_path / "parts", console=QUIET).step == 12
    assert everything(tmp_path / "whole") == everything(tmp_path / "parts")
