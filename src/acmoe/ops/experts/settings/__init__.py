"""Settings of the expert GEMMs: which kernel runs each one, with which block sizes."""
