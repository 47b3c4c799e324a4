"""Measure how far clusters of tokens lie apart in each layer, with the scale M and without.

The measure is that of `acmoe analyze`: the scatter within clusters as a share of the whole scatter
of the router's inputs; 1 means that all clusters have the same mean. Without M the inputs are as
they are, with M each is scaled as its router scales it. A layer whose router has no M has the same
value for both.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from torch import Tensor

from acmoe.analyze.measure.separation import measure_separation
from acmoe.analyze.record import LayerRecord, record_language
from acmoe.config.updates import Precision
from acmoe.data.text.arrays import Tokens
from acmoe.models.text.decoder import LanguageModel

TOKENS, ROWS = 4096, 8  # as in `acmoe analyze`: the copy to the host takes milliseconds

# A token's cluster is its first expert at the previous MoE layer; names with "expert" take the
# first expert of the layer itself instead.
SEPARATION = (
    "within_share",
    "within_share_scaled",
    "within_share_expert",
    "within_share_expert_scaled",
)

LayerValues = Mapping[str, Sequence[float | None]]  # a value for each MoE layer, by measure


def layer_separation(
    model: LanguageModel, stream: Tokens, *, tokens: int, precision: Precision
) -> LayerValues:
    """Route the first tokens of a stream, at most TOKENS; return the measures of each layer.

    The measures with M are left out if no layer has an M.
    """
    count = min(TOKENS, tokens, len(stream) - 1)
    record = record_language(
        model, stream, tokens=count, batch=min(ROWS, count), precision=precision
    )
    # A model without M passes no clusters on, so they are taken from the layer before.
    clusters = [None, *(layer.first for layer in record.layers)]
    found = [separation(*one) for one in zip(record.layers, clusters, strict=False)]
    adaptive = any(layer.adaptive for layer in record.layers)
    return {
        name: [values[name] for values in found]
        for name in SEPARATION
        if adaptive or not name.endswith("_scaled")
    }


def separation_means(layers: LayerValues) -> dict[str, float]:
    """Return the mean over the layers that have a value; the first layer has no clusters yet."""
    known = {name: [v for v in values if v is not None] for name, values in layers.items()}
    return {name: fmean(values) for name, values in known.items() if values}


def separation(layer: LayerRecord, cluster_N: Tensor | None) -> dict[str, float | None]:
    """Return the measures of one layer by the names of SEPARATION; None without clusters."""

    def share(x_ND: Tensor, label_N: Tensor | None) -> float | None:
        if label_N is None:
            return None
        return measure_separation(x_ND, label_N, silhouettes=False).within_share

    found = {}
    for suffix, label_N in (("", cluster_N), ("_expert", layer.first)):
        plain = share(layer.input, label_N)
        found[f"within_share{suffix}"] = plain
        found[f"within_share{suffix}_scaled"] = (
            share(layer.scaled, label_N) if layer.adaptive else plain
        )
    return found
