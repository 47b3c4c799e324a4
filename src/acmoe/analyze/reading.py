"""Summarise an analysis in a few plain sentences and two tables."""

from __future__ import annotations

import math
from statistics import fmean

from acmoe.analyze.analysis import Analysis, LayerAnalysis

# M counts as near the identity if the rms of log M is below this: factors within about 5%.
NEAR_IDENTITY = 0.05


def read(analysis: Analysis) -> list[str]:
    """Return one sentence per question. None of them calls a router better than another."""
    found = [
        _load(analysis),
        _stability(analysis),
        _separation(analysis),
        _scale(analysis),
        _gap(analysis),
        _disturbance(analysis),
    ]
    if not analysis.silhouettes:
        found.append("no silhouettes: scikit-learn is missing, pip install 'acmoe[plots]'")
    return [sentence for sentence in found if sentence]


def _load(analysis: Analysis) -> str:
    total = sum(len(layer.load.share) for layer in analysis.layers)
    dead = sum(len(layer.load.dead) for layer in analysis.layers)
    starved = sum(len(layer.load.starved) for layer in analysis.layers)
    spread = analysis.load_std
    return (
        f"load: standard deviation over experts {spread.mean:.2f} points (mean over layers, "
        f"{spread.least:.2f} to {spread.greatest:.2f}); of {total} experts {dead} got no token, "
        f"{starved} less than a tenth of an even share"
    )


def _stability(analysis: Analysis) -> str:
    changes = [layer.change for layer in analysis.layers if layer.change is not None]
    if not changes or analysis.instability is None or analysis.adjusted_rand is None:
        return ""
    return (
        f"clusters from layer to layer: instability {analysis.instability.mean:.3f}, by chance "
        f"{fmean(change.chance for change in changes):.3f}; adjusted Rand "
        f"{analysis.adjusted_rand.mean:.3f} (1: the same clusters, 0: chance)"
    )


def _separation(analysis: Analysis) -> str:
    pairs = [
        (layer.plain.by_cluster.within_share, layer.scaled.by_cluster.within_share)
        for layer in analysis.layers
        if layer.adaptive and layer.plain is not None and layer.scaled is not None
    ]
    known = [(plain, scaled) for plain, scaled in pairs if plain is not None and scaled is not None]
    if not known:
        return ""
    plain, scaled = (100 * fmean(values) for values in zip(*known, strict=True))
    return (
        f"clusters in the router's space: {plain:.1f}% of the scatter is inside clusters, and "
        f"{scaled:.1f}% after each token is scaled by its cluster's M (100%: their means coincide)"
    )


def _scale(analysis: Analysis) -> str:
    scales = [layer.scale for layer in analysis.layers if layer.scale is not None]
    if not scales:
        return "scale: M is the identity in every layer"
    rms = fmean(scale.rms_log for scale in scales)
    near = "near the identity" if rms < NEAR_IDENTITY else "not near the identity"
    own, shared = (
        100 * fmean(getattr(scale, name) for scale in scales)
        for name in ("own_share", "feature_share")
    )
    return (
        f"scale: M is {near}, a feature is typically stretched or shrunk by a factor of "
        f"{math.exp(rms):.2f}; {shared:.0f}% of log M's variance is one weighting of the features "
        f"for all clusters, {own:.0f}% each cluster's own"
    )


def _gap(analysis: Analysis) -> str:
    gaps = [layer.gap for layer in analysis.layers if layer.gap is not None]
    if not gaps or analysis.gap_loss is None:
        return ""
    return (
        f"batch against running statistics: {100 * fmean(gap.moved for gap in gaps):.1f}% of "
        f"tokens choose another expert first, the loss differs by {analysis.gap_loss:+.4f} nats"
    )


def _disturbance(analysis: Analysis) -> str:
    found = [layer.disturbed for layer in analysis.layers if layer.disturbed is not None]
    if not found or analysis.disturbed_loss is None or analysis.loss is None:
        return ""
    shares = [one.untouched for one in found if one.untouched is not None]
    rest = f", {100 * fmean(shares):.1f}% for tokens that were not replaced" if shares else ""
    return (
        f"{analysis.disturbance}: {100 * fmean(one.overlap for one in found):.1f}% of a token's "
        f"experts stay{rest}; the loss goes from {analysis.loss:.4f} to "
        f"{analysis.disturbed_loss:.4f} nats"
    )


def routing_row(number: int, layer: LayerAnalysis) -> tuple[str, ...]:
    """Return a layer's cells in the columns ROUTING."""
    change = layer.change
    return (
        _name(number, layer),
        f"{layer.load.std:.2f}",
        str(len(layer.load.dead)),
        f"{layer.load.entropy:.2f}",
        f"{layer.gate_entropy:.2f}",
        "" if change is None else f"{change.instability:.3f}",
        "" if change is None else f"{change.chance:.3f}",
        "" if change is None else f"{change.adjusted_rand:.3f}",
    )


def space_row(number: int, layer: LayerAnalysis) -> tuple[str, ...]:
    """Return a layer's cells in the columns SPACE."""
    plain, scaled, scale = layer.plain, layer.scaled, layer.scale
    if plain is None or scaled is None:
        return (_name(number, layer), *("" for _ in SPACE[1:]))
    return (
        _name(number, layer),
        _plain_and_scaled(layer, plain.by_expert.silhouette, scaled.by_expert.silhouette, ".3f"),
        _plain_and_scaled(layer, plain.by_cluster.silhouette, scaled.by_cluster.silhouette, ".3f"),
        _plain_and_scaled(layer, plain.conditioning.number, scaled.conditioning.number, ".0e"),
        _plain_and_scaled(layer, plain.conditioning.rank, scaled.conditioning.rank, "d"),
        "" if scale is None else f"{scale.rms_log:.3f}",
        "" if scale is None else f"{100 * scale.own_share:.0f}%",
    )


ROUTING = (
    "layer",
    "std",
    "dead",
    "load bits",
    "gate bits",
    "instability",
    "chance",
    "ARI",
)
SPACE = (
    "layer",
    "silhouette, experts",
    "silhouette, clusters",
    "condition",
    "rank",
    "rms log M",
    "own",
)


def _name(number: int, layer: LayerAnalysis) -> str:
    return f"{number}{' AC' if layer.adaptive else ''}"


def _plain_and_scaled(
    layer: LayerAnalysis, plain: float | None, scaled: float | None, style: str
) -> str:
    """Format a measure before and after scaling, or once if the layer does not scale."""
    if plain is None or scaled is None:
        return ""
    before = format(plain, style)
    return f"{before} -> {format(scaled, style)}" if layer.adaptive else before
