"""Random configs, files and requests end in success or in one line, never in another error."""

import contextlib
import time
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from acmoe.errors import UserError
from faults.fuzz.common import Hang, Target, allowed, changed, damaged, try_value
from faults.fuzz.runner import fuzz
from faults.fuzz.targets import TARGETS

SLOW = {"checkpoint bytes": 4, "checkpoint documents": 3, "deep documents": 1, "metrics.jsonl": 10}


@pytest.mark.parametrize("name", TARGETS)
def test_a_sample(name: str) -> None:
    target = TARGETS[name]

    examples = SLOW.get(name, settings.default.max_examples)

    @settings(max_examples=examples, database=None, phases=[Phase.generate])
    @given(target.values)
    def sample(value: Any) -> None:
        try_value(target, value)

    for value in target.kept:
        try_value(target, value)
    sample()


def test_a_fault_is_found_once_and_reported() -> None:
    def breaks(value: int) -> None:
        if value > 3:
            raise KeyError(value)
        raise UserError("fine")

    def uses(value: int) -> None:
        allowed(lambda: breaks(value))

    report = fuzz([Target("numbers", st.integers(0, 9), uses)], seconds=0.3, seed=0)
    assert report.examples["numbers"] > 20
    (finding,) = report.findings
    assert finding["target"] == "numbers" and finding["value"] == "4"  # the smallest that breaks
    assert "KeyError" in finding["error"]


def test_a_hang_is_noticed_where_the_library_catches_all_errors() -> None:
    def waits(value: int) -> None:
        with contextlib.suppress(Exception):
            time.sleep(value)

    with pytest.raises(Hang, match=r"more than 0\.05 s"):
        try_value(Target("waits", st.just(5), waits), 5, seconds=0.05)


def test_changes_reach_inside_a_document() -> None:
    document = {"a": [1, {"b": 2}], "c": 3}
    assert changed(document, [(3, "set", 9)]) == {"a": [1, {"b": 9}], "c": 3}
    assert changed(document, [(0, "delete", None)]) == {"c": 3}
    assert changed(document, [(4, "nudge", None)]) == {"a": [1, {"b": 2}], "c": 10}
    assert changed(document, [(1, "add", 7)]) == {"a": [1, {"b": 2}, 7], "c": 3}
    assert damaged(b"abcd", [("flip", 1, b"\x01"), ("cut", 3, b"x")]) == b"acc"
