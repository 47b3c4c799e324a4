"""Write sentences that say what the page's figures show and what they cannot show."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from acmoe.analyze.reading import NEAR_IDENTITY
from acmoe.evaluate.seeds import FEWEST_PAIRS
from acmoe.report.compare import Paired, paired
from acmoe.report.groups import groups
from acmoe.report.routing import RunRouting
from acmoe.report.runs import RunFacts

FEW_SEEDS = 5


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Sentences about a page: `shows` states its results, `cannot` their limits."""

    shows: tuple[str, ...]
    cannot: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"shows": self.shows, "cannot": self.cannot}


def read_figures(runs: Sequence[RunFacts], routings: Sequence[RunRouting | str]) -> Reading:
    """Write all sentences of a page."""
    pairs = paired(runs)
    shows = [_pair_sentence(pair) for pair in pairs]
    for run, routing in zip(runs, routings, strict=True):
        if isinstance(routing, RunRouting):
            shows += _routing_sentences(run, routing)
    if not shows:
        shows = ["Nothing that can be compared has been measured yet."]
    return Reading(shows=tuple(shows), cannot=tuple(_limits(runs, routings, pairs)))


def _pair_sentence(pair: Paired) -> str:
    percent, count = pair.percent, len(pair.seeds)
    share = "" if percent is None else f" ({percent:+.2g}%)"
    change = f"{pair.second} minus {pair.first} is {pair.difference:+.4g} {pair.metric}{share}"
    if count == 1:
        return (
            f"{change} with one seed ({pair.seeds[0]}). One seed does not show how much results "
            "vary by chance, so this is no evidence for either."
        )
    means = (
        f"{pair.first} has mean {pair.first_mean:.4g} and standard deviation "
        f"{pair.first_spread:.2g}, {pair.second} {pair.second_mean:.4g} and "
        f"{pair.second_spread:.2g}."
    )
    if pair.low is None:
        why = f"{FEWEST_PAIRS} seeds are the fewest that give a confidence interval"
        if count >= FEWEST_PAIRS:
            why = "The difference is the same for every seed, so that no interval can be computed"
        return f"{change} on average over {count} seeds. {means} {why}."
    interval = f"{pair.low:+.4g} to {pair.high:+.4g}"
    measured = (
        f"{change} on average over {count} seeds, with a 95% confidence interval of {interval} "
        f"(paired t). {means}"
    )
    if not pair.told_from_chance:
        return f"{measured} The interval contains zero: these runs show no difference."
    few = ""
    if count < FEW_SEEDS:
        few = (
            f" With fewer than {FEW_SEEDS} seeds this relies on the differences being normally "
            "distributed."
        )
    better = pair.second if (pair.difference < 0) == pair.lower else pair.first
    return (
        f"{measured} The interval excludes zero: {better} is better, for this configuration and "
        f"length of training.{few}"
    )


def _routing_sentences(run: RunFacts, routing: RunRouting) -> list[str]:
    found = []
    measures = routing.measures
    heaviest = max(range(len(measures)), key=lambda depth: max(measures[depth]["load"]))
    load = measures[heaviest]["load"]
    experts = sum(len(one["load"]) for one in measures)
    idle = sum(share == 0 for one in measures for share in one["load"])
    unused = "Every expert gets some tokens."
    if idle:
        unused = f"{idle} of the {experts} experts in all layers get no token."
    found.append(
        f"{run.name}: the busiest expert, in layer {heaviest + 1}, gets {max(load):.1f}% of the "
        f"tokens; an equal share would be {100 / len(load):.1f}%. {unused}"
    )
    steady = [one for one in measures if one["instability"] is not None]
    if steady:
        own = sum(one["instability"] for one in steady) / len(steady)
        chance = sum(one["chance"] for one in steady) / len(steady)
        found.append(
            f"{run.name}: {own:.1%} of token pairs switch between same and different experts from "
            f"one layer to the next; {chance:.1%} would by chance, with the same load on each "
            "expert."
        )
    scales = [layer["deviation"] for layer in routing.layers if layer["adaptive"]]
    if scales:
        found.append(_scale_sentence(run.name, max(scales)))
    return found


def _scale_sentence(name: str, deviation: float) -> str:
    measured = (
        f"{name}: before routing, features are scaled by a factor of typically "
        f"{math.exp(deviation):.2f} or its inverse, in the layer where it is largest (root mean "
        f"square of ln M: {deviation:.3f})"
    )
    if deviation < NEAR_IDENTITY:
        return f"{measured}. That is close to 1: the router decides nearly as a plain one would."
    return f"{measured}. A plain router has a factor of 1."


def _limits(
    runs: Sequence[RunFacts], routings: Sequence[RunRouting | str], pairs: Sequence[Paired]
) -> list[str]:
    found = []
    unfinished = [run.name for run in runs if run.state not in ("finished", "analyzed")]
    if unfinished:
        found.append(
            f"Not finished: {', '.join(unfinished)}. Such a run is compared at the last step at "
            "which both runs were validated, and the difference may still change sign."
        )
    if len(set(groups(runs))) > 1:
        found.append(
            "Some runs differ in more than router and seed (see the settings). A difference "
            "between such runs is not the effect of the router alone."
        )
    if any(len(pair.seeds) == 1 for pair in pairs):
        found.append(
            "To say which router is better takes several seeds of each. Train more with seed=1, "
            "seed=2, ... and give all runs to this page; it then compares them seed by seed."
        )
    if len(pairs) > 1 and any(pair.told_from_chance for pair in pairs):
        found.append(
            f"The page holds {len(pairs)} comparisons, and their intervals are not corrected for "
            "this number: the more comparisons, the likelier one interval excludes zero by chance."
        )
    if any(run.best() is not None for run in runs):
        found.append(
            "The best validation score was chosen among several on the same data, so it is a "
            "little too good. A test score was not chosen."
        )
    if any(isinstance(routing, RunRouting) for routing in routings):
        found.append(
            "The explorer shows how a few tokens were routed: it is an example, not a "
            "measurement. The numbers of experts are arbitrary: expert 3 of one run has nothing to "
            "do with expert 3 of another. Only which tokens share an expert can be compared."
        )
    return found
