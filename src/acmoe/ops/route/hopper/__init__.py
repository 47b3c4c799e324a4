"""Kernels of the router for Hopper GPUs, written in Gluon."""
