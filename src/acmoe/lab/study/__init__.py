"""The evidence as code: declared grids of runs, run side by side, and what they show."""
