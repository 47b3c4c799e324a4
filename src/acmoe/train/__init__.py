"""Train models: from a config to a run folder with metrics and checkpoints."""
