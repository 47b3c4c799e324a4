"""Portable Triton kernels of residual addition and layer norm."""
