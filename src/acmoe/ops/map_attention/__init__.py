"""Attention inside the windows of an image's feature map."""

from acmoe.ops.map_attention import op as _kernels  # noqa: F401, registers them
from acmoe.ops.map_attention.reference import map_attention

__all__ = ["map_attention"]
