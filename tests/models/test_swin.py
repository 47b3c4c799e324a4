"""Swin-MoE: the dense Swin with one expert, and a routing state that follows each token.

Shapes: B batch, Y rows and X columns of a map, T tokens, D features, E experts.
"""

from typing import Any, Literal

import pytest
import torch
from swin_cases import QUIET, config, draw, layer_calls, trained
from torch import nn

from acmoe.config.routing import AdaptiveConfig, RouterConfig, SMoEConfig
from acmoe.errors import UserError
from acmoe.experts.moe import MoE
from acmoe.models.capacity import override_capacity
from acmoe.models.checkpoint import load, save
from acmoe.models.images.swin import SwinModel
from acmoe.models.registry import create_model
from acmoe.routing.adaptive import AdaptiveRouter
from acmoe.routing.topk import TopKRouter
from slow_cases import mostly_slow


@mostly_slow(
    ("router", "last_bias"),
    [("smoe", True), ("adaptive", False), ("smoe", False), ("adaptive", True)],
    keep={0, 1},
)
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
        if ".router." not in name and ".next_state." not in name:
            weights[name] = tensor
    dense.load_state_dict(weights)
    torch.testing.assert_close(moe(draw(0)).logits, dense(draw(0)).logits, rtol=1e-11, atol=1e-11)
    assert dense(draw(0)).aux_loss.item() == 0


@pytest.mark.parametrize("init", ["uniform", "orthogonal"])
def test_embeddings_begin_with_the_length_that_every_step_restores(
    init: Literal["uniform", "orthogonal"],
) -> None:
    """From a tenth of that length the first step would turn them by ten times the angle."""
    router = SMoEConfig(normalize_embeddings=True, embedding_length=1.5, init=init)
    routers = [layer.router for layer in SwinModel(config(router)).moe_layers()]
    assert routers
    for one in routers:
        assert isinstance(one, TopKRouter)
        torch.testing.assert_close(one.embedding.norm(dim=1), torch.full((4,), 1.5))


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
        if isinstance(block.layer, MoE) and block.layer.next_state.statistics is not None
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
    refused = pytest.raises(UserError, match="factor=0; it must be a positive number, or None")
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


def test_routings_are_one_per_moe_layer_and_only_when_asked_for() -> None:
    model = trained("adaptive")
    assert model(draw(8)).routings is None
    routings = model(draw(8), return_routings=True).routings
    assert routings is not None
    assert [tuple(routing.expert_ids.shape) for routing in routings] == [(48, 2)] * 3 + [(12, 2)]
    # A gate of all experts, not renormalised: two of four sum to less than one.
    assert (routings[0].gate.sum(-1) < 1 - 1e-3).all()
    assert model(draw(8)).routings is None


def test_a_saved_model_answers_alike(tmp_path: Any) -> None:
    model = trained("adaptive", position="table")
    save(model, tmp_path)
    again = load(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(draw(15)).logits, model(draw(15)).logits)
