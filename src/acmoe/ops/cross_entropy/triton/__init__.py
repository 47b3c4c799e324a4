"""Portable Triton kernels."""
