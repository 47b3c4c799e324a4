"""Shared parts of the benchmarks: options, clocks, progress, and reports with their tables."""
