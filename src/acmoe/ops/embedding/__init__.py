"""Embedding lookup with a deterministic gradient."""
