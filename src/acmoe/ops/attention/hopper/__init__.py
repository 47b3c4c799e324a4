"""Sliding-window attention for Hopper GPUs in Gluon.

forward.py holds the forward kernel, backward.py the backward pass, keys.py its dk/dv kernel.
"""
