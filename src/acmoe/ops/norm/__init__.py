"""Residual sums with layer norm."""

from acmoe.ops.norm.op import Normed, add_norm, add_norm_twice

__all__ = ["Normed", "add_norm", "add_norm_twice"]
