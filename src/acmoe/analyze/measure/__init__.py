"""Measures of a routing, as pure functions of tensors, one file per question."""
