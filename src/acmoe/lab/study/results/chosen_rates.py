"""Compare conditions, each at the learning rate that is best for it on the validation text.

A rate that suits the plain router may not suit the adaptive one. The choice reads the last
validation alone, as the mean over the seeds that the condition has at every rate; the comparison
then reads the test figures.
"""

import math
from statistics import fmean

from acmoe.evaluate.seeds import paired_difference
from acmoe.lab.study.results.markdown import table
from acmoe.lab.study.results.summary import Group, Summary

VALID = "valid"  # the last validation figure of a run


def chosen_rates(summary: Summary) -> str:
    """Return the choice and the comparisons in Markdown; empty if no condition has every rate."""
    study = summary.study
    groups = {group.setting: group for group in summary.groups if group.setting in study.rates}
    sizes = {group.size for group in groups.values()}
    if len(groups) < max(2, len(study.rates)) or len(sizes) > 1:
        return ""
    ordered = [groups[setting] for setting in study.rates]
    means = {name: _means(ordered, name) for name in ordered[0].conditions}
    known = {name: values for name, values in means.items() if values}
    if not known:
        return ""
    rates = list(study.rates.values())
    best = {name: min(range(len(rates)), key=values.__getitem__) for name, values in known.items()}
    header = ["condition", "seeds", *(f"validation at {rate:g}" for rate in rates), "chosen"]
    rows = [
        [
            name,
            " ".join(map(str, _seeds(ordered, name))),
            *("diverged" if math.isinf(value) else _figure(summary, value) for value in values),
            f"{rates[best[name]]:g}{_edge(best[name], len(rates))}",
        ]
        for name, values in known.items()
    ]
    return "\n\n".join(
        [
            "The learning rate, chosen for each condition: the one of the best last validation, "
            "as the mean over the seeds that the condition has at every rate.",
            table(header, rows),
            *_compared(summary, ordered, best),
        ]
    )


def _seeds(groups: list[Group], condition: str) -> list[int]:
    """Return the seeds that a condition has at every rate."""
    return sorted(
        set.intersection(
            *({seed for name, seed in group.runs if name == condition} for group in groups)
        )
    )


def _means(groups: list[Group], condition: str) -> list[float]:
    """Return the mean validation at each rate; infinite where a run diverged and has none."""
    seeds = _seeds(groups, condition)
    if not seeds:
        return []
    return [
        fmean(group.by_seed(condition, VALID).get(seed, math.inf) for seed in seeds)
        for group in groups
    ]


def _figure(summary: Summary, value: float) -> str:
    return f"{value:.{summary.study.primary[0].digits}f}"


def _edge(place: int, rates: int) -> str:
    """Warn where the best rate is the first or the last: a better one may lie beyond."""
    return ", at the edge of the range" if place in (0, rates - 1) else ""


def _compared(summary: Summary, groups: list[Group], best: dict[str, int]) -> list[str]:
    study, metric = summary.study, summary.study.primary[0]
    rates = list(study.rates.values())
    rows = []
    for condition, baseline in study.comparisons:
        if condition not in best or baseline not in best:
            continue
        figures, base = (
            groups[best[name]].by_seed(name, metric.key) for name in (condition, baseline)
        )
        found = paired_difference(figures, base)
        if found is None:
            continue
        whole = fmean(base[seed] for seed in base if seed in figures)
        interval, pairs = "", str(found.n)
        if study.declared_pairs is not None and found.n < study.declared_pairs:
            pairs = f"{found.n} of {study.declared_pairs}"
        elif found.low is not None and found.high is not None:
            interval = f" [{100 * found.low / whole:+.2f}, {100 * found.high / whole:+.2f}]"
        names = [f"{name} at {rates[best[name]]:g}" for name in (condition, baseline)]
        rows.append([*names, pairs, f"{100 * found.mean / whole:+.2f}{interval}"])
    if not rows:
        return []
    return [
        f"Each condition at its chosen rate, {metric.label}, paired by seed. A row with fewer "
        "pairs than declared has no interval and no verdict:",
        table(["condition", "minus", "n", "% [95%]"], rows),
    ]
