"""Studies: grids of training runs, defined in code, run in parallel, and their statistics."""
