"""The file of results survives whatever ends its writer."""

import json

import pytest

from acmoe.errors import UserError
from acmoe.lab.study.results.records import latest, open_results, read_results
from study_cases import record


def test_records_come_back_as_they_were_written(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    with open_results(path) as results:
        results.add(record("smoe", 0, 1.5))
        results.add(record("smoe", 1, 1.25))
    assert read_results(path) == [record("smoe", 0, 1.5), record("smoe", 1, 1.25)]


def test_a_half_written_last_line_is_dropped_and_its_cell_is_not_there(tmp_path):
    path = tmp_path / "results.jsonl"
    whole = json.dumps(record("smoe", 0, 1.5)) + "\n"
    torn = json.dumps(record("smoe", 1, 1.25))[:40]
    path.write_text(whole + torn)
    assert len(read_results(path)) == 1
    with open_results(path) as results:
        assert results.status("smoe-0") == "done"
        assert results.status("smoe-1") is None
        results.add(record("smoe", 1, 1.25))
    assert [line["seed"] for line in read_results(path)] == [0, 1]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"digest": "a", "status": "done"}\nnonsense\n{}\n')
    with pytest.raises(UserError, match="line 2 is no record"):
        read_results(path)


def test_a_second_writer_is_refused(tmp_path):
    path = tmp_path / "results.jsonl"
    with (
        open_results(path),
        pytest.raises(UserError, match="in use by another study"),
        open_results(path),
    ):
        pass


def test_a_cell_that_was_run_again_counts_as_it_ended_last(tmp_path):
    path = tmp_path / "results.jsonl"
    with open_results(path) as results:
        results.add(record("smoe", 0, 0.0, status="failed", error="broken"))
        assert results.status("smoe-0") == "failed"
        results.add(record("smoe", 0, 1.5))
        assert results.status("smoe-0") == "done"
    assert latest(read_results(path)) == [record("smoe", 0, 1.5)]


def test_results_that_are_not_there_say_so(tmp_path):
    with pytest.raises(UserError, match="is missing; run the study first"):
        read_results(tmp_path / "none.jsonl")
