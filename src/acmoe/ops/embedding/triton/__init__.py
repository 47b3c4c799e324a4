"""Portable Triton kernels of the embedding's gradient."""
