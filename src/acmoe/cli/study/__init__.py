"""`acmoe study`: run a grid of training runs, list its cells, or summarise its results."""

from acmoe.cli.study.command import Study

__all__ = ["Study"]
