"""Curves of the paired difference over training: its sign may change on the way."""

from statistics import fmean, stdev

from acmoe.lab.study.results.plots import Band
from acmoe.lab.study.results.summary import Group


def difference_curve(group: Group, condition: str, baseline: str, name: str) -> Band | None:
    """Return the mean paired difference in percent of the baseline, at the steps that all have.

    The band is the standard deviation over pairs, 0 for a single pair. None where no seed has a
    curve of both conditions.
    """
    pairs = [
        (dict(group.runs[condition, seed]["curves"][name]), dict(base["curves"][name]))
        for (found, seed), base in sorted(group.runs.items())
        if found == baseline
        and name in base.get("curves", {})
        and (condition, seed) in group.runs
        and name in group.runs[condition, seed].get("curves", {})
    ]
    if not pairs:
        return None
    steps = sorted(set.intersection(*(set(curve) for pair in pairs for curve in pair)))
    if any(base[step] == 0 for _, base in pairs for step in steps):
        return None  # an accuracy of 0 at the start: no percentage
    columns = [
        [100 * (curve[step] - base[step]) / base[step] for curve, base in pairs] for step in steps
    ]
    return Band(
        label=f"{condition} - {baseline} (n = {len(pairs)})",
        steps=steps,
        means=[fmean(column) for column in columns],
        spreads=[stdev(column) if len(column) > 1 else 0.0 for column in columns],
    )
