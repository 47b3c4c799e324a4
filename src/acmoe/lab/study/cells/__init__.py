"""Run one cell: train its model, score it, and collect its figures."""
