"""Licences: what metadata state is read, and what may not be used is refused."""

from email.message import Message
from types import SimpleNamespace

import pytest

pytest.importorskip("packaging")
import audit
import licences


def package(**fields):
    metadata = Message()
    for name, value in fields.items():
        for one in value if isinstance(value, list) else [value]:
            metadata[name.replace("_", "-")] = one
    return SimpleNamespace(metadata=metadata)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"License_Expression": "MIT AND PSF-2.0", "License": "GPL"}, "MIT AND PSF-2.0"),
        ({"License_Expression": "(MIT OR GPL-3.0-only)"}, "MIT OR GPL-3.0-only"),
        (
            {"Classifier": ["License :: OSI Approved :: BSD License", "Typing :: Typed"]},
            "BSD",
        ),
        (
            {
                "Classifier": [
                    "License :: OSI Approved",
                    "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)",
                ]
            },
            "MPL-2.0",
        ),
        ({"License": "Apache 2.0\nCopyright of all"}, "Apache-2.0"),
        ({}, ""),
    ],
)
def test_the_newest_field_says_the_licence(fields, found):
    assert licences.stated_licence(package(**fields))[0] == found


@pytest.mark.parametrize(
    ("licence", "runtime", "verdict"),
    [
        ("Apache-2.0 WITH LLVM-exception AND MIT", True, "allowed"),
        ("MIT OR GPL-3.0-only", True, "allowed"),
        ("GPL-3.0-only", True, "copyleft"),
        ("MIT AND AGPL-3.0-only", True, "copyleft"),
        ("GNU General Public License v3 (GPLv3)", True, "copyleft"),
        ("GPL-3.0-only", False, "allowed"),
        ("LGPL-3.0-or-later", True, "allowed"),
        ("", False, "unknown"),
        ("MIT AND Homegrown", False, "unknown"),
        ("NVIDIA", True, "unknown"),
    ],
)
def test_copyleft_is_refused_at_run_time_and_the_unknown_everywhere(licence, runtime, verdict):
    assert licences.judge("some", licence, runtime=runtime) == verdict


def test_the_cuda_libraries_are_known_under_their_own_names():
    assert licences.judge("nvidia-cublas", "NVIDIA", runtime=True) == "allowed"


def test_the_table_tells_what_a_program_runs_with(tmp_path):
    licences.main(tmp_path / "licences.md")
    rows = (tmp_path / "licences.md").read_text().splitlines()
    (torch,) = (row for row in rows if row.startswith("| torch |"))
    (pytest_row,) = (row for row in rows if row.startswith("| pytest |"))
    assert torch.endswith("| at run time |") and pytest_row.endswith("| in development |")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "No such file"),
        ("<html>", "Expecting value"),
        ('{"vulnerabilities": []}', "names no vulnerability of a version that has some"),
    ],
)
def test_a_service_that_cannot_be_asked_is_said_in_one_line(
    answer, reason, tmp_path, monkeypatch, capsys
):
    if answer is not None:
        (tmp_path / "probe").write_text(answer)
    monkeypatch.setattr(audit, "PROBE", (tmp_path / "probe").as_uri())
    assert audit.main() == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("known vulnerabilities: not checked (file:") and reason in line


def test_a_vulnerability_fails_at_run_time_and_what_was_skipped_is_named():
    flaw = {"id": "PYSEC-1", "fix_versions": ["2.0"]}
    report = {
        "dependencies": [
            {"name": "torch", "version": "1.0", "vulns": [flaw]},
            {"name": "ruff", "version": "1.0", "vulns": [flaw]},
            {"name": "acmoe", "skip_reason": "not on PyPI"},
        ]
    }
    lines, wrong = audit.judge(report, {"torch"})
    assert wrong == 1
    assert lines == [
        "torch 1.0: PYSEC-1, used at run time; fixed in 2.0",
        "ruff 1.0: PYSEC-1, used in development; fixed in 2.0",
        "known vulnerabilities of 2 packages: 1 at run time",
        "not checked, because PyPI does not know them: acmoe",
    ]
