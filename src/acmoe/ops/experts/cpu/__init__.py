"""The kernels of the experts on a CPU, and the products of the definition there."""
