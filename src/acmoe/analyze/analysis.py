"""Every measure of a sampled run in one place, ready to be written as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from acmoe.analyze.measure.change import cluster_change, moved, overlap
from acmoe.analyze.measure.conditioning import Conditioning, condition_number
from acmoe.analyze.measure.load import Load, Spread, gate_entropy, measure_load, over_layers
from acmoe.analyze.measure.scale import ScaleSpread, log_distance, measure_scale
from acmoe.analyze.measure.separation import Separation, measure_separation
from acmoe.analyze.record import LayerRecord, RoutingRecord
from acmoe.analyze.sampling import Disturbed, Sampled
from acmoe.evaluate.measures import Instability


@dataclass(frozen=True, kw_only=True)
class Space:
    """The router's input, plain or as it was read."""

    by_expert: Separation  # tokens labelled by this layer's first choice
    by_cluster: Separation  # by the first choice at the layer before, whose scale they are read in
    conditioning: Conditioning


@dataclass(frozen=True, kw_only=True)
class LayerGap:
    """A layer in `batch` statistics beside the same layer in `running` ones."""

    log_scale_rms: float  # root mean square difference of log M
    moved: float  # share of tokens with another first choice


@dataclass(frozen=True, kw_only=True)
class LayerOverlap:
    """A layer on the clean sample beside the disturbed one."""

    overlap: float  # mean share of a token's experts that stay
    untouched: float | None  # the same over tokens that were not replaced themselves
    moved: float  # share of tokens with another first choice


@dataclass(frozen=True, kw_only=True)
class LayerAnalysis:
    """One MoE layer."""

    tokens: int
    adaptive: bool
    load: Load
    gate_entropy: float  # mean over tokens, in bits
    change: Instability | None  # against the layer before; None: it had other tokens
    plain: Space
    scaled: Space
    scale: ScaleSpread | None  # None: the router reads in M = I
    scale_varies: bool  # inside a cluster; the scale is then the mean over its tokens
    gap: LayerGap | None
    disturbed: LayerOverlap | None


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """How a run's model routes a stated sample."""

    step: int  # of the checkpoint
    kind: str
    sample: str
    statistics: str
    loss: float  # mean nats per token or image of the sample
    gap_loss: float | None  # loss with `batch` statistics less that with `running` ones
    disturbance: str | None
    disturbed_loss: float | None
    silhouettes: bool  # False: scikit-learn is not installed
    load_std: Spread  # over the layers, in points
    instability: Spread | None
    adjusted_rand: Spread | None
    layers: tuple[LayerAnalysis, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "layers": [_layer_json(layer) for layer in self.layers]}


def _layer_json(layer: LayerAnalysis) -> dict[str, Any]:
    """`asdict`, with named tuples as objects too."""
    found = asdict(layer)
    found["change"] = None if layer.change is None else layer.change._asdict()
    for name, space in (("plain", layer.plain), ("scaled", layer.scaled)):
        found[name]["conditioning"] = space.conditioning._asdict()
    return found


def analyze(sampled: Sampled, *, seed: int = 0) -> Analysis:
    """Measure a sample; `seed` draws the tokens of the silhouettes."""
    record, disturbed = sampled.own, sampled.disturbed
    silhouettes = find_spec("sklearn") is not None
    layers = tuple(
        _layer(sampled, depth, seed=seed, silhouettes=silhouettes)
        for depth in range(len(record.layers))
    )
    changes = [layer.change for layer in layers if layer.change is not None]
    batch, running = (sampled.compared.get(mode) for mode in ("batch", "running"))
    return Analysis(
        step=sampled.step,
        kind=record.kind,
        sample=record.sample,
        statistics=record.statistics,
        loss=record.loss,
        gap_loss=None if batch is None or running is None else batch.loss - running.loss,
        disturbance=None if disturbed is None else disturbed.how,
        disturbed_loss=None if disturbed is None else disturbed.record.loss,
        silhouettes=silhouettes,
        load_std=over_layers([layer.load.std for layer in layers]),
        instability=over_layers([change.instability for change in changes]) if changes else None,
        adjusted_rand=over_layers([change.adjusted_rand for change in changes])
        if changes
        else None,
        layers=layers,
    )


def _layer(sampled: Sampled, depth: int, *, seed: int, silhouettes: bool) -> LayerAnalysis:
    record, layer = sampled.own, sampled.own.layers[depth]

    def space(scaled: bool) -> Space:
        x_ND = layer.scaled if scaled else layer.input
        apart = [
            measure_separation(x_ND, label_N, seed=seed, silhouettes=silhouettes)
            for label_N in (layer.first, layer.cluster)
        ]
        return Space(by_expert=apart[0], by_cluster=apart[1], conditioning=condition_number(x_ND))

    plain = space(False)
    change = None
    if record.same_tokens(depth):
        before_N = record.layers[depth - 1].first
        change = cluster_change(before_N, layer.first, layer.num_experts)
    return LayerAnalysis(
        tokens=len(layer.cluster),
        adaptive=layer.adaptive,
        load=measure_load(layer.expert_ids, layer.num_experts),
        gate_entropy=gate_entropy(layer.affinity),
        change=change,
        plain=plain,
        scaled=space(True) if layer.adaptive else plain,
        scale=_scale(layer),
        scale_varies=layer.scale_varies,
        gap=_gap(sampled.compared, depth),
        disturbed=None if sampled.disturbed is None else _overlap(layer, sampled.disturbed, depth),
    )


def _scale(layer: LayerRecord) -> ScaleSpread | None:
    seen_C = layer.clusters_seen()
    return measure_scale(layer.scale[seen_C]) if layer.adaptive and bool(seen_C.any()) else None


def _gap(compared: dict[str, RoutingRecord], depth: int) -> LayerGap | None:
    if not compared:
        return None
    batch, running = compared["batch"].layers[depth], compared["running"].layers[depth]
    both_C = batch.clusters_seen() & running.clusters_seen()
    if not batch.adaptive or not bool(both_C.any()):
        return None
    return LayerGap(
        log_scale_rms=log_distance(batch.scale[both_C], running.scale[both_C]),
        moved=moved(batch.first, running.first),
    )


def _overlap(layer: LayerRecord, disturbed: Disturbed, depth: int) -> LayerOverlap:
    other = disturbed.record.layers[depth]
    overlap_N = overlap(layer.expert_ids, other.expert_ids, layer.num_experts)
    untouched = None
    if disturbed.touched is not None and not bool(disturbed.touched.all()):
        untouched = float(overlap_N[~disturbed.touched].mean())
    return LayerOverlap(
        overlap=float(overlap_N.mean()),
        untouched=untouched,
        moved=moved(layer.first, other.first),
    )
