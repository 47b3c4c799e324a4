"""Portable Triton kernels of the cluster statistics: dispersion, scale, running averages."""
