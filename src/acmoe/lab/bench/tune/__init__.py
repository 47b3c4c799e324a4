"""Tune block sizes and pipelines of the expert kernels for one GPU."""
