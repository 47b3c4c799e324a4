"""The MoE layer by this library and by baselines, on shared weights, checked before it is timed."""
