"""The expert MLPs of one layer."""

from acmoe.ops.experts import op as _kernels  # noqa: F401, registers them
from acmoe.ops.experts.by_parts import expert_mlp_by_parts
from acmoe.ops.experts.clamped import clamped_swiglu
from acmoe.ops.experts.reference import ExpertWeights, expert_mlp

__all__ = [
    "ExpertWeights",
    "clamped_swiglu",
    "expert_mlp",
    "expert_mlp_by_parts",
]
