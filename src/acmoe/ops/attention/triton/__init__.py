"""Sliding-window attention in portable Triton.

forward.py holds the forward kernel, backward.py and queries.py the backward kernels, skew.py the
layout of their (query, key) buffers.
"""
