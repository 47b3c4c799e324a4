"""Proposition 2: condition numbers of a router's loss."""
