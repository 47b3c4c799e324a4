"""Sliding-window attention for Hopper GPUs in Gluon.

forward.py holds the forward kernel, saved_weights.py the backward pass, keys.py its dk/dv kernel.
"""
