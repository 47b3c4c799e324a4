"""Training on several processes, by torch.distributed alone."""
