"""The SoftMoE vision transformer, against the definition written out per image.

Shapes: B batch, L tokens, D features, E experts (one slot each), J clusters per token.
"""

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from acmoe.config.images.presets import SOFT_VIT_MODELS, vision_router
from acmoe.config.images.vision import SoftViTConfig
from acmoe.config.routing import AdaptiveConfig, RouterConfig, SoftConfig
from acmoe.errors import UserError
from acmoe.experts.soft import SoftMoE
from acmoe.models.checkpoint import load, save
from acmoe.models.images.vit import SoftViT, ViTBlock
from acmoe.models.registry import create_model
from acmoe.routing.adaptive import AdaptiveRouter
from acmoe.routing.statistics.step import fold_statistics


def config(router: str | RouterConfig = "soft", **changes: Any) -> SoftViTConfig:
    small = dataclasses.replace(
        SOFT_VIT_MODELS["softmoe-nano"].config,
        **{"image_size": 8, "patch": 2, "dim": 8, "heads": 2, "num_experts": 10, **changes},
    )
    return dataclasses.replace(small, router=vision_router(router, small))


def draw(seed: int, batch: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, 8, 8, generator=generator, dtype=torch.float64)


def trained(router: str | RouterConfig = "soft", **changes: Any) -> SoftViT:
    """In float64, with running statistics that two batches have moved off their start."""
    torch.manual_seed(0)
    model = SoftViT(config(router, init_std=0.3, **changes)).double()
    for seed in (100, 101):
        model(draw(seed))
        fold_statistics(model)
    return model.eval()


def attend(block: ViTBlock, x_LD: Tensor) -> Tensor:
    """Attention of one image, head by head."""
    h_LD = F.layer_norm(x_LD, (8,), block.norm_attention.weight, block.norm_attention.bias, 1e-6)
    q, k, v = (h_LD @ block.attention.qkv.weight.T + block.attention.qkv.bias).split(8, dim=-1)
    heads = []
    for head in (slice(0, 4), slice(4, 8)):
        score_LL = q[:, head] @ k[:, head].T / math.sqrt(4)
        heads.append(score_LL.softmax(-1) @ v[:, head])
    return torch.cat(heads, -1) @ block.attention.output.weight.T + block.attention.output.bias


def soft_layer(layer: SoftMoE, h_LD: Tensor) -> Tensor:
    """Every slot a mixture of tokens, every output a mixture of experts' slots."""
    slots_ED = layer.base.slots / layer.base.slots.norm(dim=-1, keepdim=True)
    logits_LE = layer.base.logit_scale * (h_LD / h_LD.norm(dim=-1, keepdim=True)) @ slots_ED.T
    experts = layer.experts
    assert experts.up_bias is not None and experts.down_bias is not None
    outputs = []
    for e in range(len(slots_ED)):
        slot_D = logits_LE[:, e].softmax(0) @ h_LD
        hidden_F = F.gelu(experts.up[e] @ slot_D + experts.up_bias[e])
        outputs.append(experts.down[e] @ hidden_F + experts.down_bias[e])
    return logits_LE.softmax(-1) @ torch.stack(outputs)


def test_logits_are_those_of_the_definition() -> None:
    model, images = trained(), draw(0)
    for image, logits in zip(images, model(images).logits, strict=True):
        squares = [image[:, y : y + 2, x : x + 2] for y in range(0, 8, 2) for x in range(0, 8, 2)]
        weight = model.embed.project.weight
        patches = [(weight * square).sum((1, 2, 3)) for square in squares]
        tokens = torch.stack(patches) + model.embed.project.bias
        x_LD = torch.cat([model.class_token[None], tokens]) + model.positions
        for block in model.blocks:
            x_LD = x_LD + attend(block, x_LD)
            h_LD = F.layer_norm(x_LD, (8,), block.norm_layer.weight, block.norm_layer.bias, 1e-6)
            layer = block.layer
            if isinstance(layer, SoftMoE):
                x_LD = x_LD + soft_layer(layer, h_LD)
            else:
                x_LD = x_LD + layer.down(F.gelu(layer.up(h_LD)))
        first_D = F.layer_norm(x_LD[0], (8,), model.norm.weight, model.norm.bias, 1e-6)
        torch.testing.assert_close(logits, model.head(first_D), rtol=1e-11, atol=1e-11)


def test_softmoe_tiny_is_plain_in_block_6_and_adaptive_in_7_to_11() -> None:
    with torch.device("meta"):
        model = create_model("softmoe-tiny", router="adaptive")
    assert isinstance(model, SoftViT)
    moe = [n for n, block in enumerate(model.blocks) if isinstance(block.layer, SoftMoE)]
    assert moe == [6, 7, 8, 9, 10, 11]
    adaptive = [n for n in moe if isinstance(model.blocks[n].layer.router, AdaptiveRouter)]
    assert adaptive == [7, 8, 9, 10, 11]
    assert {model.blocks[n].layer.router.mix for n in adaptive} == {8}


def test_a_token_s_scale_mixes_its_eight_best_clusters() -> None:
    plain, adaptive = trained("soft"), trained("adaptive")
    one = plain(draw(1), return_routings=True).routings
    other = adaptive(draw(1), return_routings=True).routings
    assert one is not None and other is not None
    assert len(one) == 3 and one[0].affinity.shape == (3 * 17, 10)
    assert torch.equal(one[0].affinity, other[0].affinity)
    assert not torch.allclose(one[1].affinity, other[1].affinity)
    states = []
    layer = adaptive.moe_layers()[1]
    handle = layer.register_forward_hook(lambda _, inputs, output: states.append(inputs))
    adaptive(draw(1))
    handle.remove()
    x_BLD, state = states[0]
    share_TE = one[0].affinity.exp()  # each expert's share of a token's output
    for token in (0, 20, 50):
        best = share_TE[token].argsort(descending=True)[:8]
        weight = share_TE[token, best] / share_TE[token, best].sum()
        scale_D = (weight[:, None] * state.scale[best]).sum(0)
        scaled_D = x_BLD.flatten(0, 1)[token] * scale_D
        slots_ED = F.normalize(layer.base.slots, dim=-1)
        logits_E = layer.base.logit_scale * slots_ED @ (scaled_D / scaled_D.norm())
        torch.testing.assert_close(other[1].affinity[token], logits_E.log_softmax(-1))


@pytest.mark.parametrize("router", ["soft", "adaptive"])
def test_in_evaluation_no_image_changes_another(router: str) -> None:
    model, images = trained(router), draw(2, batch=4)
    alone = torch.cat([model(images[i : i + 1]).logits for i in range(4)])
    torch.testing.assert_close(model(images).logits, alone, rtol=1e-12, atol=1e-12)


def test_batch_statistics_do_couple_images() -> None:
    model = trained(AdaptiveConfig(base=SoftConfig(), mix=8, statistics="batch"))
    images = draw(2, batch=4)
    assert not torch.allclose(model(images).logits[:1], model(images[:1]).logits, atol=1e-9)


def test_checkpointed_blocks_give_the_same_gradients() -> None:
    plain = trained("adaptive", drop_path=0.3, expert_dropout=0.2).train()
    frugal = copy.deepcopy(plain)
    frugal.checkpoint_blocks = True
    for model in (plain, frugal):
        torch.manual_seed(7)
        out = model(draw(3), torch.tensor([1, 0, 9]))
        assert out.loss is not None and out.aux_loss.item() == 0
        out.loss.backward()
    for (name, one), (_, other) in zip(
        plain.named_parameters(), frugal.named_parameters(), strict=True
    ):
        assert one.grad is not None and other.grad is not None, name
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("option", ["drop_path", "expert_dropout"])
def test_what_is_dropped_is_dropped_in_training_alone(option: str) -> None:
    for rate, alike in ((0.0, True), (0.5, False)):
        model = trained(**{option: rate}).train()
        one, other = (model(draw(5)).logits for _ in range(2))
        assert torch.equal(one, other) is alike
        model.eval()
        assert torch.equal(model(draw(5)).logits, model(draw(5)).logits)


def test_models_of_one_seed_differ_in_nothing_but_the_router_s_scale() -> None:
    states = []
    for router in ("smoe", "adaptive", "random"):
        torch.manual_seed(0)
        states.append(dict(create_model("softmoe-nano", router=router).named_parameters()))
    for other in states[1:]:
        for (name, one), (deeper, two) in zip(states[0].items(), other.items(), strict=True):
            assert deeper.replace(".router.base.", ".router.") == name
            assert torch.equal(one, two), name


def test_a_saved_model_answers_alike(tmp_path: Any) -> None:
    model = trained("adaptive")
    save(model, tmp_path)
    again = load(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(draw(4)).logits, model(draw(4)).logits)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(2, 3, 8, 10), "images of 8 x 10 pixels; the positions are learned for 8 x 8"),
        (torch.zeros(2, 4, 8, 8), "images have shape \\(2, 4, 8, 8\\); pass \\(batch, 3,"),
    ],
    ids=str,
)
def test_wrong_images_are_named(images: Tensor, message: str) -> None:
    with pytest.raises(UserError, match=message):
        trained()(images)
