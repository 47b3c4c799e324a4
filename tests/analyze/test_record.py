"""Recording observes and changes nothing, and what it records is what the routers read.

B rows, L positions, N tokens, D features, C clusters.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from acmoe import AdaptiveConfig, fold_statistics
from acmoe.analyze.observe import observed
from acmoe.analyze.record import cluster_scales, record_images, record_language
from acmoe.config.images.presets import vision_router
from acmoe.config.routing import RandomConfig, RouterConfig
from acmoe.config.text.language import language_router
from acmoe.data.images.load import load_images
from acmoe.data.text.arrays import Tokens
from acmoe.errors import UserError
from acmoe.evaluate.images.accuracy import evaluate_images
from acmoe.evaluate.language import score_stream
from acmoe.evaluate.statistics import using_statistics
from acmoe.lab.variants import VariantConfig
from acmoe.models.images.swin import SwinModel
from acmoe.models.images.vit import SoftViT
from acmoe.models.text.decoder import LanguageModel
from tiny_runs import MODEL
from tiny_vision_runs import SOFT, SWIN
from vision_cases import PLAIN

ROUTERS: dict[str, RouterConfig | str] = {
    "smoe": "smoe",
    "running": AdaptiveConfig(),
    "batch": AdaptiveConfig(statistics="batch"),
    "batch, own tokens": AdaptiveConfig(statistics="batch", statistics_of="current"),
    "prefix": AdaptiveConfig(statistics="prefix"),
    "sequence": AdaptiveConfig(statistics="sequence"),
    "mix": AdaptiveConfig(mix=2),
    "random": RandomConfig(),
}


def decoder(router: RouterConfig | str) -> LanguageModel:
    """A model with the statistics of one training step, so that its scales are not all ones."""
    torch.manual_seed(0)
    model = LanguageModel(replace(MODEL, router=language_router(router, MODEL)))
    model(torch.randint(256, (4, 32)))
    fold_statistics(model)
    return model.eval()


def stream(length: int = 150, seed: int = 1) -> Tokens:
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.uint8)


@pytest.fixture(scope="module", params=ROUTERS)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return decoder(ROUTERS[request.param])


@torch.no_grad()
def test_an_observed_forward_is_bitwise_the_unobserved_one(model: LanguageModel) -> None:
    tokens_BL = torch.randint(256, (2, 20))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    answers, draws = [], []
    for layers in ([], model.moe_layers(), []):  # before, during, and after the hooks
        torch.manual_seed(7)
        with observed(layers) as seen:
            answers.append(model(tokens_BL).logits)
        draws.append(torch.rand(3))  # the generators have moved on alike
        assert len(seen) == len(layers)
    for answer, draw in zip(answers, draws, strict=True):
        assert torch.equal(answer, answers[0])
        assert torch.equal(draw, draws[0])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for layer in model.moe_layers():
        assert not layer._forward_pre_hooks
        assert not layer.next_state._forward_pre_hooks


@torch.no_grad()
def test_the_recorded_tokens_give_the_recorded_affinities(model: LanguageModel) -> None:
    # One block, so that the product has the same rows, and random routers replay the same draw.
    with observed(model.moe_layers()) as seen:
        model(torch.randint(256, (2, 20)))
    for one in seen:
        base = getattr(one.layer.router, "base", one.layer.router)
        assert torch.equal(base.decide(one.scaled).affinity, one.routing.affinity)


@torch.no_grad()
def test_the_recorded_scale_is_what_the_input_was_multiplied_by(model: LanguageModel) -> None:
    with observed(model.moe_layers()) as seen:
        model(torch.randint(256, (2, 20)))
    for one in seen:
        assert torch.equal(one.input * one.scale, one.scaled)


@torch.no_grad()
def test_a_shift_about_the_mean_is_not_taken_for_a_scale() -> None:
    router = VariantConfig(statistics="batch", statistics_of="current", center=True)
    model = decoder(router)
    with observed(model.moe_layers()) as seen:
        model(torch.randint(256, (2, 20)))
    one = seen[1]
    assert not torch.allclose(one.input * one.scale, one.scaled)
    # Mean one over the features of every token's cluster, which M h / h would not have.
    torch.testing.assert_close(one.scale.mean(-1), torch.ones(40))


def test_hooks_leave_when_the_forward_fails() -> None:
    model = decoder("smoe")
    with pytest.raises(UserError), observed(model.moe_layers()):
        model(torch.full((1, 4), 999))
    assert not any(layer.next_state._forward_pre_hooks for layer in model.moe_layers())


def test_a_gradient_through_an_observed_forward_is_unchanged() -> None:
    model = decoder(AdaptiveConfig(statistics="batch", detach=False))
    tokens_BL, found = torch.randint(256, (2, 20)), []
    for layers in ([], model.moe_layers()):
        with observed(layers):
            loss = model(tokens_BL, tokens_BL).loss
        found.append(torch.autograd.grad(loss, model.embed.weight)[0])
    assert torch.equal(*found)


def test_tokens_are_recorded_in_reading_order() -> None:
    # 150 tokens make 149 predictions: rows of 50, 50 and 49 in blocks of 16, the last ones padded.
    model, inputs = decoder(AdaptiveConfig()), stream()
    record = record_language(model, inputs, tokens=1000, batch=3)
    assert record.token_ids is not None
    assert record.token_ids.tolist() == inputs[:149].tolist()
    assert "149 tokens" in record.sample
    tokens = torch.from_numpy(inputs.astype(np.int64))
    for start in (0, 50, 100):  # each row begins without memory
        with torch.no_grad(), observed(model.moe_layers()) as seen:
            model(tokens[None, start : start + 16])
        for layer, one in zip(record.layers, seen, strict=True):
            torch.testing.assert_close(layer.input[start : start + 16], one.input)
            assert torch.equal(layer.first[start : start + 16], one.routing.affinity.argmax(-1))


def test_the_recorded_loss_is_that_of_the_evaluation() -> None:
    model, inputs, targets = decoder(AdaptiveConfig()), stream(), stream(seed=2)
    record = record_language(model, inputs, targets, tokens=149, batch=3)
    score = score_stream(model, inputs, targets, batch=3, block=MODEL.block)
    assert record.loss == pytest.approx(score.loss, rel=1e-6)


def test_clusters_are_the_first_choices_of_the_layer_before() -> None:
    record = record_language(decoder(AdaptiveConfig()), stream(), batch=3)
    first, second, third = record.layers
    assert (first.cluster == -1).all()
    assert torch.equal(second.cluster, first.first)
    assert torch.equal(third.cluster, second.first)


def test_the_first_layer_and_plain_routers_read_their_input_itself() -> None:
    adaptive = record_language(decoder(AdaptiveConfig()), stream(), batch=3).layers[0]
    plain = record_language(decoder("smoe"), stream(), batch=3).layers[2]
    for layer in (adaptive, plain):
        assert torch.equal(layer.scaled, layer.input)
        assert torch.equal(layer.scale, torch.ones_like(layer.scale))
        assert not layer.adaptive
        assert not layer.scale_varies


def test_running_statistics_are_recorded_as_the_buffers_hold_them() -> None:
    model = decoder(AdaptiveConfig())
    record = record_language(model, stream(), batch=3)
    for before, layer in zip(model.moe_layers(), record.layers[1:], strict=False):
        assert before.next_state.statistics is not None
        seen_C = layer.clusters_seen()
        expected_CD = before.next_state.statistics.running_scale
        assert torch.equal(layer.scale[seen_C], expected_CD[seen_C])
        assert not layer.scale_varies


@pytest.mark.parametrize(("mode", "varies"), [("batch", True), ("running", False)])
def test_a_scale_that_differs_from_block_to_block_is_said_to_vary(mode: str, varies: bool) -> None:
    model = decoder(AdaptiveConfig(statistics="batch"))
    with using_statistics(model, mode):
        record = record_language(model, stream(), batch=3)
    assert record.statistics == mode
    assert record.layers[1].scale_varies == varies


def test_the_mean_scale_of_a_cluster_by_hand() -> None:
    # Cluster 0 reads 2 and 4, mean 3, and 5 twice. Cluster 1 has no token, the last no cluster.
    scale_ND = torch.tensor([[2.0, 5.0], [4.0, 5.0], [9.0, 9.0]])
    scale_CD, varies = cluster_scales(scale_ND, torch.tensor([0, 0, -1]), 2)
    assert scale_CD.tolist() == [[3, 5], [1, 1]]
    assert varies


def test_fewer_tokens_than_rows_are_refused() -> None:
    with pytest.raises(UserError, match="tokens=2 do not fill batch=8 rows"):
        record_language(decoder("smoe"), stream(), tokens=2)


def swin(router: RouterConfig | str = "adaptive") -> SwinModel:
    torch.manual_seed(0)
    model = SwinModel(replace(SWIN, router=vision_router(router, SWIN)))
    model(torch.randn(8, 3, 8, 8))
    fold_statistics(model)
    return model.eval()


def test_patches_are_recorded_image_by_image() -> None:
    # 8 pixels in patches of 2: maps of 4 x 4, after merging 2 x 2.
    images = load_images(PLAIN)["test"]
    record = record_images(swin(), images, PLAIN, count=10, batch=4)
    assert [layer.grid for layer in record.layers] == [(4, 4), (4, 4), (2, 2)]
    assert [len(layer.cluster) for layer in record.layers] == [160, 160, 40]
    assert [record.same_tokens(depth) for depth in range(3)] == [False, True, False]
    image_N, row_N, column_N = record.layers[0].places()
    assert (image_N[17], row_N[17 + 4], column_N[17 + 4]) == (1, 1, 1)


def test_no_token_is_dropped_unless_a_capacity_is_given() -> None:
    images, model = load_images(PLAIN)["test"], swin()
    free, limited = (
        record_images(model, images, PLAIN, count=8, capacity=capacity)
        for capacity in (None, "model")
    )
    assert (free.capacity, limited.capacity) == (None, 1.25)
    assert free.sample.endswith("capacity none")
    assert limited.sample.endswith("capacity 1.25 (the paper's)")
    # The first MoE layer reads the same tokens; what it drops changes the input of the next.
    inputs = [[layer.input for layer in record.layers] for record in (free, limited)]
    assert torch.equal(inputs[0][0], inputs[1][0]) and not torch.equal(inputs[0][1], inputs[1][1])


def test_images_are_recorded_as_they_are_read_and_scored() -> None:
    images = load_images(PLAIN)["test"]
    model = swin()
    record = record_images(model, images, PLAIN, count=len(images))
    report = evaluate_images(model, images, PLAIN, device="cpu").figures[0]
    assert record.pixels is not None
    assert record.labels is not None
    assert record.predicted is not None
    assert 100 * int((record.predicted == record.labels).sum()) / len(images) == report.top1
    assert record.loss == pytest.approx(report.loss, rel=1e-5)
    assert sorted(record.labels.tolist()) == sorted(images.labels.tolist())
    levels = record.pixels * 255
    torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-3)


def test_a_reading_replaces_what_the_classifier_sees() -> None:
    images = load_images(PLAIN)["test"]

    def black(batch: object, number: int) -> Tensor:
        return torch.full((4, 3, 8, 8), -0.305 / 0.376)  # pixels of 0

    record = record_images(swin(), images, PLAIN, count=8, batch=4, reading=black)
    assert record.pixels is not None
    assert float(record.pixels.abs().max()) < 1e-6
    assert len(record.layers[-1].first.view(8, 4).unique(dim=0)) == 1  # all images alike


def test_the_class_token_of_a_vit_is_left_out() -> None:
    torch.manual_seed(0)
    model = SoftViT(replace(SOFT, router=vision_router("adaptive", SOFT)))
    model(torch.randn(8, 3, 8, 8))
    fold_statistics(model)
    record = record_images(model, load_images(PLAIN)["test"], PLAIN, count=6, batch=4)
    first, second = record.layers
    assert (first.grid, second.grid) == ((4, 4), (4, 4))
    assert len(second.cluster) == 6 * 16
    assert torch.equal(second.cluster, first.first)
    assert second.adaptive
    assert not torch.equal(second.scaled, second.input)


def test_a_model_without_moe_layers_has_no_routing() -> None:
    model = SwinModel(replace(SWIN, moe_stages=(), router=vision_router("smoe", SWIN)))
    with pytest.raises(UserError, match="no MoE layer"):
        record_images(model, load_images(PLAIN)["test"], PLAIN, count=4)
