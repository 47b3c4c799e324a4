"""Attention inside the windows of an image's feature map."""
