"""Theorem 1: the optimal weights, and the equation for alpha."""
