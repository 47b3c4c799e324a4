"""The benchmarks of one MoE layer: its speed, its routers and the time of the host."""
