"""Models train, are evaluated, attacked and generate on a device without float64 (Apple's MPS).

No test machine has such a device. A CPU plays it: the library is told that the CPU lacks float64,
and any operator that returns a float64 tensor raises.
"""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from acmoe import AdaptiveConfig, LossConfig, MoE, RoutingState
from acmoe.attacks.attack import perturb
from acmoe.attacks.ball import Ball, rounded_sum
from acmoe.attacks.target import Target, white_box
from acmoe.config.images.attack import PGDConfig, SPSAConfig
from acmoe.config.routing import ROUTERS, RouterConfig, SMoEConfig, SoftConfig, StableConfig
from acmoe.config.text.evaluate import EvaluateConfig
from acmoe.config.text.finetune import finetune_config
from acmoe.data.images import transforms
from acmoe.evaluate.host_sum import HostSum
from acmoe.evaluate.language import evaluate
from acmoe.evaluate.run import open_run
from acmoe.models.text.decoder import LanguageModel
from acmoe.routing.build import build_router
from acmoe.routing.statistics.step import fold_statistics
from acmoe.train.finetune import finetune
from acmoe.train.run import train, train_images
from acmoe.train.update import IGNORING_FOUND_INF, take_step
from tiny_runs import QUIET, byte_corpus, tiny_run
from tiny_vision_runs import tiny_vision_run
from vision_cases import TinyMoE, seeded_model
from without_float64 import without_float64

CONFIGS: list[RouterConfig] = [
    *(config() for config in ROUTERS.values() if config not in (SoftConfig, StableConfig)),
    StableConfig(vocab_size=50),
    AdaptiveConfig(strength=0.7, detach=False, statistics="batch"),
    AdaptiveConfig(statistics="prefix"),
    AdaptiveConfig(statistics="sequence", measure="gini", mix=2),
    AdaptiveConfig.preset("reference-lm"),
    AdaptiveConfig.preset("reference-swin"),
]


@pytest.fixture(scope="module")
def nothing_of_other_modules() -> None:
    """Leave what is alive out of later collections, which then take milliseconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_layers_of_other_tests(nothing_of_other_modules: None) -> None:
    """An optimizer step also updates layers that no optimizer holds, as garbage of other tests."""
    gc.collect()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_a_layer_of_every_router_gives_what_it_gives_with_float64(
    config: RouterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    base = getattr(config, "base", config)
    noise = isinstance(base, SMoEConfig) and base.noise > 0
    losses = LossConfig(balance=0.1, importance_load=0.1 if noise else 0.0, z=0.1)
    layer = MoE(
        dim=8,
        hidden=8,
        num_experts=4,
        top_k=2,
        router=build_router(config, dim=8, num_experts=4, top_k=2, losses=losses),
        capacity_factor=1.1,
    )
    x = torch.randn(2, 15, 8)
    mask = torch.arange(15) < torch.tensor([[15], [11]])
    ids = torch.randint(50, (2, 15))

    def numbers() -> list[torch.Tensor]:
        torch.manual_seed(1)
        layer.zero_grad()
        inputs = x.clone().requires_grad_()
        state = RoutingState.identity(num_tokens=30, num_clusters=4, dim=8)
        if isinstance(config, AdaptiveConfig):  # clusters of an earlier layer
            state = state._replace(
                assignment=(torch.arange(30 * config.mix) % 4).view(30, config.mix),
                membership=torch.full((30, config.mix), 1 / config.mix),
            )
        for _ in range(2):
            y, state = layer(inputs, state, token_mask=mask, token_ids=ids)
        (y.square().sum() + state.aux_loss).backward()
        found = [y.detach(), state.aux_loss.detach(), state.scale.detach(), inputs.grad]
        return [one for one in found if one is not None]

    expected = numbers()
    with without_float64(monkeypatch):
        found = numbers()
        fold_statistics(layer)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("statistics", ["prefix", pytest.param("batch", marks=pytest.mark.slow)])
def test_a_language_run_trains_validates_saves_and_generates(
    statistics: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("steps=2", "eval_every=2", "log_every=1", "eval_tokens=60", "clip=0.5")
    config = tiny_run(
        byte_corpus(tmp_path, lines=60), f"model.router.statistics={statistics}", *settings
    )
    with without_float64(monkeypatch):
        train(config, tmp_path / "run", console=QUIET)
        model = open_run(tmp_path / "run").model()
        assert isinstance(model, LanguageModel)
        text = model.generate([[1, 2, 3], [4]], 3, top_p=0.9, seed=0)
        scored = evaluate(tmp_path / "run", EvaluateConfig(batch=8, routing=True), device="cpu")
        tuned = finetune(open_run(tmp_path / "run"), SHORT, sentences(tmp_path), console=QUIET)
    assert text.shape == (2, 3)
    assert scored.figures[0].layers[1].instability is not None
    assert len(tuned.dev_accuracies) == 1


SHORT = replace(finetune_config("sst2", "clean"), epochs=1, batch=8, device="cpu")


def sentences(folder: Path) -> Path:
    """A task of eight sentences in each split."""
    rows = ["sentence\tlabel", *(f"film {n} is fine\t{n % 2}" for n in range(8))]
    for split in ("train", "dev", "test"):
        (folder / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    return folder


@pytest.mark.parametrize("soft", [False, True])
def test_an_image_run_trains_validates_and_saves(
    soft: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_vision_run("steps=1", "split=1", "eval_images=8", soft=soft)
    with without_float64(monkeypatch):
        train_images(config, tmp_path / "run", console=QUIET)
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") >= 2


@pytest.mark.parametrize("attack", [PGDConfig(steps=2), SPSAConfig(steps=1, directions=2)])
def test_attacks_run_and_stay_in_the_ball(
    attack: PGDConfig | SPSAConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded_model(TinyMoE)
    images = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    with without_float64(monkeypatch), white_box(model):
        target = Target(model, mean=(0.5,) * 3, std=(0.2,) * 3)
        x = target.enter(images)
        found = perturb(target, x, torch.tensor([0, 1, 2]), 2 / 255, attack, seed=0)
    assert float((found.double() - x.double()).abs().max()) <= 2 / 255


def test_bounds_of_the_ball_need_no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 4 - 2
    x[0, 0, 0, :2] = torch.tensor([0.0, 1.0])
    for eps in (1 / 255, 8 / 255, 0.1, 1.0, 1e-7, 0.3, 2**-30):
        expected = Ball(x, eps)
        with without_float64(monkeypatch):
            low, high = rounded_sum(x, -eps), rounded_sum(x, eps)
        assert torch.equal(low, expected.low) and torch.equal(high, expected.high), eps


def test_a_capacity_is_rounded_as_python_rounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # 1.05 * 120 rows: 126 in float64, less than that in float32. 0.7 * 10 is 7 in float64 only.
    for factor, each in ((1.05, 126), (0.7, 84)):
        torch.manual_seed(0)
        layer = MoE(dim=4, hidden=4, num_experts=1, top_k=1, capacity_factor=factor)
        layer_rows = layer._sent
        x = torch.randn(130, 4)
        mask = torch.arange(130) < 120
        state = RoutingState.identity(num_tokens=130, num_clusters=1, dim=4)
        routing = layer.router(x, state, token_mask=mask)
        with without_float64(monkeypatch):
            kept = layer_rows(routing, mask).expert_ids.eq(0).sum()
        assert int(kept) == min(each, 120)


def test_a_bad_update_is_skipped_where_the_optimizer_would_take_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert {"mps"} == IGNORING_FOUND_INF
    monkeypatch.setattr("acmoe.train.update.IGNORING_FOUND_INF", {"cpu"})
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # it refuses `found_inf`
    before = model.weight.detach().clone()
    for finite in (False, True):
        model(torch.ones(1, 2)).sum().backward()
        take_step(model, optimizer, clip=None, finite=torch.tensor(finite))
        assert torch.equal(model.weight, before) != finite
        assert model.weight.grad is None


def test_a_host_sum_is_exact_where_float32_is_not() -> None:
    total = HostSum()
    total.add(torch.tensor(2.0**23), 2)
    for _ in range(600):
        total.add(torch.ones(()))
    assert total.total() == total.total() == 2**24 + 600  # in float32 2^24 + 1 is 2^24


def test_contrast_and_autocontrast_in_integers() -> None:
    images = torch.randint(0, 256, (4, 3, 9, 7), dtype=torch.uint8)
    images[1] = images[1] // 3 + 20
    images[2] = 7  # one colour stays
    whole, expected = transforms.stretch(images), transforms.autocontrast(images)
    assert int((whole.int() - expected.int()).abs().max()) <= 1
    assert (whole != expected).float().mean() < 0.05
    grey = transforms.grey(images).double().mean((1, 2, 3)) + 0.5
    found = transforms.contrast(images, torch.zeros(4))  # factor 0: the mean alone
    assert torch.equal(found[:, 0, 0, 0], grey.floor().to(torch.uint8))
