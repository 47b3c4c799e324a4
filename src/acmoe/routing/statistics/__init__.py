"""The statistics of clusters: which tokens they have, when they move, and where they are kept.

Start with cluster.py, which has the four statistics modes. The running average (average.py) moves
after each optimizer step (step.py, step_hook.py), with the tokens of all processes (group.py).
"""

from acmoe.routing.statistics.average import scale_options
from acmoe.routing.statistics.cluster import ClusterStatistics, build_statistics

__all__ = ["ClusterStatistics", "build_statistics", "scale_options"]
