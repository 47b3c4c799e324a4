"""Swin-MoE in training: losses, gradients, what is dropped, and what is refused.

Shapes: B batch, Y rows and X columns of a map, D features.
"""

import copy
import math
from typing import Any

import pytest
import torch
from swin_cases import QUIET, classes, config, draw, trained
from torch import Tensor

from acmoe.config.routing import AdaptiveConfig, RouterConfig, SMoEConfig
from acmoe.errors import UserError
from acmoe.models.checkpoint import load, save
from acmoe.models.images.classifier import VisionOutput
from acmoe.models.images.layers import draw_kept, drop_path_rates
from acmoe.models.images.swin import SwinModel
from acmoe.routing.state import RoutingState
from acmoe.routing.topk import TopKRouter


def test_the_gradient_flows_through_the_scale_only_when_asked() -> None:
    images, targets = draw(6), classes(6)
    gradients = {}
    for detach in (True, False):
        router = AdaptiveConfig(statistics="batch", detach=detach, base=QUIET)
        model = trained(router, capacity_factor=None, top_k=4, balance=0.0)
        bias = model.embed.norm.bias
        loss = model(images, targets).loss
        assert loss is not None
        gradients[detach] = torch.autograd.grad(loss, bias)[0]
    step = torch.zeros_like(bias)
    step[0] = 1e-6
    with torch.no_grad():
        sides = []
        for sign in (1, -1):
            bias += sign * step
            sides.append(model(images, targets).loss)
            bias -= sign * step
    slope = (sides[0] - sides[1]) / 2e-6
    torch.testing.assert_close(gradients[False][0], slope, rtol=1e-5, atol=1e-8)
    assert abs(gradients[True][0] - slope) > 1e-4 * abs(slope)


def test_checkpointed_blocks_give_the_same_gradients_with_two_forwards_in_flight() -> None:
    plain = trained("adaptive", drop_path=0.3, expert_dropout=0.2).train()
    frugal = copy.deepcopy(plain)
    frugal.checkpoint_blocks = True
    for model in (plain, frugal):
        torch.manual_seed(7)
        outs = [model(draw(seed), classes(seed)) for seed in (11, 13)]
        total = sum(out.loss + out.aux_loss for out in outs)
        assert isinstance(total, Tensor)
        total.backward()
    for (name, one), (_, other) in zip(
        plain.named_parameters(), frugal.named_parameters(), strict=True
    ):
        assert one.grad is not None and other.grad is not None, name
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-10, atol=1e-12)


def test_the_loss_is_smoothed_in_training_alone() -> None:
    model = trained(QUIET, label_smoothing=0.2, capacity_factor=None)
    images, targets = draw(9), classes(9)
    log_share = model(images).logits.log_softmax(-1)
    nll = -log_share[range(3), targets].mean()
    assert_loss(model(images, targets), nll)
    assert_loss(model.train()(images, targets), 0.8 * nll - 0.2 * log_share.mean())


def test_targets_may_be_probabilities() -> None:
    model = trained()
    share = torch.rand(3, 10, generator=torch.Generator().manual_seed(0)).softmax(-1)
    log_share = model(draw(9)).logits.log_softmax(-1)
    assert_loss(model(draw(9), share), -(share * log_share).sum(-1).mean())


def assert_loss(out: VisionOutput, expected: Tensor) -> None:
    assert out.loss is not None
    torch.testing.assert_close(out.loss, expected, rtol=1e-6, atol=1e-6)


def test_the_balance_loss_is_summed_over_layers_and_one_override_away_from_nothing() -> None:
    aux_loss = trained()(draw(10)).aux_loss.item()
    assert aux_loss > 0
    assert math.isclose(trained(balance=0.2)(draw(10)).aux_loss.item(), 2 * aux_loss, rel_tol=1e-5)
    assert trained(balance=0.0)(draw(10)).aux_loss.item() == 0


def test_training_noise_moves_the_choice_and_evaluation_has_none() -> None:
    model = trained()
    assert torch.equal(model(draw(11)).logits, model(draw(11)).logits)
    model.train()
    one, other = (model(draw(11), return_routings=True).routings for _ in range(2))
    assert one is not None and other is not None
    assert not torch.equal(one[0].affinity, other[0].affinity)


def test_experts_drop_hidden_units_in_training_alone() -> None:
    for rate, alike in ((0.0, True), (0.5, False)):
        model = trained(QUIET, expert_dropout=rate).train()
        one, other = (model(draw(11)).logits for _ in range(2))
        assert torch.equal(one, other) is alike
        model.eval()
        assert torch.equal(model(draw(11)).logits, model(draw(11)).logits)


def test_stochastic_depth_rises_linearly_and_keeps_the_mean() -> None:
    assert drop_path_rates(0.2, 3) == [0.0, 0.1, 0.2]
    assert drop_path_rates(0.2, 1) == [0.0]
    model = trained(drop_path=0.5)
    assert [drop for stage in model.stages for drop in stage.drops][-1] == 0.5
    torch.manual_seed(0)
    weights = draw_kept(torch.zeros(4000, 2), 0.2, training=True)
    assert weights is not None and weights.unique().tolist() == [0.0, 1.25]
    # Standard error of the mean of 8000 draws: 0.5 / sqrt(8000) = 0.0056.
    assert abs(weights.mean().item() - 1) < 0.02
    assert draw_kept(weights, 0.2, training=False) is None


def test_an_image_that_skips_both_branches_leaves_a_block_unchanged() -> None:
    model, block = trained(), trained().stages[1].blocks[1]
    x_BYXD = torch.randn(3, 4, 4, 16, dtype=torch.float64)
    state = RoutingState.identity(num_tokens=48, num_clusters=4, dim=16, dtype=torch.float64)
    kept = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]], dtype=torch.float64)
    found, _ = block(x_BYXD, state, kept)
    plain, _ = block(x_BYXD, state)
    assert torch.equal(found[0], x_BYXD[0])
    assert torch.equal(found[1], plain[1])
    assert not torch.allclose(found[2], plain[2])
    assert model.training is False


def test_weights_begin_small_in_layers_gates_and_experts_alike() -> None:
    torch.manual_seed(0)
    model = SwinModel(config(init_std=0.005, dim=32))
    layer = model.moe_layers()[0]
    assert isinstance(layer.router, TopKRouter)
    for weight in (layer.router.embedding, layer.experts.up, layer.experts.down, model.head.weight):
        assert 0.004 < weight.std().item() < 0.006
    assert layer.experts.down_bias is None
    assert (model.head.bias == 0).all() and (layer.experts.up_bias == 0).all()
    own = SwinModel(config(SMoEConfig(gate="all", noise=1.0, init="orthogonal")))
    router = own.moe_layers()[0].router
    torch.testing.assert_close(router.embedding.norm(dim=-1), torch.full((4,), 0.32))


@pytest.mark.parametrize("side", [4, 8, 32])
def test_other_sizes_work_where_windows_tile(side: int) -> None:
    # The first maps have 2, 4 and 16 tokens a side; merged maps of 1 are single windows.
    model = trained(patch=1, image_size=8)
    assert model(draw(12, side=side)).logits.shape == (3, 10)


@pytest.mark.parametrize(
    ("images", "targets", "message"),
    [
        (torch.zeros(3, 16, 16), None, "images have shape \\(3, 16, 16\\); pass \\(batch, 3,"),
        (torch.zeros(0, 3, 16, 16), None, "images have shape \\(0, 3, 16, 16\\)"),
        (torch.zeros(2, 1, 16, 16), None, "images have shape \\(2, 1, 16, 16\\)"),
        (torch.zeros(2, 3, 16, 16, dtype=torch.uint8), None, "images have dtype torch.uint8"),
        (torch.zeros(2, 3, 16, 18), None, "images of 16 x 18 pixels: 18 is no .* make it 16,"),
        (None, torch.zeros(2, dtype=torch.int64), "targets have shape \\(2,\\) and dtype"),
        (None, torch.zeros(3), "pass 3 class ids, or probabilities of shape \\(3, 10\\)"),
        (None, torch.tensor([0, 10, 1]), "targets holds id 10"),
    ],
    ids=str,
)
def test_wrong_images_and_targets_are_named(
    images: Tensor | None, targets: Tensor | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        trained()(draw(0) if images is None else images, targets)


@pytest.mark.parametrize(
    "router", ["cosine", "threshold", "expert-choice", AdaptiveConfig.preset("reference-swin")]
)
def test_other_routers_train_too(router: str | RouterConfig) -> None:
    model = trained(router).train()
    out = model(draw(14), classes(14))
    (out.loss + out.aux_loss).backward()
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all()
        for parameter in model.parameters()
    )


def test_a_new_head_classifies_into_other_classes(tmp_path: Any) -> None:
    model = trained("adaptive")
    model.new_head(4)
    assert model(draw(16), torch.tensor([0, 3, 1])).logits.shape == (3, 4)
    save(model, tmp_path)
    assert torch.equal(load(tmp_path)(draw(16)).logits, model(draw(16)).logits)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # dynamo's own, about how it traces autograd functions
def test_blocks_compile_whole_and_share_graphs_at_any_drop_path() -> None:
    torch._dynamo.reset()
    model = trained(
        "smoe", drop_path=0.3, depths=(1, 8), heads=(2, 2), moe_stages=(1,), adaptive_stage=1
    ).train()
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    for block in model.blocks:
        # Static shapes: reasoning about windows of unknown maps takes dynamo minutes.
        block.compile(fullgraph=True, dynamic=False, backend=count)
    model(draw(17))
    # One in the first stage, never dropped; in the second dense and MoE blocks, each before and
    # after the first balance loss arrived. Eight drop rates make no difference.
    assert len(graphs) == 5
    torch._dynamo.reset()
