"""Attention inside the windows of a feature map, in portable Triton."""
