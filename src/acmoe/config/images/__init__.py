"""Settings of image classifiers and their runs."""
