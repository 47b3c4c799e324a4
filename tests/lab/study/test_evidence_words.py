"""The evidence page in words: the answer, and the commands that make missing runs."""

import shlex
from dataclasses import replace

from evidence_cases import CLAIM
from test_evidence_verdicts import pairs
from test_study_grids import NOWHERE

from acmoe.lab.study.evidence.claims import CLAIMS
from acmoe.lab.study.evidence.page import evidence_markdown
from acmoe.lab.study.evidence.rows import evidence_rows
from acmoe.lab.study.evidence.short import answer
from acmoe.lab.study.evidence.words import command_text
from acmoe.lab.study.registry import STUDIES
from acmoe.lab.study.size import Size
from acmoe.lab.study.study import choose


def test_the_answer_counts_declared_comparisons_alone() -> None:
    declared = replace(CLAIM, settings=("a",), declared=3)
    gain, none = [-2.0, -2.1, -1.9], [0.1, 0.0, -0.1]
    for claim, values, text in (
        (declared, none, "Not shown: 1 comparison has an interval and all the pairs"),
        (declared, gain, "1 comparison has an interval and all the pairs"),
        (declared, gain[:2], "Not known: no comparison has an interval"),
        (replace(declared, declared=2), gain[:2], "Not known"),  # two pairs have no interval
        (replace(declared, declared=None), gain, "Not known"),  # no number was declared
        (replace(declared, decisive=False), gain, "Not known"),  # declared as secondary
        (replace(declared, plain=None, adaptive=None), gain, "Not known"),  # our own idea
    ):
        rows = evidence_rows([claim], {"long": pairs(values)})
        assert answer(rows).startswith(text)


def test_the_command_of_missing_runs_selects_exactly_these() -> None:
    """Each claim and setting: two conditions, and as many seeds as pairs were declared."""
    for claim in (claim for claim in CLAIMS if claim.declared is not None):
        words = shlex.split(command_text(claim, claim.settings))
        name, end = words[2], words.index("--published")
        settings, only, seeds = (
            words[words.index(option) + 1 : min(end, *stops)]
            for option, stops in (
                ("--settings", (words.index("--only"), end)),
                ("--only", (words.index("--seeds"), end)),
                ("--seeds", (end, end)),
            )
        )
        cells = STUDIES[name].cells(NOWHERE, Size(), [int(seed) for seed in seeds], settings)
        found = choose(cells, only, settings)
        assert len(found) == 2 * claim.declared * len(claim.settings)
        assert {cell.setting for cell in found} == set(claim.settings)
        assert {cell.condition for cell in found} == {claim.baseline, claim.condition}


def test_missing_runs_stand_beside_their_command() -> None:
    claim = replace(CLAIM, declared=4)
    text = evidence_markdown(evidence_rows([claim], {"long": pairs([0.1, 0.0, -0.1])}), [])
    command = 'acmoe study long --data DATA --settings "{}" --only smoe adaptive-previous'
    rest = "--seeds 0 1 2 3 --published"
    assert f"- bits: a (3 of 4 pairs); `{command.format('a')} {rest}`" in text
    assert f"- bits: b; `{command.format('b')} {rest}`" in text
    own = replace(claim, plain=None, adaptive=None, title="our own idea: x")
    text = evidence_markdown(evidence_rows([own], {"long": pairs([0.1])}), [])
    assert text.count("makes the missing runs.") == 2
