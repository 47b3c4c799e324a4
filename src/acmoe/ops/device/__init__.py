"""Device functions and launch settings that kernels of several ops share."""
