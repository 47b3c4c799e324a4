"""The routing of the tokens that the page shows, layer by layer, as values that JSON can hold.

N tokens or patches shown, E experts, K experts per token, C clusters, D features.
"""

import math
from collections.abc import Sequence
from typing import TypedDict, cast

from torch import Tensor

from acmoe.analyze.record import LayerRecord

MOST_STRETCHED = 6  # features listed per cluster
PER_TOKEN = ("first", "ids", "gate", "affinity", "cluster")  # fields with one entry per token


class ShownLayer(TypedDict):
    """Routing of the shown tokens at one MoE layer, and what M does there."""

    adaptive: bool
    experts: int  # E
    grid: tuple[int, int] | None  # patches: rows and columns of an image
    first: list[int]  # (N,) first expert
    ids: list[list[int]]  # (N, K); E: no expert
    gate: list[list[float]]  # (N, K)
    affinity: list[list[float]]  # (N, E)
    cluster: list[int]  # (N,) cluster whose M scales the token; -1: none
    varies: bool  # M differs between tokens of a cluster
    deviation: float  # root mean square of ln M
    features: int  # D
    stretched: list[list[tuple[int, float]]]  # (C,) lists of (feature, scale), largest first


def shown_layer(layer: LayerRecord, count: int) -> ShownLayer:
    """Return the routing of a layer's first `count` tokens, and each cluster's largest scales."""
    return {
        "adaptive": layer.adaptive,
        "experts": layer.num_experts,
        "grid": layer.grid,
        "first": layer.first[:count].tolist(),
        "ids": layer.expert_ids[:count].tolist(),
        "gate": _rounded(layer.gate[:count]),
        "affinity": _rounded(layer.affinity[:count]),
        "cluster": layer.cluster[:count].tolist(),
        "varies": layer.scale_varies,
        "deviation": _deviation(layer),
        "features": layer.scale.shape[1],
        "stretched": [_stretched(scale_D) for scale_D in layer.scale],
    }


def fewer_tokens(layer: ShownLayer, count: int) -> ShownLayer:
    """Return the layer with its first `count` tokens."""
    fields = {name: v[:count] if name in PER_TOKEN else v for name, v in layer.items()}  # type: ignore[index]
    return cast(ShownLayer, fields)


def _deviation(layer: LayerRecord) -> float:
    """Return the root mean square of ln M over the clusters with tokens: M's distance from I.

    At 0.1, features are stretched or shrunk by about a tenth.
    """
    used_C = layer.clusters_seen()
    if not bool(used_C.any()):
        return 0.0
    return round(math.sqrt(float(layer.scale[used_C].double().log().square().mean())), 4)


def _stretched(scale_D: Tensor) -> list[tuple[int, float]]:
    """Return (feature, scale) pairs in descending order of the scale, or none if M = I."""
    if bool((scale_D == 1).all()):
        return []
    top = scale_D.topk(min(MOST_STRETCHED, len(scale_D)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [(feature, round(scale, 3)) for feature, scale in pairs]


def _rounded(values_NX: Tensor) -> list[list[float]]:
    rows: Sequence[Sequence[float]] = values_NX.double().tolist()
    return [[round(value, 3) for value in row] for row in rows]
