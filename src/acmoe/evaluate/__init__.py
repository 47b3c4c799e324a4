"""Trained model -> report."""
