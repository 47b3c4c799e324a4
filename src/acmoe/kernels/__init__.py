"""Triton kernels. Imported by ops alone, inside functions: the library works without Triton."""
