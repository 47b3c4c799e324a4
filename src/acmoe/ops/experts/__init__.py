"""The expert MLPs of one layer."""

from acmoe.ops.experts import op as _kernels  # noqa: F401, registers them
from acmoe.ops.experts.reference import ExpertWeights, expert_mlp

__all__ = ["ExpertWeights", "expert_mlp"]
