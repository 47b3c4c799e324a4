"""Frozen, keyword-only configs, checked when they are made. Standard library only."""
