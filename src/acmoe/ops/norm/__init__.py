"""Residual sums with layer norm."""
