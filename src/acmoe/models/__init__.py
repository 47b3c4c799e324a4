"""Tokens in, logits out; the routing state is threaded through the blocks."""
