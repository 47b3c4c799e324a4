"""Attention to a sliding window of earlier tokens."""

from acmoe.ops.attention import op as _kernels  # noqa: F401, registers them
from acmoe.ops.attention.reference import window_attention

__all__ = ["window_attention"]
