"""The library's evaluation transform of images as a transformers image processor.

It needs Pillow alone. Resizing, cropping and normalising are the library's own functions, so that
pixel values are bitwise those that `acmoe evaluate` computes.
"""

from typing import Any, ClassVar

import numpy as np
import torch
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature

from acmoe.config.images.data import ImageDataConfig
from acmoe.data.images.augment import normalize
from acmoe.data.images.pixels import Pixels, array_to_rgb, centre_crop, to_rgb
from acmoe.errors import check

BICUBIC = 3  # PIL.Image.Resampling.BICUBIC
FIXED = ("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb")


class AcmoeImageProcessor(PilBackend):  # type: ignore[misc]
    """RGB, shorter side to size["shortest_edge"], centre crop, then (x / 255 - mean) / std."""

    model_input_names: ClassVar[list[str]] = ["pixel_values"]
    resample = BICUBIC
    size: ClassVar[dict[str, int]] = {"shortest_edge": 256}
    crop_size: ClassVar[dict[str, int]] = {"height": 224, "width": 224}
    default_to_square = False
    image_mean: ClassVar[list[float]] = [0.485, 0.456, 0.406]
    image_std: ClassVar[list[float]] = [0.229, 0.224, 0.225]
    do_resize = True
    do_center_crop = True
    do_rescale = True
    do_normalize = True
    do_convert_rgb = True

    @classmethod
    def of(cls, data: ImageDataConfig) -> "AcmoeImageProcessor":
        """Return the evaluation transform of a run's images."""
        mean, std = data.normalization
        return cls(
            size={"shortest_edge": data.shorter_side},
            crop_size={"height": data.size, "width": data.size},
            image_mean=list(mean),
            image_std=list(std),
        )

    def process_image(self, image: Any, **kwargs: Any) -> Pixels:
        """Return one image, a Pillow image or a uint8 array (H, W, channels), as RGB (H, W, 3)."""
        if isinstance(image, torch.Tensor):
            image = image.numpy()
        if isinstance(image, np.ndarray):
            if image.ndim == 3 and image.shape[0] in (1, 3) and image.shape[-1] not in (1, 3, 4):
                image = np.moveaxis(image, 0, -1)
            return array_to_rgb(image, "the image")
        return to_rgb(image, "the image")

    def _preprocess(self, images: list[Pixels], **options: Any) -> BatchFeature:
        """Return pixel_values (B, 3, S, S) float32."""
        for name in FIXED:
            check(
                options.get(name) in (None, True),
                f"{name}={options.get(name)}; the model was evaluated with it: leave it out",
            )
        resample = options.get("resample")
        check(
            resample in (None, BICUBIC),
            f"resample={resample}; the model was evaluated with bicubic resampling (3)",
        )
        resize, crop = options["size"]["shortest_edge"], options["crop_size"]
        check(
            bool(resize) and crop["height"] == crop["width"] and resize >= crop["height"],
            f"size={options['size']}, crop_size={crop}; give a shortest_edge that is at least the "
            "side of a square crop",
        )
        cut = [centre_crop(image, resize=resize, size=crop["height"]) for image in images]
        pixels = torch.from_numpy(np.stack(cut)).permute(0, 3, 1, 2)
        values = normalize(pixels, tuple(options["image_mean"]), tuple(options["image_std"]))
        data = {"pixel_values": values.numpy()}
        return BatchFeature(data=data, tensor_type=options.get("return_tensors"))
