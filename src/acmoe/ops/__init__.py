"""Tensor functions: the mathematics of adaptive clustering, without modules or state."""
