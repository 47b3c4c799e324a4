"""Published Swin weights give published Swin logits, and every misfit is named."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_swin import plain_swin, random_swin
from safetensors.torch import save_file
from torch import Tensor

from acmoe.config.images.presets import SWIN_MODELS, vision_router
from acmoe.config.images.vision import SwinConfig
from acmoe.errors import UserError
from acmoe.models.images.swin import SwinModel
from acmoe.models.images.swin_convert import load_dense_swin, read_weights

SIZES: dict[str, Any] = {"depths": (2, 2, 4), "heads": (1, 2, 4), "window": 4, "patch": 2}


def checkpoint(**changes: Any) -> dict[str, Tensor]:
    """Maps of 8, 4 and 2 a side: shifted windows, one window, a window that shrinks to the map."""
    generator = torch.Generator().manual_seed(0)
    given = {"dim": 4, "image_size": 16, "classes": 5, **SIZES, **changes}
    return random_swin(**given, generator=generator)


def model(router: str = "smoe", **changes: Any) -> SwinModel:
    config = dataclasses.replace(
        SWIN_MODELS["swin-small"].config,
        **{
            **{"dim": 4, "image_size": 16, "num_classes": 5, "moe_stages": (), **SIZES},
            **{"position": "table", "last_bias": True, "num_experts": 4, "init_std": 0.1},
            **changes,
        },
    )
    torch.manual_seed(1)
    built = dataclasses.replace(config, router=vision_router(router, config))
    return SwinModel(built).double().eval()


def moe(**changes: Any) -> SwinModel:
    return model("adaptive", moe_stages=(2,), adaptive_stage=2, **changes)


def images() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64)


def as_timm(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Its newer habit: the merge belongs to the stage that follows, the head has a part `fc`."""
    renamed = {}
    for name, tensor in weights.items():
        found = re.match(r"layers\.(\d)\.downsample\.(.*)", name)
        if found:
            name = f"layers.{int(found[1]) + 1}.downsample.{found[2]}"
        renamed[name.replace("head.", "head.fc.")] = tensor
    return renamed


@pytest.mark.parametrize("habit", [dict, as_timm])
def test_a_converted_dense_swin_equals_the_plain_one(habit: Any) -> None:
    weights = checkpoint()
    expected = plain_swin(weights, images(), **SIZES)
    ours = model()
    load_dense_swin(ours, habit(weights))
    torch.testing.assert_close(ours(images()).logits, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["safetensors", "pth", "wrapped.pth"])
def test_files_are_read_without_executing_them(kind: str, tmp_path: Path) -> None:
    weights = checkpoint()
    # Constants that old checkpoints hold, too.
    weights["layers.0.blocks.1.attn_mask"] = torch.zeros(4, 16, 16)
    weights["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(16, 16)
    file = tmp_path / f"swin.{kind}"
    if kind == "safetensors":
        save_file(weights, file)
    else:
        torch.save({"model": weights} if "wrapped" in kind else weights, file)
    assert read_weights(file).keys() == weights.keys()
    ours = model()
    load_dense_swin(ours, file)
    expected = plain_swin(weights, images(), **SIZES)
    torch.testing.assert_close(ours(images()).logits, expected, rtol=1e-10, atol=1e-10)


def test_upcycled_experts_are_copies_of_the_dense_layer() -> None:
    weights, ours = checkpoint(), moe()
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    load_dense_swin(ours, weights, upcycle=True)
    experts = ours.stages[2].blocks[3].layer.experts
    for expert in range(4):
        for own, theirs in (
            (experts.up, "fc1.weight"),
            (experts.up_bias, "fc1.bias"),
            (experts.down, "fc2.weight"),
            (experts.down_bias, "fc2.bias"),
        ):
            assert own is not None
            assert torch.equal(own[expert], weights[f"layers.2.blocks.3.mlp.{theirs}"].double())
    for name, tensor in ours.state_dict().items():
        if ".router." in name or ".next_state." in name:
            assert torch.equal(tensor, before[name]), name
    experts.up.data[0].zero_()  # copies, not views of one
    assert (experts.up[1] != 0).all()


def test_one_upcycled_expert_is_the_dense_swin() -> None:
    weights, ours = checkpoint(), moe(num_experts=1, top_k=1)
    load_dense_swin(ours, weights, upcycle=True)
    expected = plain_swin(weights, images(), **SIZES)
    torch.testing.assert_close(ours(images()).logits, expected, rtol=1e-10, atol=1e-10)


def test_without_upcycling_experts_stay_as_they_were_drawn() -> None:
    ours = moe()
    layer = ours.stages[2].blocks[1].layer
    before = layer.experts.up.clone()
    load_dense_swin(ours, checkpoint())
    assert torch.equal(layer.experts.up, before)
    dense = ours.stages[2].blocks[0].layer.up.weight
    assert torch.equal(dense, checkpoint()["layers.2.blocks.0.mlp.fc1.weight"].double())


def test_the_head_can_stay_for_other_classes() -> None:
    ours = model(num_classes=3)
    before = ours.head.weight.clone()
    load_dense_swin(ours, checkpoint(), head=False)
    assert torch.equal(ours.head.weight, before)
    assert ours(images()).logits.shape == (2, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"last_bias": False}, "hold layers.0.blocks.0.mlp.fc2.bias .* last_bias=True"),
        (
            {"position": "mlp"},
            "position='mlp', and .* hold a table of offsets; build .* position='table'",
        ),
        ({"depths": (2, 2, 2)}, "hold layers.2.blocks.2.attn.proj.bias \\(26 tensors in all\\)"),
        ({"depths": (2, 2, 6)}, "lack layers.2.blocks.4.norm1.weight, which stages.2.blocks.4"),
        ({"num_classes": 7}, "head.weight of shape \\(5, 16\\), the model needs \\(7, 16\\); pass"),
        ({"window": 2}, "shape \\(49, 1\\), the model needs \\(9, 1\\); choose the window"),
        ({"dim": 8}, "patch_embed.proj.weight of shape \\(4, 3, 2, 2\\), the model needs \\(8,"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named_with_its_fix(changes: dict[str, Any], message: str) -> None:
    ours = model(**changes)
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    with pytest.raises(UserError, match=message):
        load_dense_swin(ours, checkpoint())
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items())


def test_a_checkpoint_that_lost_a_tensor_is_refused() -> None:
    weights = checkpoint()
    del weights["layers.1.blocks.0.attn.qkv.bias"]
    with pytest.raises(UserError, match=r"lack layers.1.blocks.0.attn.qkv.bias"):
        load_dense_swin(model(), weights)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.pth", None, "none.pth does not exist"),
        ("swin.safetensors", b"no header", "cannot be read as weights"),
        ("swin.pth", b"no archive", "cannot be read as weights"),
    ],
)
def test_unreadable_files_are_named(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_weights(tmp_path / name)


def test_a_file_of_anything_else_is_refused(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "other.pth")
    with pytest.raises(UserError, match="holds no tensors by name"):
        read_weights(tmp_path / "other.pth")
    torch.save(SwinConfig, tmp_path / "code.pth")  # a class: nothing that weights need
    with pytest.raises(UserError, match="cannot be read as weights"):
        read_weights(tmp_path / "code.pth")
