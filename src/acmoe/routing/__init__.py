"""Routers map hidden states to experts. Start with adaptive.py: the paper in a hundred lines."""
