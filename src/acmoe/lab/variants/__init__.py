"""Variants of the adaptive router that go beyond the paper, so that each study can be run again.

Importing this package registers the router "adaptive-variant" with its config, `VariantConfig`.
24 variants were tried, and none is better than the plain router (studies/remedies.md); so the core
does not know them.

    config       the options and which of them work together
    scale        powers and parts of M
    steps        an exponent that falls to 0 during training, so that M fades to the identity
    strength     a scheduled or learned lambda
    statistics   the cluster statistics that use the three above
    tokens       statistics of tokens in front of a block's norm
    router       stretching about a cluster's mean, and a matched gate temperature
    distance     the nearest expert in M instead of the largest dot product
"""

from acmoe.config.routing import ROUTERS
from acmoe.lab.variants.config import VariantConfig, variant_of
from acmoe.lab.variants.router import VariantRouter
from acmoe.lab.variants.statistics import VariantStatistics
from acmoe.lab.variants.tokens import hand_over_tokens

ROUTERS[VariantConfig.name] = VariantConfig

__all__ = [
    "VariantConfig",
    "VariantRouter",
    "VariantStatistics",
    "hand_over_tokens",
    "variant_of",
]
