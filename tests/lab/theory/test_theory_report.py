import json
from dataclasses import replace

from rich.console import Console

from acmoe.lab.theory import Check, all_confirmed, render, to_json

HOLDS = Check(
    name="Lemma A",
    statement="a <= b for r: R^d -> [E]",
    setting="ten draws",
    measured="largest ratio 0.5",
    figures={"draws": 10, "ratios": [0.25, 0.5]},
    verdict="holds",
    basis="proof",
    holds_as_printed=True,
    confirmed=True,
    note="It rests on Jensen.",
)
FAILS = replace(
    HOLDS,
    name="Lemma B",
    verdict="fails as printed: b < a",
    basis="counterexample",
    holds_as_printed=False,
    note="Not so.",
)
OPEN = replace(
    HOLDS, name="Lemma C", basis="observation", holds_as_printed=None, note="Nothing is said."
)
DOUBT = replace(
    HOLDS,
    name="Lemma D",
    verdict="not confirmed: off",
    confirmed=False,
    holds_as_printed=None,
    note="Look here.",
)


def printed(*checks: Check, width: int = 100) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(render(checks))
    return capture.get()


def test_the_table_fits_its_width_and_holds_name_setting_measurement_and_verdict():
    text = printed(HOLDS, FAILS)
    assert max(len(line) for line in text.splitlines()) <= 100
    for part in ("Lemma A", "ten draws", "largest ratio 0.5", "fails as printed:"):
        assert part in text


def test_brackets_are_mathematics_and_not_markup():
    assert "R^d -> [E]" in printed(HOLDS)


def test_a_statement_shared_by_neighbouring_rows_is_printed_once():
    assert printed(HOLDS, FAILS).count("a <= b") == 1


def test_the_reading_sorts_rows_by_what_was_found():
    text = printed(HOLDS, FAILS, OPEN, DOUBT)
    order = [
        "Not confirmed",
        "4 Lemma D. Look here.",
        "Contradicted by an exact counterexample",
        "2 Lemma B. Not so.",
        "Proved under the hypotheses",
        "1 Lemma A. It rests on Jensen.",
        "Observed in simulations, not proved",
        "3 Lemma C. Nothing is said.",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_a_section_without_rows_is_left_out():
    text = printed(HOLDS)
    assert "Not confirmed" not in text and "Contradicted" not in text


def test_one_unconfirmed_row_makes_the_whole_unconfirmed():
    assert all_confirmed([HOLDS, FAILS, OPEN])
    assert not all_confirmed([HOLDS, DOUBT])
    content = json.loads(to_json([HOLDS, DOUBT]))
    assert content["confirmed"] is False
    assert content["checks"][0]["figures"] == {"draws": 10, "ratios": [0.25, 0.5]}
