"""The image classifiers as timm models: `timm.create_model("swin_acmoe_small", router="smoe")`.

A timm training script sees logits alone. The caller must take care of two things:
  - the auxiliary loss: `model.backbone(images, targets)` returns loss and aux_loss, to be added;
  - the experts' capacity of Swin, which also holds in `eval()`: score inside
    `acmoe.models.capacity.override_capacity(model, None)`, or images of a batch change each
    other's logits.
Every optimizer step updates the running statistics.
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

# timm's option names -> field names of this library's configs.
_OPTIONS = {
    "in_chans": "channels",
    "img_size": "image_size",
    "window_size": "window",
    "drop_path_rate": "drop_path",
}
# Options that timm passes to every model; ignored, since there are no pretrained weights.
_PRETRAINED = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")


class TimmClassifier(nn.Module):
    """The interface of a timm model: `forward` returns logits, and the head can be replaced."""

    def __init__(self, backbone: ImageClassifier) -> None:
        super().__init__()
        config = backbone.config
        self.backbone = backbone
        self.num_features = backbone.head.in_features
        # Read by timm.data.resolve_data_config; crop_pct is 224 / 256.
        self.pretrained_cfg: dict[str, Any] = {
            "input_size": (config.channels, config.image_size, config.image_size),
            "interpolation": "bicubic",
            "crop_pct": 0.875,
            "num_classes": config.num_classes,
            "classifier": "backbone.head",
        }
        self.default_cfg = self.pretrained_cfg  # the older name of pretrained_cfg

    @property
    def num_classes(self) -> int:
        return self.backbone.config.num_classes

    def forward(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.backbone(images).logits)

    def forward_features(self, images: Tensor) -> Tensor:
        """Return the (B, D) input of the head."""
        return self.backbone.features(images)[0]

    def get_classifier(self) -> nn.Module:
        return self.backbone.head

    def reset_classifier(self, num_classes: int) -> None:
        self.backbone.new_head(num_classes)


def register() -> list[str]:
    """Register every image classifier with timm and return the names. Repeated calls do nothing."""
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
    """Return the timm name of a model: swin-small -> swin_acmoe_small."""
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
        fields = {
            _OPTIONS.get(key, key): value
            for key, value in options.items()
            if key not in _PRETRAINED
        }
        return TimmClassifier(cast(ImageClassifier, create_model(name, router=router, **fields)))

    # timm registers a function under its __name__.
    build.__name__ = build.__qualname__ = entry
    build.__doc__ = model_card(name).description
    return build
