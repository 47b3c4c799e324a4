"""The synthetic study: a task with known clusters, its model, its grid and its cells."""
