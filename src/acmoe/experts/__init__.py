"""Tokens and a routing in, expert outputs out."""
