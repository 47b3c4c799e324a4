"""Measure speed: the layer beside baselines, the adaptive router's cost, whole training steps.

The benchmarks are in layers/ and models/, what they share in harness/, and the baselines in
implementations/. tune/ finds the fastest settings of the kernels.
"""
