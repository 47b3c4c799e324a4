"""The image classifiers as timm models: `timm.create_model("swin_acmoe_small", router="smoe")`.

A timm training script sees logits alone. Two things are then the caller's:
  - the auxiliary loss: `model.backbone(images, targets)` gives loss and aux_loss to be added;
  - running statistics: `optimizer.register_step_post_hook(lambda *_: fold_statistics(model))`, or
    an adaptive router evaluates with the scale of an untrained model, M = I.
"""

import importlib
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from acmoe.config.images.presets import SOFT_VIT_MODELS, SWIN_MODELS
from acmoe.config.routing import RouterConfig
from acmoe.errors import UserError, check
from acmoe.models.images.classifier import ImageClassifier
from acmoe.models.registry import create_model, model_card

# What timm's callers say, in this library's words.
_OPTIONS = {
    "in_chans": "channels",
    "img_size": "image_size",
    "window_size": "window",
    "drop_path_rate": "drop_path",
}
# Passed by timm to every model; there are no pretrained weights to choose among.
_PRETRAINED = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")


class TimmClassifier(nn.Module):
    """What timm expects of a model: logits from `forward`, and a head that can be exchanged."""

    def __init__(self, backbone: ImageClassifier) -> None:
        super().__init__()
        config = backbone.config
        self.backbone = backbone
        self.num_features = backbone.head.in_features
        # What timm.data.resolve_data_config reads; 256 pixels resized, 224 of them kept.
        self.pretrained_cfg: dict[str, Any] = {
            "input_size": (config.channels, config.image_size, config.image_size),
            "interpolation": "bicubic",
            "crop_pct": 0.875,
            "num_classes": config.num_classes,
            "classifier": "backbone.head",
        }
        self.default_cfg = self.pretrained_cfg  # its older name

    @property
    def num_classes(self) -> int:
        return self.backbone.config.num_classes

    def forward(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.backbone(images).logits)

    def forward_features(self, images: Tensor) -> Tensor:
        """(B, D) what the head reads."""
        return self.backbone.features(images)[0]

    def get_classifier(self) -> nn.Module:
        return self.backbone.head

    def reset_classifier(self, num_classes: int) -> None:
        self.backbone.new_head(num_classes)


def register() -> list[str]:
    """Make every image classifier known to timm; returns the names. Repeating it does nothing."""
    try:
        registry = importlib.import_module("timm.models")
    except ImportError as error:
        raise UserError(f"timm cannot be imported ({error}); run pip install timm") from error
    names = {timm_name(name): name for name in (*SWIN_MODELS, *SOFT_VIT_MODELS)}
    for entry, name in names.items():
        if not registry.is_model(entry):
            registry.register_model(_entry_point(entry, name))
    return list(names)


def timm_name(name: str) -> str:
    """swin-small -> swin_acmoe_small."""
    family, size = name.split("-")
    return f"{family}_acmoe_{size}"


def _entry_point(entry: str, name: str) -> Callable[..., TimmClassifier]:
    def build(
        pretrained: bool = False, router: str | RouterConfig = "adaptive", **options: Any
    ) -> TimmClassifier:
        check(
            not pretrained,
            f"{entry} has no pretrained weights; pass pretrained=False, and for dense Swin weights "
            "see acmoe.models.images.swin_convert",
        )
        own = {
            _OPTIONS.get(key, key): value
            for key, value in options.items()
            if key not in _PRETRAINED
        }
        return TimmClassifier(cast(ImageClassifier, create_model(name, router=router, **own)))

    # timm registers a function under its own name.
    build.__name__ = build.__qualname__ = entry
    build.__doc__ = model_card(name).description
    return build
