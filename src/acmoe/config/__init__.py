"""Frozen, keyword-only configs, checked when they are made, and what the environment may ask of
kernels. Standard library only."""
