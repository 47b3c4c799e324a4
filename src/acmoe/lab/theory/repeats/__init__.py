"""Measure how often Eqn. 8 repeats the assignment that picked its metric."""
