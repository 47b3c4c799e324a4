"""`acmoe doctor` and `acmoe --version`: what is installed here, said so that it can be pasted."""

import json
import os
from pathlib import Path

import pytest

import acmoe
from acmoe.cli import main
from acmoe.lab import installation
from acmoe.lab.bench.which import Choice
from acmoe.lab.installation import is_installed, read_extras


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--version") == f"acmoe {acmoe.__version__}\n"


def test_doctor_prints_the_command_for_a_missing_extra_with_its_brackets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needs = ['nosuchpackage>=1.0; extra == "plots"', 'torch>=2.0; extra == "hf"']
    monkeypatch.setattr(installation.metadata, "requires", lambda name: needs)
    kernel = Choice("route", "triton", False, "needs a [CUDA] device")
    monkeypatch.setattr(installation, "which", lambda *where: [kernel])
    shown = call(capsys, "doctor", "--root", str(tmp_path))
    assert "extra plots: lacks nosuchpackage>=1.0; pip install 'acmoe[plots]'\n" in shown
    assert "extra hf: installed (torch>=2.0)\n" in shown
    assert f"acmoe {acmoe.__version__} in " in shown and "device cpu: " in shown
    assert "triton: needs a [CUDA] device" in shown
    assert f"none is prepared in {tmp_path}" in shown


def test_doctor_gives_every_op_a_kernel_and_a_wrong_variable_is_no_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    facts = json.loads(call(capsys, "doctor", "--json", "--root", str(tmp_path)))
    ops = {op["op"]: op["serves"] for op in facts["kernels"]["ops"]}
    assert {"route", "expert_mlp", "window_attention"} <= set(ops) and None not in ops.values()
    assert facts["packages"]["torch"] and facts["data"] == []
    monkeypatch.setenv("ACMOE_KEEP_ATTENTION", "sometimes")
    facts = json.loads(call(capsys, "doctor", "--json", "--root", str(tmp_path)))
    assert "ACMOE_KEEP_ATTENTION" in facts["kernels"]["problem"]
    assert facts["environment"]["ACMOE_KEEP_ATTENTION"] == "sometimes"


def test_doctor_names_the_caches_of_a_user_with_and_without_a_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.delenv("TORCH_HOME", raising=False)
    folders = {one["of"]: one["folder"] for one in installation._caches()}
    assert folders["acmoe's kernels in C"] == "/caches/acmoe/native"
    assert folders["acmoe's tuned layers"] == "/caches/acmoe/experts"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no HOME, and no such user
    folders = {one["of"]: one["folder"] for one in installation._caches()}
    assert folders["torch"] == "~/.cache/torch"


def test_extras_are_read_from_requirements_and_another_name_is_left_out() -> None:
    lines = [
        "numpy>=1.26",
        'datasets>=3.0; extra == "data"',
        "datasets>=3.0; extra == 'text'",
        'mkdocs<2,>=1.6; extra == "docs"',
        "triton>=3.6; (platform_system == 'Nosuch') and extra == 'dev'",
    ]
    assert read_extras(lines) == {"data": ["datasets>=3.0"], "docs": ["mkdocs<2,>=1.6"]}


def test_an_old_version_does_not_count_as_installed() -> None:
    assert is_installed("torch") and is_installed("torch>=2.9")  # 2.10 and later are newer
    assert not is_installed("torch>=99") and not is_installed("nosuchpackage")
