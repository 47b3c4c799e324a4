"""Write a summary as Markdown: figures, differences, descriptive metrics, the paper's figures."""

from collections.abc import Mapping, Sequence

from acmoe.evaluate.seeds import Spread
from acmoe.lab.study.results.chosen_rates import chosen_rates
from acmoe.lab.study.results.commands import commands_of, conditions_of
from acmoe.lab.study.results.in_short import in_short
from acmoe.lab.study.results.markdown import table
from acmoe.lab.study.results.overall import overall
from acmoe.lab.study.results.robustness import robustness_rows
from acmoe.lab.study.results.scale_effect import points_of, scale_effect
from acmoe.lab.study.results.summary import Compared, Group, Summary
from acmoe.lab.study.study import Metric


def study_markdown(summary: Summary, images: Sequence[str]) -> str:
    """Return the study's section of the page; `images` are paths relative to the page."""
    study = summary.study
    parts = [study.question, *([study.note] if study.note else [])]
    if study.declared_pairs is not None:
        parts.append(in_short(summary))
    grid = conditions_of(study)
    for group in summary.groups:
        parts.append(f"### {group.setting}")
        parts.append(_origin(summary, group, grid))
        parts.append(_figures(group, study.compared))
        if differences := summary.in_group(group):
            parts.append(_differences(differences))
        if descriptive := [m for m in study.descriptive if _measured(group, m)]:
            parts.append(_figures(group, descriptive))
        if rows := robustness_rows(study, group):
            parts.append(_robustness(summary, rows))
    if chosen := chosen_rates(summary):
        parts.append(chosen)
    if study.routing_curves:
        parts.append(_ROUTING_CURVES)
    parts += [f"![{study.name}]({image})" for image in images]
    if any(one.metric in study.primary for one in summary.comparisons):
        parts.append(_verdicts(summary))
    if whole := _overall(summary):
        parts.append(whole)
    if explained := _scale_effects(summary):
        parts.append(explained)
    if summary.failed:
        parts.append(_failures(summary))
    if study.paper:
        parts.append(_paper(summary))
    return "\n\n".join(parts) + "\n"


_ROUTING_CURVES = (
    "The figures `routing` show measures of the routing at each validation, means over the MoE "
    "layers: the standard deviation of the experts' loads, the instability of clusters from layer "
    "to layer, and the scatter of the router's inputs within clusters as a share of their whole "
    "scatter (1: the clusters' means coincide), of the inputs as they are (without M) and scaled "
    "by the router (with M). Above each panel stands the number of runs that have the measure, for "
    "each condition in the order of the legend. The records hold the measures of every layer. In "
    "all figures over training, a line is the mean and its band one standard deviation to either "
    "side, over runs or over pairs of runs: it is no interval of the mean."
)


def _robustness(summary: Summary, rows: Sequence[Sequence[str]]) -> str:
    """Show the figures on clean, corrupted and other text, with the number of runs of each."""
    labels = [metric.label for metric in summary.study.robustness]
    return (
        "Robustness, mean over runs and their number; below, the mean of paired differences in "
        "percent of the baseline, and the number of pairs:\n\n"
        + table(["condition", *labels], rows)
    )


def _origin(summary: Summary, group: Group, grid: Mapping[str, set[str]]) -> str:
    """Return commands, commit and device of a group's runs."""
    commands = commands_of(summary.study, group, grid)
    environments = [record["environment"] for record in group.records]
    commits = sorted({str(one.get("commit") or "unknown") for one in environments})
    devices = sorted({str(one.get("device")) for one in environments})
    jobs = group.jobs
    times = f" Step times are those of {group.timed_jobs} at once." if len(jobs) > 1 else ""
    return (
        f"`{'`, `'.join(commands)}`: {group.size}; commit {', '.join(commits)}; "
        f"{', '.join(devices)}, {' or '.join(map(str, jobs))} at once.{times}"
    )


def _measured(group: Group, metric: Metric) -> bool:
    return metric.is_of(group.setting) and any(
        group.by_seed(condition, metric.key) for condition in group.conditions
    )


def _figures(group: Group, metrics: Sequence[Metric]) -> str:
    shown = [metric for metric in metrics if _measured(group, metric)]
    arrows = {"lower": " (lower is better)", "higher": " (higher is better)", "neither": ""}
    header = ["condition", "n", *(metric.label + arrows[metric.better] for metric in shown)]
    rows = []
    for condition in group.conditions:
        seeds = sum(1 for name, _ in group.runs if name == condition)
        cells = [_spread(group.spread(condition, metric.key), metric) for metric in shown]
        rows.append([condition, str(seeds), *cells])
    return table(header, rows)


def _spread(spread: Spread | None, metric: Metric) -> str:
    if spread is None:
        return ""
    tail = "" if spread.std is None else f" ± {spread.std:.{metric.digits}f}"
    return f"{spread.mean:.{metric.digits}f}{tail}"


def _differences(comparisons: Sequence[Compared]) -> str:
    """Show every comparison; one with fewer pairs than declared has no test."""
    header = ["metric", "condition", "minus", "n", "difference [95 %]", "%"]
    header += ["p (t)", "Holm", "p (sign flips)", "Holm"]
    rows = []
    for one in comparisons:
        found, digits = one.difference, one.metric.digits
        tests = (found.p_t, one.holm_t, found.p_flip, one.holm_flip)
        interval = ""
        if found.low is not None and found.high is not None:
            interval = f" [{found.low:+.{digits}f}, {found.high:+.{digits}f}]"
        rows.append(
            [
                one.metric.label,
                one.condition,
                one.baseline,
                one.pairs,
                f"{found.mean:+.{digits}f}{interval}",
                "" if one.relative is None else f"{one.relative:+.2f}",
                *(_p(p) if one.tested else "" for p in tests),
            ]
        )
    return table(header, rows)


def _p(p: float | None) -> str:
    if p is None:
        return ""
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"


def _verdicts(summary: Summary) -> str:
    """Say which comparisons in the primary metrics are significant after the correction."""
    verdicts = [_verdict(summary, metric) for metric in summary.study.primary]
    return (
        f"{' '.join(verdicts)} Pairs share a seed: the same data in the same order, and the same "
        "first weights wherever shapes agree. The sign-flip test cannot give less than 2 / 2^n."
    )


def _verdict(summary: Summary, primary: Metric) -> str:
    all_of_them = [one for one in summary.comparisons if one.metric == primary]
    family = [one for one in all_of_them if one.tested]
    if not all_of_them:
        return f"There is no comparison in {primary.label} yet."
    untested = len(all_of_them) - len(family)
    diverged = ", or lost pairs to divergence," if any(one.lost for one in all_of_them) else ","
    missing = (
        f"{untested} of {len(all_of_them)} {_comparisons(len(all_of_them))} in {primary.label} "
        f"{'has' if untested == 1 else 'have'} fewer pairs than declared, or fewer than "
        f"three{diverged} and no test; an interval of such pairs describes them alone, and decides "
        "nothing."
    )
    if not family:
        return missing
    significant = [one for one in family if one.holm_t is not None and one.holm_t < 0.05]
    names = {"lower": ("better", "worse"), "higher": ("worse", "better")}
    low, high = names.get(primary.better, ("lower", "higher"))
    verdicts = [
        f"{one.condition} is {low if one.difference.mean < 0 else high} than {one.baseline} "
        f"({one.group})"
        for one in significant
    ]
    listed = "; ".join(verdicts) if verdicts else "none"
    return (
        f"{len(family)} {_comparisons(len(family))} in {primary.label} "
        f"{'was' if len(family) == 1 else 'were'} tested (paired t, Holm-corrected over all of "
        f"them); below 0.05: {listed}."
    ) + (f" {missing}" if untested else "")


def _comparisons(number: int) -> str:
    return "comparison" if number == 1 else "comparisons"


def _overall(summary: Summary) -> str:
    """Summarise each comparison over its settings; empty where none has two settings."""
    found = overall(summary.study, summary.groups)
    if not found:
        return ""
    rows = [
        [
            *names,
            *map(str, (seen.settings, seen.pairs, seen.above)),
            f"{seen.mean:+.2f} [{seen.low:+.2f}, {seen.high:+.2f}]",
        ]
        for names, seen in found.items()
    ]
    (metric,) = summary.study.primary
    header = ["condition", "minus", "settings", "pairs", "above 0", "% [95 %]"]
    return (
        f"All settings together, in {metric.label}: the differences of the pairs in percent of "
        "their baseline's mean, and the mean of the settings' means, every setting counting alike. "
        "The interval has the spread of pairs within settings, as if they were independent; "
        "settings of fewer than three pairs, or of equal ones, are left out. It describes, and is "
        "none of the tests above.\n\n" + table(header, rows)
    )


def _scale_effects(summary: Summary) -> str:
    """Show the effect of M's distance from the identity, by setting and over all settings."""
    points = {group.title: points_of(summary.study, group) for group in summary.groups}
    if len(points) > 1 and len(summary.study.primary) == 1:  # otherwise units differ
        points["all of them"] = [point for found in points.values() for point in found]
    rows = []
    for title, found in points.items():
        if (effect := scale_effect(found)) is not None:
            reach = f"{effect.least:.3f} to {effect.most:.3f}"
            measured = [f"{effect.slope:+.2f}", f"{effect.correlation:+.2f}", _p(effect.p)]
            rows.append([title, str(effect.runs), str(effect.blocks), reach, *measured])
    if not rows:
        return ""
    labels = " or ".join(metric.label for metric in summary.study.primary)
    header = ["setting", "runs", "blocks", "rms of log M", "% for each 0.1", "correlation", "p"]
    return (
        "Does it matter how far from the identity M is? Among the adaptive routers of a block, a "
        f"setting and a seed, the change of {labels} from the plain router, in percent, against "
        "the rms of log M; p by shuffling within blocks, uncorrected. The distances were not drawn "
        "by lot: routers that differ in them differ in how they come about, too.\n\n"
        + table(header, rows)
    )


def _failures(summary: Summary) -> str:
    rows = [
        [record["setting"], record["condition"], str(record["seed"]), _cell(record["error"])]
        for record in summary.failed
    ]
    return "Runs that failed, and are not among the figures:\n\n" + table(
        ["setting", "condition", "seed", "error"], rows
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _paper(summary: Summary) -> str:
    rows = [list(one) for one in summary.study.paper]
    return (
        "The paper's figures, of other data, far longer runs and no spread over seeds; for the "
        "direction, not for the size:\n\n" + table(["figure", "plain", "adaptive", "where"], rows)
    )
