"""Adversarial attacks on image classifiers of any library."""
