"""Layers of experts: `MoE` and `SoftMoE`."""
