"""Compute every measure of a sampled run and collect them in one object that becomes JSON."""

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
from acmoe.data.progress import Progress, silent
from acmoe.evaluate.measures import Instability


@dataclass(frozen=True, kw_only=True)
class Space:
    """Measures of a router's input, either before or after it is scaled by M."""

    by_expert: Separation  # tokens are labelled by their first expert at this layer
    # Tokens are labelled by their cluster: their first expert at the previous MoE layer.
    by_cluster: Separation
    conditioning: Conditioning


@dataclass(frozen=True, kw_only=True)
class LayerGap:
    """Difference between `batch` and `running` statistics at one layer."""

    log_scale_rms: float  # root mean square difference of log M
    moved: float  # share of tokens whose first expert differs


@dataclass(frozen=True, kw_only=True)
class LayerOverlap:
    """Agreement between the routings of the clean and the disturbed sample at one layer."""

    overlap: float  # mean share of a token's experts that both routings chose
    untouched: float | None  # the same mean over tokens that were not replaced themselves
    moved: float  # share of tokens whose first expert differs


@dataclass(frozen=True, kw_only=True)
class LayerAnalysis:
    """All measures of one MoE layer."""

    tokens: int
    adaptive: bool
    load: Load
    gate_entropy: float  # mean over tokens, in bits
    change: Instability | None  # against the previous layer; None if that routes other tokens
    plain: Space | None  # the router's input; None if it was not kept
    scaled: Space | None  # the input scaled by M
    scale: ScaleSpread | None  # None if the router uses M = I
    scale_varies: bool  # M differs between tokens of a cluster, and `scale` is of their mean
    gap: LayerGap | None
    disturbed: LayerOverlap | None


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """All measures of how a run's model routes one sample."""

    step: int | None  # optimizer step of the checkpoint; None for a model of transformers
    kind: str
    sample: str
    statistics: str
    capacity: float | None  # images: capacity factor of the experts; None: no token is dropped
    loss: float | None  # mean nats per token or image; None: the model predicts no next token
    gap_loss: float | None  # loss with `batch` statistics less that with `running` ones
    disturbance: str | None
    disturbed_loss: float | None
    silhouettes: bool  # False if scikit-learn is not installed
    load_std: Spread  # over the layers, in percentage points
    instability: Spread | None
    adjusted_rand: Spread | None
    layers: tuple[LayerAnalysis, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "layers": [_layer_json(layer) for layer in self.layers]}


def _layer_json(layer: LayerAnalysis) -> dict[str, Any]:
    """Convert a layer with `asdict`, and its named tuples to JSON objects as well."""
    found = asdict(layer)
    found["change"] = None if layer.change is None else layer.change._asdict()
    for name, space in (("plain", layer.plain), ("scaled", layer.scaled)):
        if space is not None:
            found[name]["conditioning"] = space.conditioning._asdict()
    return found


def analyze(sampled: Sampled, *, seed: int = 0, progress: Progress = silent) -> Analysis:
    """Compute all measures of a sample. `seed` selects the tokens that silhouettes use."""
    record, disturbed = sampled.own, sampled.disturbed
    silhouettes = find_spec("sklearn") is not None
    found = []
    for depth in range(len(record.layers)):
        progress("measuring MoE layers", depth, len(record.layers))
        found.append(_layer(sampled, depth, seed=seed, silhouettes=silhouettes))
    progress("measuring MoE layers", len(found), len(found))
    layers = tuple(found)
    changes = [layer.change for layer in layers if layer.change is not None]
    batch, running = (sampled.compared.get(mode) for mode in ("batch", "running"))
    return Analysis(
        step=sampled.step,
        kind=record.kind,
        sample=record.sample,
        statistics=record.statistics,
        capacity=record.capacity,
        loss=record.loss,
        gap_loss=_gap_loss(batch, running),
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

    def space(scaled: bool) -> Space | None:
        x_ND = layer.scaled if scaled else layer.input
        if len(x_ND) == 0:
            return None
        by_expert, by_cluster = (
            measure_separation(x_ND, layer.kept(label_N), seed=seed, silhouettes=silhouettes)
            for label_N in (layer.first, layer.cluster)
        )
        return Space(
            by_expert=by_expert, by_cluster=by_cluster, conditioning=condition_number(x_ND)
        )

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


def _gap_loss(batch: RoutingRecord | None, running: RoutingRecord | None) -> float | None:
    if batch is None or running is None or batch.loss is None or running.loss is None:
        return None
    return batch.loss - running.loss


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
