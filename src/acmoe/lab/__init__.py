"""The laboratory: benchmarks, studies and theory checks. Only the command line imports it."""
