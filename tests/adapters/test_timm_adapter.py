"""The image classifiers under timm's roof, its registry and factory played by a stand-in."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from acmoe.adapters.timm import TimmClassifier, register, timm_name
from acmoe.config.routing import SMoEConfig
from acmoe.errors import UserError
from acmoe.models.images.swin import SwinModel
from acmoe.models.images.vit import SoftViT


class Timm(ModuleType):
    """A stand-in for timm: it registers a function under the function's own name."""

    def __init__(self) -> None:
        super().__init__("timm.models")
        self.entries: dict[str, Callable[..., Any]] = {}
        self.registrations = 0

    def register_model(self, build: Callable[..., Any]) -> Callable[..., Any]:
        assert build.__module__ in sys.modules  # timm looks the module up
        self.entries[build.__name__] = build
        self.registrations += 1
        return build

    def is_model(self, name: str) -> bool:
        return name in self.entries

    def create_model(self, name: str, pretrained: bool = False, **options: Any) -> Any:
        """timm passes its own arguments always, a caller's where they are not None."""
        given = {key: value for key, value in options.items() if value is not None}
        return self.entries[name](
            pretrained=pretrained, pretrained_cfg=None, pretrained_cfg_overlay=None, **given
        )


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> Timm:
    models = Timm()
    package = ModuleType("timm")
    package.models = models  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", package)
    monkeypatch.setitem(sys.modules, "timm.models", models)
    return models


def test_every_image_classifier_gets_a_timm_name_once(timm: Timm) -> None:
    names = register()
    assert set(names) >= {"swin_acmoe_small", "swin_acmoe_base", "softmoe_acmoe_tiny"}
    assert set(names) == set(timm.entries)
    assert register() == names
    assert timm.registrations == len(names)
    assert timm_name("swin-base") == "swin_acmoe_base"


def test_a_registered_model_gives_the_backbone_s_logits(timm: Timm) -> None:
    register()
    model = timm.create_model("swin_acmoe_nano", drop_rate=None).eval()
    assert isinstance(model, TimmClassifier) and isinstance(model.backbone, SwinModel)
    assert model.backbone.config.router.name == "adaptive"
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(images), model.backbone(images).logits)
    features = model.forward_features(images)
    assert torch.equal(model.get_classifier()(features), model(images))
    assert features.shape == (2, model.num_features)


def test_options_come_in_timm_s_words_or_ours(timm: Timm) -> None:
    register()
    model = timm.create_model(
        "swin_acmoe_nano",
        router="smoe",
        num_classes=7,
        in_chans=1,
        img_size=16,
        drop_path_rate=0.1,
        top_k=1,
    )
    config = model.backbone.config
    assert config.router == SMoEConfig(gate="all", noise=1.0)
    assert (config.channels, config.image_size, config.drop_path, config.top_k) == (1, 16, 0.1, 1)
    assert model.num_classes == 7
    assert model.pretrained_cfg["input_size"] == (1, 16, 16)
    assert model.default_cfg is model.pretrained_cfg


def test_the_head_can_be_exchanged(timm: Timm) -> None:
    register()
    model = timm.create_model("softmoe_acmoe_nano")
    assert isinstance(model.backbone, SoftViT)
    model.reset_classifier(4)
    assert model.num_classes == 4
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 4)
    with pytest.raises(UserError, match="num_classes=0; it must be an integer of at least 1"):
        model.reset_classifier(0)


def test_what_it_cannot_do_is_refused(timm: Timm) -> None:
    register()
    with pytest.raises(UserError, match="swin_acmoe_nano has no pretrained weights"):
        timm.create_model("swin_acmoe_nano", pretrained=True)
    with pytest.raises(UserError, match="swin-nano has no option 'global_pool'"):
        timm.create_model("swin_acmoe_nano", global_pool="avg")


def test_without_timm_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.delitem(sys.modules, "timm.models", raising=False)
    with pytest.raises(UserError, match=r"timm cannot be imported .*; run pip install timm"):
        register()
