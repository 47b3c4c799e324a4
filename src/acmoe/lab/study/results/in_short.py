"""The state of a study with declared pairs: how much was run, and what it shows so far.

These sentences stand above the tables of the settings. They are written from the records, so that a
new record cannot leave an old number in the text.
"""

from statistics import fmean

from acmoe.lab.study.results.markdown import table
from acmoe.lab.study.results.summary import Compared, Group, Summary


def in_short(summary: Summary) -> str:
    """Return the number of runs and tokens, and a row for each comparison in the primary metric."""
    primary = summary.study.primary[0]
    rows = [
        _row(group, one)
        for group in summary.groups
        for one in summary.in_group(group)
        if one.metric == primary
    ]
    header = (
        *("setting", "baseline, lowest to highest seed", "condition", "pairs"),
        *("single pairs, %", "mean, % [95%]"),
    )
    return (
        f"{_amount(summary)} {_last_and_best(summary)}\n\nIn short, {primary.label}. The second "
        "column has the spread between seeds of the baseline alone, in its unit and as the "
        "highest over the lowest; the last two have the condition minus the baseline, lowest to "
        "highest pair, and their mean. Its interval has the spread of these pairs alone; a row "
        "with fewer pairs than declared, or fewer than three, has none.\n\n" + table(header, rows)
    )


def _amount(summary: Summary) -> str:
    runs = [record for group in summary.groups for record in group.records]
    tokens = sum(record["metrics"].get("tokens_trained", 0.0) for record in runs)
    amount = f", {tokens / 1e9:.1f} billion tokens of training together" if tokens >= 5e7 else ""
    return f"Runs that are done: {len(runs)}{amount}."


def _last_and_best(summary: Summary) -> str:
    """Say in how many runs the last weights, which are scored, have the best validation."""
    sign = -1 if summary.study.primary[0].better == "higher" else 1
    curves = [
        [sign * value for _, value in record["curves"].get(summary.study.curve, ())]
        for group in summary.groups
        for record in group.records
    ]
    known = [curve for curve in curves if curve]
    best = sum(min(curve) == curve[-1] for curve in known)
    return (
        f"The weights after the last update are scored; their validation is the best of the run in "
        f"{best} of {len(known)} runs."
    )


def _row(group: Group, one: Compared) -> list[str]:
    base = group.by_seed(one.baseline, one.metric.key)
    figures = group.by_seed(one.condition, one.metric.key)
    low, high = min(base.values()), max(base.values())
    digits, found = one.metric.digits, one.difference
    paired = [seed for seed in base if seed in figures]
    single = [100 * (figures[seed] / base[seed] - 1) for seed in paired]
    mean = "" if one.relative is None else f"{one.relative:+.2f}"
    if one.tested and found.low is not None and found.high is not None and one.relative is not None:
        whole = fmean(base[seed] for seed in paired)  # as in `one.relative`, which may be 0
        mean += f" [{100 * found.low / whole:+.2f}, {100 * found.high / whole:+.2f}]"
    spread = f"{low:.{digits}f}"
    if len(base) > 1:
        spread += f" to {high:.{digits}f}, {100 * (high / low - 1):.1f}%"
    ends = f"{min(single):+.2f} to {max(single):+.2f}"
    return [
        *(group.setting, f"{one.baseline} ({len(base)}): {spread}", one.condition, one.pairs),
        *(ends if len(single) > 1 else f"{single[0]:+.2f}", mean),
    ]
