"""Evaluation of image classifiers: accuracy, attacks, and the shifted sets of ImageNet."""
