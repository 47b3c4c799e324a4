"""Portable Triton kernel of cross-entropy."""
