"""Rows of a table of robustness: every figure has its own number of runs.

Records that were written before a figure was added do not have it; others of their condition may.
"""

from statistics import fmean

from acmoe.evaluate.seeds import paired_difference
from acmoe.lab.study.results.summary import Group
from acmoe.lab.study.study import Metric, Study

MISSING = "not recorded"


def robustness_rows(study: Study, group: Group) -> list[list[str]]:
    """Return a row for each condition and each comparison.

    The first metric of `study.robustness` is the figure on clean text. Return no rows if no other
    figure is known.
    """
    metrics = study.robustness
    if not any(group.by_seed(name, m.key) for name in group.conditions for m in metrics[1:]):
        return []
    figures = [
        [condition, *(_figure(group, condition, metric) for metric in metrics)]
        for condition in group.conditions
    ]
    pairs = [pair for pair in study.comparisons if set(pair) <= set(group.conditions)]
    return figures + [
        [f"{condition} minus {baseline}", *(_pair(group, condition, baseline, m) for m in metrics)]
        for condition, baseline in pairs
    ]


def _figure(group: Group, condition: str, metric: Metric) -> str:
    spread = group.spread(condition, metric.key)
    if spread is None:
        return MISSING
    tail = "" if spread.std is None else f" ± {spread.std:.{metric.digits}f}"
    return f"{spread.mean:.{metric.digits}f}{tail} ({spread.n})"


def _pair(group: Group, condition: str, baseline: str, metric: Metric) -> str:
    figures, base = (group.by_seed(name, metric.key) for name in (condition, baseline))
    difference = paired_difference(figures, base)
    if difference is None:
        return MISSING
    whole = fmean(base[seed] for seed in base if seed in figures)
    return f"{100 * difference.mean / whole:+.2f}% ({difference.n})"
