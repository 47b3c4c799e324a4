"""Measure speed: the layer beside baselines, the adaptive router's cost, whole training steps."""
