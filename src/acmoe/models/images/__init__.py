"""The image classifiers."""
