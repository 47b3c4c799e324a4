"""The kernels of the experts on a CPU, and products that the definition makes there, too."""
