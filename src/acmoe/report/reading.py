"""Write sentences that say what the page's figures show and what they cannot show."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from acmoe.analyze.reading import NEAR_IDENTITY
from acmoe.report.compare import Paired, groups, paired
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
        shows = ["Nothing has been measured that could be compared yet."]
    return Reading(shows=tuple(shows), cannot=tuple(_limits(runs, routings, pairs)))


def _pair_sentence(pair: Paired) -> str:
    change, percent = f"{pair.difference:+.4g}", pair.percent
    share = "" if percent is None else f" ({percent:+.2g}%)"
    if len(pair.seeds) == 1:
        return (
            f"{pair.second} against {pair.first}: {change} {pair.metric}{share}, one seed "
            f"({pair.seeds[0]}). One seed gives no spread, so this difference cannot be told from "
            "chance: it is no evidence for either router."
        )
    measured = (
        f"{pair.second} against {pair.first}, {len(pair.seeds)} paired seeds: mean difference "
        f"{change} {pair.metric}{share}, 95% interval {pair.low:+.4g} to {pair.high:+.4g} (paired "
        f"t); {pair.first} {pair.first_mean:.4g} ± {pair.first_spread:.2g}, {pair.second} "
        f"{pair.second_mean:.4g} ± {pair.second_spread:.2g}."
    )
    if not pair.told_from_chance:
        return f"{measured} The interval holds zero: no difference is shown."
    few = ""
    if len(pair.seeds) < FEW_SEEDS:
        few = " With so few seeds that rests on differences being normally distributed."
    better = pair.second if (pair.difference < 0) == pair.lower else pair.first
    return (
        f"{measured} The interval leaves out zero, in favour of {better}, for this configuration "
        f"and length of training.{few}"
    )


def _routing_sentences(run: RunFacts, routing: RunRouting) -> list[str]:
    found = []
    measures = routing.measures
    heaviest = max(range(len(measures)), key=lambda depth: max(measures[depth]["load"]))
    load = measures[heaviest]["load"]
    idle = sum(share == 0 for one in measures for share in one["load"])
    unused = f" {idle} experts got nothing." if idle else " Every expert got some."
    found.append(
        f"{run.name}: the busiest expert (layer {heaviest + 1}) takes {max(load):.1f}% of the "
        f"tokens, an even share being {100 / len(load):.1f}%.{unused}"
    )
    steady = [one for one in measures if one["instability"] is not None]
    if steady:
        own = sum(one["instability"] for one in steady) / len(steady)
        chance = sum(one["chance"] for one in steady) / len(steady)
        word = "less than" if own < chance else "no less than"
        found.append(
            f"{run.name}: from layer to layer {own:.1%} of token pairs part or meet, {word} the "
            f"{chance:.1%} of clusters of these sizes dealt out at random."
        )
    scales = [layer["deviation"] for layer in routing.layers if layer["adaptive"]]
    if scales:
        found.append(_scale_sentence(run.name, max(scales)))
    return found


def _scale_sentence(name: str, deviation: float) -> str:
    if deviation < NEAR_IDENTITY:
        return (
            f"{name}: the scale M is close to the identity (ln M {deviation:.3f} in root mean "
            "square at most), so that its adaptive router decides nearly as a plain one would."
        )
    return (
        f"{name}: the scale M departs from the identity by up to {deviation:.2f} (root mean square "
        "of ln M in a layer): its router does read tokens in another space than a plain one."
    )


def _limits(
    runs: Sequence[RunFacts], routings: Sequence[RunRouting | str], pairs: Sequence[Paired]
) -> list[str]:
    found = []
    unfinished = [run.name for run in runs if run.state not in ("finished", "analyzed")]
    if unfinished:
        found.append(
            f"Not finished: {', '.join(unfinished)}. Their differences are taken at the last step "
            "that both runs were validated at, and may still change sign."
        )
    if len(set(groups(runs))) > 1:
        found.append(
            "The runs differ in more than router and seed (marked in the settings). A difference "
            "between such runs is not the router's alone."
        )
    if any(len(pair.seeds) == 1 for pair in pairs):
        found.append(
            "Which router is better: that takes several seeds of each, their spread and a paired "
            "test. Train more with seed=1, seed=2, ... and give all runs to this page."
        )
    if len(pairs) > 1 and any(pair.told_from_chance for pair in pairs):
        found.append(
            f"The page holds {len(pairs)} comparisons, and their intervals are not corrected for "
            "this number: the more comparisons, the likelier one interval excludes zero by chance."
        )
    if any(run.best() is not None for run in runs):
        found.append(
            "The best validation value is the best of several on the same data, so it flatters "
            "every run a little; a test score does not."
        )
    if any(isinstance(routing, RunRouting) for routing in routings):
        found.append(
            "The explorer shows how a few tokens were routed. It illustrates; it does not measure. "
            "Experts are numbered at random in training: expert 3 of one run has nothing to do "
            "with expert 3 of another. Only which tokens share an expert can be compared."
        )
    return found
