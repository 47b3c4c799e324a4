"""Swin-MoE: the dense Swin with one expert, and a routing state that follows each token.

Shapes: B batch, Y rows and X columns of a map, T tokens, D features, E experts.
"""

import copy
import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from acmoe.config.routing import AdaptiveConfig, RouterConfig, SMoEConfig
from acmoe.config.vision import SwinConfig
from acmoe.config.vision_models import SWIN_MODELS, vision_router
from acmoe.errors import UserError
from acmoe.experts.moe import MoE
from acmoe.models.capacity import override_capacity
from acmoe.models.checkpoint import load, save
from acmoe.models.classifier import VisionOutput
from acmoe.models.registry import create_model
from acmoe.models.swin import SwinModel
from acmoe.models.vision_layers import draw_kept, drop_path_rates
from acmoe.routing.adaptive import AdaptiveRouter
from acmoe.routing.state import RoutingState
from acmoe.routing.step import fold_statistics
from acmoe.routing.topk import TopKRouter

QUIET = SMoEConfig(gate="all")


def config(router: str | RouterConfig = "smoe", **changes: Any) -> SwinConfig:
    """Maps of 8, 4 and 2 a side; the second stage has three MoE layers, two of them adaptive."""
    small = dataclasses.replace(
        SWIN_MODELS["swin-nano"].config,
        **{
            **{"image_size": 16, "patch": 2, "dim": 8, "heads": (2, 2, 4), "num_experts": 4},
            **{"init_std": 0.2, **changes},
        },
    )
    return dataclasses.replace(small, router=vision_router(router, small))


def draw(seed: int, batch: int = 3, side: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, side, side, generator=generator, dtype=torch.float64)


def classes(seed: int, batch: int = 3) -> Tensor:
    return torch.randint(10, (batch,), generator=torch.Generator().manual_seed(seed))


def trained(router: str | RouterConfig = "smoe", **changes: Any) -> SwinModel:
    """In float64, with running statistics that two batches have moved off their start."""
    torch.manual_seed(0)
    model = SwinModel(config(router, **changes)).double()
    for seed in (100, 101):
        model(draw(seed))
        fold_statistics(model)
    return model.eval()


@contextmanager
def layer_calls(model: SwinModel) -> Iterator[list[tuple[Tensor, RoutingState, Tensor]]]:
    """(x, state, y) of each MoE layer, in order."""
    found: list[tuple[Tensor, RoutingState, Tensor]] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        found.append((inputs[0], inputs[1], output[0]))

    handles = [layer.register_forward_hook(note) for layer in model.moe_layers()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("router", ["smoe", "adaptive"])
@pytest.mark.parametrize("last_bias", [False, True])
def test_one_expert_is_the_dense_swin(router: str, last_bias: bool) -> None:
    moe = trained(router, num_experts=1, top_k=1, last_bias=last_bias)
    dense = SwinModel(config(moe_stages=(), last_bias=last_bias)).double().eval()
    weights = {}
    for name, tensor in moe.state_dict().items():
        for ours, plain in (
            ("experts.up_bias", "up.bias"),
            ("experts.down_bias", "down.bias"),
            ("experts.up", "up.weight"),
            ("experts.down", "down.weight"),
        ):
            if ours in name:
                name, tensor = name.replace(ours, plain), tensor[0]
                break
        if ".router." not in name and ".emitter." not in name:
            weights[name] = tensor
    dense.load_state_dict(weights)
    torch.testing.assert_close(moe(draw(0)).logits, dense(draw(0)).logits, rtol=1e-11, atol=1e-11)
    assert dense(draw(0)).aux_loss.item() == 0


def test_models_of_one_seed_differ_in_nothing_but_the_router_s_scale() -> None:
    states = []
    for router in ("smoe", "adaptive", AdaptiveConfig(statistics="sequence", mix=2), "random"):
        torch.manual_seed(0)
        states.append(dict(create_model("swin-nano", router=router).named_parameters()))
    for other in states[1:]:
        for (name, one), (deeper, two) in zip(states[0].items(), other.items(), strict=True):
            assert deeper.replace(".router.base.", ".router.") == name
            assert torch.equal(one, two), name


def test_the_scale_enters_at_the_second_moe_layer_and_never_in_the_last_stage() -> None:
    plain, adaptive = (
        trained("smoe", capacity_factor=None),
        trained("adaptive", capacity_factor=None),
    )
    one = plain(draw(1), return_routings=True).routings
    other = adaptive(draw(1), return_routings=True).routings
    assert one is not None and other is not None
    assert torch.equal(one[0].affinity, other[0].affinity)
    assert not torch.allclose(one[1].affinity, other[1].affinity)
    with layer_calls(adaptive) as calls:
        adaptive(draw(1))
    x_BLD, state, _ = calls[1]
    # Eqn. 8 by hand: the token's own cluster stretches it, then the gate of the layer reads it.
    embedding_ED = adaptive.moe_layers()[1].router.base.embedding
    own_TD = x_BLD.flatten(0, 1) * state.scale[state.assignment[:, 0]]
    torch.testing.assert_close(other[1].affinity, own_TD @ embedding_ED.T)
    assert isinstance(adaptive.moe_layers()[3].router, TopKRouter)


def test_the_state_begins_anew_where_patches_merge_and_the_losses_go_on() -> None:
    model = trained("adaptive")
    with layer_calls(model) as calls:
        aux_loss = model(draw(2)).aux_loss
    tokens = [state.assignment.shape[0] for _, state, _ in calls]
    assert tokens == [3 * 16] * 3 + [3 * 4]
    assert [state.scale.shape for _, state, _ in calls] == [(4, 16)] * 3 + [(4, 32)]
    for first in (0, 3):  # of a stage
        _, state, _ = calls[first]
        assert (state.assignment == -1).all() and (state.scale == 1).all()
    for later in (1, 2):
        _, state, _ = calls[later]
        assert (state.assignment >= 0).all() and (state.scale != 1).any()
    losses = [state.aux_loss.item() for _, state, _ in calls]
    assert losses[0] == 0 and losses[0] < losses[1] < losses[2] < losses[3] < aux_loss.item()


def test_a_token_keeps_its_flat_index_through_shifted_windows() -> None:
    model = trained("adaptive", capacity_factor=None)
    for block in model.blocks:  # no token hears of another
        nn.init.zeros_(block.attention.output.weight)
        nn.init.zeros_(block.attention.output.bias)
    assert [block.attention.shifted for block in model.stages[1].blocks] == [False, True] * 3
    images = draw(3)
    changed = images.clone()
    changed[1, :, 8:12, 4:8] += 1.0  # 4 pixels a token of the second stage: row 2, column 1
    one = model(images, return_routings=True).routings
    other = model(changed, return_routings=True).routings
    assert one is not None and other is not None
    for layer in range(3):
        moved_T = (one[layer].affinity != other[layer].affinity).any(-1)
        assert moved_T.nonzero().flatten().tolist() == [1 * 16 + 2 * 4 + 1]
    moved_T = (one[3].affinity != other[3].affinity).any(-1)  # 2 x 2 tokens: row 1, column 0
    assert moved_T.nonzero().flatten().tolist() == [1 * 4 + 1 * 2 + 0]


@pytest.mark.parametrize(
    ("placement", "layers"),
    [  # as the paper counts the layers of the third stage, from 1
        ("full", [4, 6, 8, 10, 12, 14, 16, 18]),
        ("skip-1", [6, 8, 10, 12, 14, 16, 18]),
        ("skip-2", [8, 10, 12, 14, 16, 18]),
        ("back-half", [10, 12, 14, 16, 18]),
        ("alternating", [4, 8, 12, 16]),
    ],
)
def test_placements_are_those_of_the_paper(placement: str, layers: list[int]) -> None:
    with torch.device("meta"):
        model = create_model("swin-small", router="adaptive", placement=placement)
    assert isinstance(model, SwinModel)
    found = [
        (stage, number)
        for stage, blocks in enumerate(model.stages)
        for number, block in enumerate(blocks.blocks, start=1)
        if isinstance(block.layer, MoE) and isinstance(block.layer.router, AdaptiveRouter)
    ]
    assert found == [(2, number) for number in layers]
    # The MoE layer before each takes the statistics, adaptive or not.
    emits = [
        number
        for number, block in enumerate(model.stages[2].blocks, start=1)
        if isinstance(block.layer, MoE) and block.layer.emitter.statistics is not None
    ]
    assert emits == [number - 2 for number in layers]


def test_other_stages_stay_plain_however_many_moe_layers_they_have() -> None:
    model = trained("adaptive", depths=(2, 4, 4))
    kinds = [type(layer.router) for layer in model.moe_layers()]
    assert kinds == [TopKRouter, AdaptiveRouter, TopKRouter, TopKRouter]
    moved = trained("adaptive", depths=(2, 4, 4), adaptive_stage=2)
    kinds = [type(layer.router) for layer in moved.moe_layers()]
    assert kinds == [TopKRouter, TopKRouter, TopKRouter, AdaptiveRouter]


@pytest.mark.parametrize("training", [True, False])
def test_a_full_expert_passes_what_is_over_its_capacity(training: bool) -> None:
    model = trained(QUIET, top_k=1, capacity_factor=1.25).train(training)
    block = model.stages[1].blocks[1]
    nn.init.zeros_(block.norm_layer.weight)
    nn.init.ones_(block.norm_layer.bias)  # all tokens look alike, and all want expert 0
    nn.init.zeros_(block.layer.router.embedding)
    nn.init.ones_(block.layer.router.embedding[0])
    used = []
    for factor in (1.25, None, 0.5):
        with override_capacity(model, factor), layer_calls(model) as calls:
            model(draw(4))
        used.append((calls[0][2] != 0).any(-1).sum().item())
    # 48 tokens, 4 experts: floor(1.25 * 12) = 15 rows; floor(0.5 * 12) = 6.
    assert used == [15, 48, 6]
    assert block.layer.capacity_factor == 1.25


def test_capacity_must_be_positive() -> None:
    model = trained()
    refused = pytest.raises(UserError, match="factor=0; it must be positive, or None")
    with refused, override_capacity(model, 0):
        raise AssertionError("the block must not be entered")


@pytest.mark.parametrize("router", ["smoe", "adaptive", AdaptiveConfig(statistics="sequence")])
def test_in_evaluation_no_image_changes_another(router: str | RouterConfig) -> None:
    model = trained(router, capacity_factor=None)
    images = draw(5, batch=4)
    alone = torch.cat([model(images[i : i + 1]).logits for i in range(4)])
    torch.testing.assert_close(model(images).logits, alone, rtol=1e-12, atol=1e-12)


def test_in_training_and_in_the_paper_s_evaluation_images_share_their_statistics() -> None:
    model = trained(AdaptiveConfig(statistics="batch"), capacity_factor=None)
    images = draw(5, batch=4)
    assert not torch.allclose(model(images).logits[:1], model(images[:1]).logits, atol=1e-6)


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


def test_routings_are_one_per_moe_layer_and_only_when_asked_for() -> None:
    model = trained("adaptive")
    assert model(draw(8)).routings is None
    routings = model(draw(8), return_routings=True).routings
    assert routings is not None
    assert [tuple(routing.expert_ids.shape) for routing in routings] == [(48, 2)] * 3 + [(12, 2)]
    # A gate of all experts, not renormalised: two of four sum to less than one.
    assert (routings[0].gate.sum(-1) < 1 - 1e-3).all()
    assert model(draw(8)).routings is None


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


def test_a_saved_model_answers_alike(tmp_path: Any) -> None:
    model = trained("adaptive", position="table")
    save(model, tmp_path)
    again = load(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(draw(15)).logits, model(draw(15)).logits)


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
