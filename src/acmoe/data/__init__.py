"""Data sets: text corpora, sentences, images, and synthetic Gaussian mixtures."""
