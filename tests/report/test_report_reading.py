"""The plain reading claims what the seeds allow, and no more."""

from acmoe.report.reading import read_figures
from acmoe.report.routing import RunRouting
from acmoe.report.runs import RunFacts
from acmoe.report.sample import Sample
from run_facts import run_facts


def reading_of(*runs: RunFacts):
    return read_figures(runs, ["no checkpoint"] * len(runs))


def over_seeds(router: str, *values: float) -> list[RunFacts]:
    return [
        run_facts({1: value}, seed=seed, router=router, name=f"{router}-{seed}")
        for seed, value in enumerate(values)
    ]


def test_one_seed_is_no_evidence() -> None:
    reading = reading_of(run_facts({1: 2.0}), run_facts({1: 1.0}, router="adaptive"))
    (sentence,) = reading.shows
    assert "is -1 validation bits per byte (-50%) with one seed (0)" in sentence
    assert "this is no evidence for either" in sentence
    assert any("several seeds" in line for line in reading.cannot)


def test_seeds_that_disagree_show_no_difference() -> None:
    reading = reading_of(*over_seeds("smoe", 2.0, 2.0, 2.0), *over_seeds("adaptive", 1.9, 2.1, 2.0))
    assert "The interval contains zero: these runs show no difference." in reading.shows[0]


def test_seeds_that_agree_favour_the_lower_of_a_loss() -> None:
    reading = reading_of(
        *over_seeds("smoe", 2.0, 2.5, 3.0), *over_seeds("adaptive", 1.5, 2.0, 2.49)
    )
    assert "on average over 3 seeds" in reading.shows[0]
    assert "The interval excludes zero: adaptive is better" in reading.shows[0]
    assert "fewer than 5 seeds" in reading.shows[0]
    assert not any("several seeds" in line for line in reading.cannot)


def test_two_seeds_and_equal_differences_give_no_interval() -> None:
    two = reading_of(*over_seeds("smoe", 2.0, 2.5), *over_seeds("adaptive", 1.0, 1.4))
    assert two.shows[0].endswith("3 seeds are the fewest that give a confidence interval.")
    equal = reading_of(*over_seeds("smoe", 2.0, 2.5, 3.0), *over_seeds("adaptive", 1.0, 1.5, 2.0))
    assert "is -1 validation bits per byte (-40%) on average over 3 seeds" in equal.shows[0]
    assert equal.shows[0].endswith("so that no interval can be computed.")


def test_a_higher_accuracy_is_better() -> None:
    runs = [
        run_facts({1: value}, seed=seed, router=router, key="top1")
        for router, values in (("smoe", (80.0, 81.0, 82.0)), ("adaptive", (70.0, 71.0, 72.01)))
        for seed, value in enumerate(values)
    ]
    assert "smoe is better" in reading_of(*runs).shows[0]


def test_unfinished_and_unlike_runs_are_said_to_be_so() -> None:
    reading = reading_of(run_facts({1: 2.0}), run_facts({1: 1.0}, lr=0.5, steps=9, name="early"))
    assert any(line.startswith("Not finished: early.") for line in reading.cannot)
    assert any("more than router and seed" in line for line in reading.cannot)
    assert reading.shows == ("Nothing that can be compared has been measured yet.",)


def routing_with(load: list[float], deviation: float) -> RunRouting:
    measure = {"load": load, "instability": None, "chance": None}
    later = {"load": load, "instability": 0.2, "chance": 0.5}
    layer = {"adaptive": True, "deviation": deviation}
    return RunRouting(
        sample=Sample(mark="", count=0, content={}),
        step=1,
        statistics="running",
        measured="",
        measures=[measure, later],
        layers=[layer, layer],
        predicted=None,
    )


def test_loads_and_scales_are_put_in_words() -> None:
    run = run_facts({1: 2.0}, router="adaptive", name="ac")
    shows = read_figures([run], [routing_with([60.0, 40.0, 0.0, 0.0], 0.3)]).shows
    assert shows[0] == (
        "ac: the busiest expert, in layer 1, gets 60.0% of the tokens; an equal share would be "
        "25.0%. 4 of the 8 experts in all layers get no token."
    )
    assert shows[1] == (
        "ac: 20.0% of token pairs switch between same and different experts from one layer to the "
        "next; 50.0% would by chance, with the same load on each expert."
    )
    assert "by a factor of typically 1.35 or its inverse" in shows[2]  # exp(0.3)


def test_a_scale_near_the_identity_is_called_a_plain_router() -> None:
    run = run_facts({1: 2.0}, router="adaptive")
    shows = read_figures([run], [routing_with([50.0, 50.0], 0.01)]).shows
    assert "Every expert gets some tokens." in shows[0]
    assert "decides nearly as a plain one would" in shows[2]
