"""Attention to a sliding window of earlier tokens."""
