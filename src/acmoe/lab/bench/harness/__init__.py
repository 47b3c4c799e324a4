"""What the benchmarks share: options, clocks, progress, and reports with their tables."""
