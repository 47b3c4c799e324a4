"""Portable Triton kernels of the fused router (forward and backward)."""
