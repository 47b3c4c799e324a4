"""Evaluation of trained models: perplexity, accuracy, robustness, and routing measures."""
