"""Draw every figure for which a sampled run has the numbers.

N tokens, B images, Y rows and X columns of patches, M MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from acmoe.analyze.analysis import Analysis
from acmoe.analyze.figures.attack_changes import save_changed_patches, save_changed_text
from acmoe.analyze.figures.colored_text import save_colored_text
from acmoe.analyze.figures.convergence import save_curves
from acmoe.analyze.figures.instability import save_instability
from acmoe.analyze.figures.load import save_load
from acmoe.analyze.figures.patches import save_patches
from acmoe.analyze.figures.pgd import save_pgd
from acmoe.analyze.figures.scale_map import save_scale_map
from acmoe.analyze.figures.tsne import save_tsne
from acmoe.analyze.measure.scale import LEAST
from acmoe.analyze.record import LayerRecord, RoutingRecord
from acmoe.analyze.sampling import Disturbed, HuggingFaceModel, Sampled
from acmoe.data.progress import Progress, silent
from acmoe.data.text.vocabulary import ByteVocabulary, Vocabulary
from acmoe.errors import check
from acmoe.evaluate.run import ATTACKS, ImageRun, Run, read_json
from acmoe.evaluate.validation import metric_in

TEXT_TOKENS = 400  # tokens on a page
SHOWN_IMAGES = 6
SHOWN_LAYERS = 3  # first, middle and last

Paths = tuple[Path, ...]


def save_figures(
    sampled: Sampled,
    analysis: Analysis,
    folder: Path,
    *,
    seed: int = 0,
    progress: Progress = silent,
) -> list[Path]:
    """Write each figure as PNG and SVG, and return the paths.

    A figure is left out where the run lacks its numbers, such as the results of an attack.
    """
    run = sampled.run
    steps: list[Callable[[], Sequence[Path]]]
    if isinstance(run, HuggingFaceModel):
        pieces, name = run.pieces, run.name
        steps = _routing(sampled, analysis, folder, run.router, name, seed)
        if pieces:  # a token may hold spaces and parts of words, so that no gap is added
            steps += [lambda: _pages(sampled.own, pieces[:TEXT_TOKENS], folder, name, 0)]
        return _drawn(steps, progress)
    own_run, router = run, run.config.model.router.name
    where = f"{run.folder.name}, step {sampled.step}"
    steps = [lambda: _convergence(own_run, folder, router, where)]
    steps += _routing(sampled, analysis, folder, router, where, seed)
    if isinstance(run, Run):
        vocabulary = run.vocabulary()
        steps += [lambda: _text(sampled, vocabulary, folder, where)]
    else:
        images_run = run
        steps += [lambda: _images(sampled, folder, where)]
        steps += [lambda: _sweep(images_run, sampled.step, folder, router, where)]
    return _drawn(steps, progress)


def _drawn(steps: Sequence[Callable[[], Sequence[Path]]], progress: Progress) -> list[Path]:
    """Draw one figure after another; return what was written."""
    paths: list[Path] = []
    for done, draw in enumerate(steps):
        progress("drawing figures", done, len(steps))
        paths += draw()
    progress("drawing figures", len(steps), len(steps))
    return paths


def _routing(
    sampled: Sampled, analysis: Analysis, folder: Path, router: str, where: str, seed: int
) -> list[Callable[[], Sequence[Path]]]:
    """Return the figures that every model has, to be drawn: load, instability, inputs, scale."""
    load = {router: [layer.load.share for layer in analysis.layers]}
    sizes = sorted({len(share) for share in load[router]})
    check(
        len(sizes) == 1,
        f"the MoE layers of {where} have {', '.join(map(str, sizes))} experts, and a figure has "
        "one row of experts for all; analysis.json holds each",
    )
    return [
        lambda: save_load(load, folder, title=f"Load: {where}"),
        lambda: _instability(analysis, folder, router, where),
        lambda: _tsne(sampled.own, folder, where, seed),
        lambda: _scale_maps(sampled.own, folder, where),
    ]


def _convergence(run: Run | ImageRun, folder: Path, router: str, where: str) -> Paths:
    records = run.metrics("valid")
    metric = metric_in(records)
    if metric is None:
        return ()
    held = [one for one in records if metric.key in one]
    curve = ([one["step"] for one in held], [one[metric.key] for one in held])
    return save_curves({router: curve}, folder, metric=metric.label, title=f"Training: {where}")


def _instability(analysis: Analysis, folder: Path, router: str, where: str) -> Paths:
    bars = [
        None if layer.change is None else (layer.change.instability, layer.change.chance)
        for layer in analysis.layers
    ]
    if not any(bars):
        return ()
    return save_instability({router: bars}, folder, title=f"Instability: {where}")


def _tsne(record: RoutingRecord, folder: Path, where: str, seed: int) -> Paths:
    """Draw the last adaptive layer before and after scaling, or the last layer if none is.

    Only layers whose input was kept count.
    """
    kept = [depth for depth, layer in enumerate(record.layers) if len(layer.input) > 0]
    if not kept:
        return ()
    depth = max([one for one in kept if record.layers[one].adaptive] or kept)
    layer = record.layers[depth]
    first_S = layer.kept(layer.first)
    panels: dict[str, tuple[Tensor, Tensor]] = {"router input": (layer.input, first_S)}
    if layer.adaptive:
        panels["as read, scaled by M"] = (layer.scaled, first_S)
    title = f"Router inputs by first choice, MoE layer {depth + 1}: {where}"
    return save_tsne(panels, folder, num_experts=layer.num_experts, title=title, seed=seed)


def _scale_maps(record: RoutingRecord, folder: Path, where: str) -> Paths:
    paths: Paths = ()
    for depth, layer in enumerate(record.layers):
        seen_C = layer.clusters_seen()
        if layer.adaptive and bool(seen_C.any()):
            title = f"Scale read by MoE layer {depth + 1}: {where}"
            scale_CD = layer.scale[seen_C].clamp(min=LEAST)
            paths += save_scale_map(
                scale_CD,
                folder,
                title=title,
                clusters=seen_C.nonzero()[:, 0],
                name=f"scale_map_{depth + 1}",
            )
    return paths


def _text(sampled: Sampled, vocabulary: Vocabulary, folder: Path, where: str) -> Paths:
    record, disturbed = sampled.own, sampled.disturbed
    tokens, gap = _symbols(record, vocabulary), 0 if vocabulary.kind == "bytes" else 1
    experts = record.layers[0].num_experts
    paths: Paths = _pages(record, tokens, folder, where, gap)
    if disturbed is not None:
        last, other = record.layers[-1], disturbed.record.layers[-1]
        paths += save_changed_text(
            (tokens, _symbols(disturbed.record, vocabulary)),
            (last.first[:TEXT_TOKENS], other.first[:TEXT_TOKENS]),
            folder,
            num_experts=experts,
            title=f"{disturbed.how}, last MoE layer: {where}",
            gap=gap,
        )
    return paths


def _pages(
    record: RoutingRecord, tokens: Sequence[str | bytes], folder: Path, where: str, gap: int
) -> Paths:
    pages = {
        f"MoE layer {depth + 1}": record.layers[depth].first[:TEXT_TOKENS]
        for depth in _shown_layers(len(record.layers))
    }
    return save_colored_text(
        tokens,
        pages,
        folder,
        num_experts=max(layer.num_experts for layer in record.layers),
        title=f"First choices: {where}",
        gap=gap,
    )


def _symbols(record: RoutingRecord, vocabulary: Vocabulary) -> Sequence[str | bytes]:
    assert record.token_ids is not None
    ids = record.token_ids[:TEXT_TOKENS].tolist()
    if isinstance(vocabulary, ByteVocabulary):
        return [bytes([value]) for value in vocabulary.decode_bytes(ids)]
    return ["\n" if one == vocabulary.eos_id else vocabulary.symbols[one] for one in ids]


def _images(sampled: Sampled, folder: Path, where: str) -> Paths:
    record, disturbed = sampled.own, sampled.disturbed
    assert record.pixels is not None
    maps = {
        f"MoE layer {depth + 1}": _first_choices(record.layers[depth])
        for depth in _shown_layers(len(record.layers))
    }
    paths: Paths = save_patches(
        record.pixels[:SHOWN_IMAGES].clamp(0, 1),
        maps,
        folder,
        num_experts=record.layers[0].num_experts,
        title=f"First choices: {where}",
        captions=_captions(record),
    )
    if disturbed is not None:
        paths += _changed_patches(record, disturbed, folder, where)
    return paths


def _changed_patches(
    record: RoutingRecord, disturbed: Disturbed, folder: Path, where: str
) -> Paths:
    """Draw the last of the layers with the most patches, which show best what moved."""
    other = disturbed.record
    assert record.pixels is not None
    assert other.pixels is not None
    finest = max(len(layer.cluster) for layer in record.layers)
    depth = max(d for d, layer in enumerate(record.layers) if len(layer.cluster) == finest)
    return save_changed_patches(
        (record.pixels[:SHOWN_IMAGES].clamp(0, 1), other.pixels[:SHOWN_IMAGES]),
        (_first_choices(record.layers[depth]), _first_choices(other.layers[depth])),
        folder,
        num_experts=record.layers[depth].num_experts,
        title=f"{disturbed.how}, MoE layer {depth + 1}: {where}",
        captions=_captions(other),
    )


def _captions(record: RoutingRecord) -> list[str]:
    assert record.labels is not None
    assert record.predicted is not None
    pairs = zip(record.labels.tolist(), record.predicted.tolist(), strict=True)
    return [f"class {label}, said {said}" for label, said in list(pairs)[:SHOWN_IMAGES]]


def _first_choices(layer: LayerRecord) -> Tensor:
    """Return the first expert of every patch of the images shown, (B, Y, X)."""
    assert layer.grid is not None
    return layer.first.view(-1, *layer.grid)[:SHOWN_IMAGES]


def _shown_layers(layers: int) -> list[int]:
    return sorted({round(depth) for depth in torch.linspace(0, layers - 1, SHOWN_LAYERS).tolist()})


def _sweep(run: ImageRun, step: int | None, folder: Path, router: str, where: str) -> Paths:
    """Draw the PGD report with the most radii among those `acmoe attack` wrote for this run."""
    reports = [read_json(path) for path in (run.folder / ATTACKS).glob("report-pgd-*.json")]
    reports = [report for report in reports if report["step"] == step]
    if not reports:
        return ()
    report = max(reports, key=lambda one: len(one["figures"]))
    figures = sorted(report["figures"], key=lambda one: float(one["eps"]))
    budgets = [0.0, *(one["eps"] for one in figures)]
    sweeps = {"top-1": {router: (budgets, [report["clean_top1"], *(f["top1"] for f in figures)])}}
    if report["clean_top5"] is not None:
        percents = [report["clean_top5"], *(f["top5"] for f in figures)]
        sweeps["top-5"] = {router: (budgets, percents)}
    title = f"PGD in {report['space']} space, {report['images']:,} images: {where}"
    return save_pgd(sweeps, folder, title=title, space=report["space"])
