"""Device functions and launches that kernels of several ops share."""
