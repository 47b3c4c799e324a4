"""Cluster dispersion and the scale made from it."""
