"""The expert MLPs of one layer."""
