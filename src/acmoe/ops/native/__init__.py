"""Kernels in C for small calls on a CPU, compiled at their first use (source/, library.py)."""
