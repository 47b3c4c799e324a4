"""Routers map hidden states to experts. Start with adaptive.py, the paper's router."""
