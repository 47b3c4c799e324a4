"""Variant statistics for the tests.

T tokens, D features, C clusters.
"""

from acmoe.lab.variants import VariantConfig, VariantStatistics


def taker(*, clusters=3, dim=4, **options):
    return VariantStatistics(VariantConfig(**options), num_clusters=clusters, dim=dim)
