"""From lines to tables, figures and a page."""

import re
from pathlib import Path

import pytest

from acmoe.errors import UserError
from acmoe.lab.study.grids.nano import TEXT_SETTING
from acmoe.lab.study.registry import STUDIES
from acmoe.lab.study.results.page import markers, write_page
from acmoe.lab.study.results.records import read_results
from acmoe.lab.study.results.report import report
from acmoe.lab.study.results.summary import summarise
from acmoe.lab.study.results.tables import study_markdown
from study_cases import record, write_results

ROOT = Path(__file__).parents[3]
BYTES = STUDIES["bytes"]


def three_seeds():
    plain = [record("smoe", seed, 1.5 + seed) for seed in range(3)]
    # Differences of -0.1, -0.2, -0.3: mean -0.2, deviation 0.1, t = -3.4641.
    better = [record("adaptive-previous", seed, 1.4 + 0.9 * seed) for seed in range(3)]
    return plain + better


def test_a_comparison_is_paired_by_seed_and_corrected_over_the_family():
    # Differences of -1, 0 and 1.
    lines = three_seeds() + [record("adaptive-current", seed, 0.5 + 2 * seed) for seed in range(3)]
    summary = summarise(BYTES, lines)
    first, second = [one for one in summary.comparisons if one.metric.key == "test"]
    assert (first.condition, first.baseline) == ("adaptive-previous", "smoe")
    assert first.difference.mean == pytest.approx(-0.2)
    assert first.difference.p_t == pytest.approx(0.0742, abs=1e-4)
    assert first.relative == pytest.approx(-8.0)  # of the baseline's mean, 2.5
    assert first.holm_t == pytest.approx(2 * 0.0742, abs=2e-4)
    assert (second.difference.mean, second.difference.p_t, second.holm_t) == (0.0, 1.0, 1.0)


def test_an_interim_comparison_is_not_in_the_family_of_the_correction():
    """Four pairs are declared: the one with three has no test, and does not raise the other's p."""
    lines = [record("smoe", seed, 1.5 + seed, study="long") for seed in range(4)]
    for condition, seeds in (("adaptive-previous", 4), ("fade", 3)):
        lines += [record(condition, seed, 1.4 + 0.9 * seed, study="long") for seed in range(seeds)]
    found = summarise(STUDIES["long"], lines).comparisons
    whole, interim = [one for one in found if one.metric.key == "test"]
    assert (whole.difference.n, interim.difference.n) == (4, 3)
    # Differences of -0.1 to -0.4: all signs agree in 2 of 16 patterns.
    assert whole.difference.p_flip == whole.holm_flip == 2 / 16
    assert whole.holm_t == whole.difference.p_t
    assert (interim.holm_t, interim.holm_flip) == (None, None)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"config": {"model": {"dim": 8}}}, "smoe has config.model.dim=16, and .* has 8; pairs"),
        ({"tests": {"tokens": 5}}, "seed 1: smoe has tests.tokens=200, and adaptive-previous"),
        ({"data": "b"}, "has data='a', and adaptive-previous has 'b'"),
        ({"config": {"model": {}, "clip": None}}, "smoe has config.clip=1.0, and .* has None; pa"),
    ],
)
def test_runs_of_other_options_are_no_pair(changed, says):
    """`--only adaptive-previous model.dim=8` may write into the same file."""
    plain = {
        "config": {"model": {"dim": 16, "router": "smoe"}, "graph": False, "clip": 1.0},
        "tests": {"tokens": 200, "tasks": [1]},
        "data": "a",
    }
    alike = {
        **plain,
        "config": {"model": {"dim": 16, "router": "adaptive"}, "graph": True, "clip": 1.0},
        "tests": {"tokens": 200, "tasks": []},
    }
    lines = [record("smoe", seed, 1.5, **plain) for seed in range(2)]
    summarise(BYTES, [*lines, record("adaptive-previous", 1, 1.4, **alike)])
    with pytest.raises(UserError, match=says):
        summarise(BYTES, [*lines, record("adaptive-previous", 1, 1.4, **{**alike, **changed})])


def test_a_run_without_tests_hides_no_difference_of_two_others():
    lines = [
        record("smoe", 1, 1.5, tests=None),
        record("adaptive-previous", 1, 1.4, tests={"tokens": 200}),
        record("adaptive-current", 1, 1.4, tests={"tokens": 5}),
    ]
    with pytest.raises(
        UserError, match=r"previous has tests\.tokens=200, and adaptive-current has 5"
    ):
        summarise(BYTES, lines)


def test_a_difference_is_in_percent_of_the_baseline_of_its_own_seeds():
    lines = [*three_seeds(), record("adaptive-current", 1, 2.0)]  # the plain run of seed 1 has 2.5
    found = [one for one in summarise(BYTES, lines).comparisons if one.metric.key == "test"]
    assert [(one.difference.n, one.relative) for one in found] == [
        (3, pytest.approx(-8.0)),
        (1, pytest.approx(-20.0)),
    ]


@pytest.mark.parametrize("name", ["long", "long-words"])
def test_the_page_of_a_study_that_goes_on_is_that_of_its_records(name):
    page = (ROOT / "studies" / f"{name}.md").read_text()
    results = ROOT / "studies" / "records" / f"{name}.jsonl"
    begin, end = markers(name)
    if not results.is_file():
        assert page.split(begin)[1].split(end)[0].strip() == "Nothing yet."
        return
    images = re.findall(r"^!\[.*\]\((.*)\)$", page, re.MULTILINE)
    found = study_markdown(summarise(STUDIES[name], read_results(results)), images)
    assert found in page, f"run acmoe study {name} --summarise --published"


def test_a_comparison_with_fewer_pairs_than_declared_has_no_test():
    """Four pairs were declared; the three first ones would give p = 0.0742 and 0.25."""
    lines = [dict(line, study="long") for line in three_seeds()]
    page = study_markdown(summarise(STUDIES["long"], lines), [])
    assert "| 3 of 4 | -0.2000 [-0.4484, +0.0484] | -8.00 |  |  |  |  |" in page
    assert "1 of 1 comparison in test bits per byte has fewer pairs than declared" in page
    assert "below 0.05" not in page
    last = [record("smoe", 3, 1.5), record("adaptive-previous", 3, 1.4), record("fade", 3, 1.4)]
    lines += [dict(line, study="long") for line in last]
    page = study_markdown(summarise(STUDIES["long"], lines), [])
    assert "| adaptive-previous | smoe | 4 | -0.1750 [" in page
    assert "1 comparison in test bits per byte was tested (paired t, Holm" in page
    assert "| fade | smoe | 1 of 4 | -0.1000 | -6.67 |  |  |  |  |" in page
    assert "1 of 2 comparisons in test bits per byte has fewer pairs than" in page


def test_other_sizes_and_settings_are_never_compared():
    lines = [record("smoe", 0, 1.5), record("adaptive-previous", 0, 1.0, size="8 steps")]
    lines.append(record("adaptive-previous", 1, 1.0, setting="other"))
    summary = summarise(BYTES, lines)
    assert len(summary.groups) == 3
    assert summary.comparisons == ()


def test_two_configs_under_one_name_are_refused():
    lines = [record("smoe", 0, 1.5), record("smoe", 0, 1.6, digest="another")]
    with pytest.raises(UserError, match="two different runs of switch"):
        summarise(BYTES, lines)


def test_failed_runs_stand_apart_from_the_figures():
    broken = record("control", 0, 0.0, status="failed", error="step 3 | not finite")
    summary = summarise(BYTES, [*three_seeds(), broken])
    page = study_markdown(summary, [])
    assert "| switch | control | 0 | step 3 \\| not finite |" in page
    with pytest.raises(UserError, match="no finished run"):
        summarise(BYTES, [broken])


def test_settings_come_before_the_seeds_of_a_printed_command():
    """Behind them the parser would take them for seeds."""
    lines = [{**one, "options": "--steps 4 graph=true"} for one in three_seeds()]
    page = study_markdown(summarise(BYTES, lines), [])
    assert "`acmoe study bytes graph=true --data DATA --seeds 0 1 2 --steps 4`" in page


def test_a_printed_command_names_the_conditions_that_were_run():
    """The grid has more in this setting; it would run them, too, and all with all seeds."""
    place = {"study": "long", "setting": "switch-enwik8, balance 0", "options": ""}
    lines = [record("smoe", seed, 1.5, **place) for seed in range(2)]
    lines += [record("fade", seed, 1.5, **place) for seed in range(2)]
    lines.append(record("adaptive-current", 1, 1.4, **place))
    where = 'acmoe study long --data DATA --settings "switch-enwik8, balance 0"'
    page = study_markdown(summarise(STUDIES["long"], lines), [])
    assert f"`{where} --only smoe fade --seeds 0 1`, `{where} --only adaptive-current --s" in page
    names = ["smoe", "fade", "adaptive-previous", "adaptive-current"]
    lines = [record(name, 1, 1.5, **place) for name in names]
    assert f"\n`{where} --seeds 1`: " in study_markdown(summarise(STUDIES["long"], lines), [])


def test_a_metric_without_comparisons_is_not_counted_as_none_of_none():
    """A study of text and images has a primary metric of each."""
    text = {"study": "nano", "setting": TEXT_SETTING}
    lines = [record(name, 0, 1.5, **text) for name in ("smoe", "adaptive-previous")]
    page = study_markdown(summarise(STUDIES["nano"], lines), [])
    assert "There is no comparison in top-1 (%) yet." in page
    assert "0 of 0" not in page


def test_the_tables_hold_spread_interval_command_and_commit():
    page = study_markdown(summarise(BYTES, three_seeds()), ["images/x.svg"])
    assert "`acmoe study bytes --data DATA --seeds 0 1 2 --steps 4`" in page
    assert "commit abc1234; a card, 2 at once" in page
    assert "| smoe | 3 | 2.5000 ± 1.0000 |" in page
    # 4.3027 * 0.1 / sqrt(3) = 0.2484
    assert "| -0.2000 [-0.4484, +0.0484] | -8.00 | 0.0742 | 0.0742 | 0.2500 | 0.2500 |" in page
    assert "below 0.05: none" in page
    assert "![bytes](images/x.svg)" in page
    assert "| 1.153 | 1.137 | Table 1 |" in page


def test_runs_outside_a_clone_have_an_unknown_commit():
    outside = {"commit": None, "device": "a card", "jobs": 2}
    lines = [{**one, "environment": outside} for one in three_seeds()]
    assert "; commit unknown; a card" in study_markdown(summarise(BYTES, lines), [])


def test_step_times_are_those_of_the_number_at_once_that_most_runs_had():
    crowded = {"commit": "abc1234", "device": "a card", "jobs": 4}
    lines = [record("smoe", 0, 1.5), record("smoe", 1, 1.7, environment=crowded)]
    lines[0]["metrics"]["step_ms"], lines[1]["metrics"]["step_ms"] = 25.0, 80.0
    summary = summarise(BYTES, lines)  # one run of each: the fewer at once
    assert summary.groups[0].by_seed("smoe", "step_ms") == {0: 25.0}
    assert summary.groups[0].by_seed("smoe", "test") == {0: 1.5, 1: 1.7}
    assert "2 or 4 at once. Step times are those of 2 at once." in study_markdown(summary, [])
    lines.append(record("smoe", 2, 1.6, environment=crowded))
    lines[2]["metrics"]["step_ms"] = 90.0
    summary = summarise(BYTES, lines)
    assert summary.groups[0].by_seed("smoe", "step_ms") == {1: 80.0, 2: 90.0}
    assert "2 or 4 at once. Step times are those of 4 at once." in study_markdown(summary, [])


def test_a_claim_that_survives_is_said_with_its_direction():
    sure = [record("smoe", seed, 1.5 + seed) for seed in range(5)]
    sure += [record("adaptive-previous", s, 1.4 + s + 0.001 * (s % 2)) for s in range(5)]
    page = study_markdown(summarise(BYTES, sure), [])
    assert "adaptive-previous is better than smoe (switch; 4 steps of 32 tokens)" in page


def test_only_the_part_between_the_markers_is_replaced(tmp_path):
    page = tmp_path / "results.md"

    def put(text: str, name: str, content: str) -> str:
        page.write_text(text)
        write_page(page, name, content)
        return page.read_text()

    begin, end = markers("bytes")
    other_begin, other_end = markers("words")
    text = f"# Results\n\nmine\n{begin}\nold\n{end}\nalso mine\n{other_begin}\nkept\n{other_end}\n"
    new = put(text, "bytes", "fresh \\1 | figures")
    assert new == text.replace(f"{begin}\nold\n{end}", f"{begin}\n\nfresh \\1 | figures\n\n{end}")
    assert put(new, "bytes", "fresh \\1 | figures") == new
    with pytest.raises(UserError, match="must hold <!-- study:vision:begin -->"):
        put(text, "vision", "x")
    with pytest.raises(UserError, match="once each"):
        put(text + text, "bytes", "x")


def test_a_report_is_the_same_bytes_every_time(tmp_path):
    pytest.importorskip("matplotlib")
    begin, end = markers("bytes")
    page = tmp_path / "docs" / "results.md"
    page.parent.mkdir()
    page.write_text(f"# Results\n\n{begin}\n{end}\n\nthe end\n")
    results = write_results(tmp_path / "bytes.jsonl", three_seeds())
    files = report(BYTES, results, page, tmp_path / "docs" / "images")
    names = sorted(path.name for path in files)
    curves = "bytes-switch-4-steps-of-32-tokens"
    figures = [
        f"{name}.{kind}" for name in ("bytes-differences", curves) for kind in ("png", "svg")
    ]
    assert names == sorted([*figures, "results.md"])
    first = {path: path.read_bytes() for path in files}
    assert b"![bytes](images/bytes-differences.svg)" in first[page]
    assert first[page].endswith(b"the end\n")
    again = report(BYTES, results, page, tmp_path / "docs" / "images")
    assert {path: path.read_bytes() for path in again} == first
