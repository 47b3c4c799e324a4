"""The causal language models."""
