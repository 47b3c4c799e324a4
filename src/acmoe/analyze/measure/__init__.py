"""What a routing looks like, as pure functions of tensors; one file for each question."""
