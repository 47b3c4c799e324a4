"""The statistics of clusters: the tokens they are taken over, their updates and their buffers.

Start with cluster.py, which has the four statistics modes. Every optimizer step updates the running
average (average.py, step.py, step_hook.py) of the layers that it trains (registry.py), with the
tokens of all processes (group.py).
"""

from acmoe.routing.statistics.average import scale_options
from acmoe.routing.statistics.cluster import ClusterStatistics, build_statistics

__all__ = ["ClusterStatistics", "build_statistics", "scale_options"]
