"""Frozen, keyword-only config dataclasses that check their values on construction, and the
environment variables that select kernels. Uses the standard library only."""
