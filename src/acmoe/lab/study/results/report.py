"""`acmoe study --summarise`: write tables and figures; equal results give equal bytes."""

import re
from pathlib import Path
from statistics import fmean, stdev

from acmoe.lab.study.results.difference_curves import difference_curve
from acmoe.lab.study.results.page import shown_figures, with_section, write_page
from acmoe.lab.study.results.plots import (
    Band,
    Bar,
    Panel,
    save_bands,
    save_bars,
    save_panels,
)
from acmoe.lab.study.results.records import read_results
from acmoe.lab.study.results.summary import Group, Summary, summarise
from acmoe.lab.study.results.tables import study_markdown
from acmoe.lab.study.study import Metric, Study


def report(study: Study, results: Path, page: Path, images: Path) -> list[Path]:
    """Write the study's section of the page and its figures; return the written files."""
    summary = summarise(study, read_results(results))
    with_section(page, study.name, "")  # raises where the page is no such page, before any drawing
    figures = draw(summary, images)
    shown = shown_figures(figures, page)
    write_page(page, study.name, study_markdown(summary, shown))
    return [page, *figures]


def draw(summary: Summary, images: Path) -> list[Path]:
    """Plot the differences in the primary metrics, and the curves of every group.

    Long studies also get the paired difference over training.
    """
    study = summary.study
    paths: list[Path] = []
    for primary in study.primary:
        paths += _differences(summary, primary, images)
    for group in summary.groups:
        bands = [_band(group, condition, study.curve) for condition in group.conditions]
        drawn = [band for band in bands if band is not None and len(band.steps) > 1]
        if drawn:
            name = _file_name(f"{study.name}-{group.title}")
            paths += save_bands(
                drawn, images, name=name, title=group.title, label=study.curve_label
            )
        if study.difference_curves:
            paths += _difference_curves(study, group, images)
        if study.routing_curves:
            paths += _routing_curves(study, group, images)
    return paths


def _difference_curves(study: Study, group: Group, images: Path) -> list[Path]:
    found = [difference_curve(group, *pair, study.curve) for pair in study.comparisons]
    bands = [band for band in found if band is not None and len(band.steps) > 1]
    if not bands:
        return []
    name = _file_name(f"{study.name}-paired-{group.title}")
    label = f"difference in {study.curve_label}, % of the baseline"
    return [*save_bands(bands, images, name=name, title=group.title, label=label, zero=True)]


# Curves of a panel with its label; a curve after the first is of the same runs, with M.
_ROUTING_PANELS = (
    ("load balance (std, points)", ("load_balance",)),
    ("instability", ("instability",)),
    ("scatter within clusters", ("within_share", "within_share_scaled")),
)


def _routing_curves(study: Study, group: Group, images: Path) -> list[Path]:
    panels = [
        Panel(
            label=label,
            rows=[[_band(group, one, name) for name in names] for one in group.conditions],
            runs=[len(group.curves(one, names[0])) for one in group.conditions],
        )
        for label, names in _ROUTING_PANELS
    ]
    if not any(any(panel.runs) for panel in panels):
        return []
    name = _file_name(f"{study.name}-routing-{group.title}")
    return [*save_panels(panels, group.conditions, images, name=name, title=group.title)]


def _differences(summary: Summary, metric: Metric, images: Path) -> list[Path]:
    bars = [
        Bar(
            label=f"{one.condition} - {one.baseline}"
            + ("" if one.tested else f" (n = {one.pairs})"),
            group=one.group,
            mean=one.difference.mean,
            low=one.difference.low,
            high=one.difference.high,
            tested=one.tested,
        )
        for one in summary.comparisons
        if one.metric == metric
    ]
    if not bars:
        return []
    name = _file_name(f"{summary.study.name}-differences {metric.setting}".strip())
    label = f"difference in {metric.label}, 95 % interval"
    if not all(bar.tested for bar in bars):
        label += "\nopen circles: too few pairs for a test"
    return [*save_bars(bars, images, name=name, label=label)]


def _file_name(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower())


def _band(group: Group, condition: str, name: str) -> Band | None:
    """Return mean and standard deviation over seeds, at the steps that all seeds have."""
    curves = [dict(curve) for curve in group.curves(condition, name)]
    if not curves:
        return None
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    columns = [[curve[step] for curve in curves] for step in steps]
    return Band(
        label=f"{condition} (n = {len(curves)})",
        steps=steps,
        means=[fmean(column) for column in columns],
        spreads=[stdev(column) if len(column) > 1 else 0.0 for column in columns],
    )
