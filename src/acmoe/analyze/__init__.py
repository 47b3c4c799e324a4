"""Record, measure and draw what the routers of a trained run do.

This is the only package that draws figures.
"""
