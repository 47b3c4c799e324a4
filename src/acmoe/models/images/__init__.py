"""Image classifiers: Swin-MoE and a vision transformer with SoftMoE."""
