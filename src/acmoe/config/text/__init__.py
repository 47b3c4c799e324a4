"""Settings of language models and their runs."""
