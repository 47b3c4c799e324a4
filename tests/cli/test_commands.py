"""Commands as a user types them: their output and their exit codes."""

import errno
import io
import json
import logging
import os
import sys
import warnings
from pathlib import Path

import pytest
from rich.console import Console

from acmoe.cli import main
from acmoe.cli.streams import plain_output
from acmoe.recipes import recipes
from command_call import call

ROOT = Path(__file__).parents[2]


def test_no_arguments_show_the_help(capsys):
    code, out, _ = call(capsys)
    assert code == 0
    for command in ("demo", "models", "data", "train", "evaluate", "generate", "theory", "bench"):
        assert command in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nosuch",), "command 'nosuch' is unknown; choose one of demo, "),
        (("evalute", "run"), "command 'evalute' is unknown; did you mean evaluate?"),
        (("--nosuch",), "Unrecognized options: --nosuch"),
        (("train", "switch-nano", "--steps", "3"), "written KEY=VALUE, such as steps=200"),
        (("report", "runs/\udcff"), "'runs/\\udcff' is no UTF-8 text; rename the file or folder"),
        (("data", "list", "--root", "\udcff"), "'\\udcff' is no UTF-8 text; rename the file"),
        (("evaluate", "x", "--batch", "1", "--batch=2"), "--batch is given twice; give it once,"),
        (("report", "x", "-o", "a", "-o", "b"), "--out is given twice; give it once, with all"),
        (("report", "x", "-oa", "--out=b"), "--out is given twice; give it once, with all its"),
        (("analyze", "x", "--tokens", "1", "--max-tokens", "2"), "--tokens is given twice; give"),
        (("data", "prepare", "words", "--from", "a", "--from", "b"), "--from is given twice; give"),
        (("bench", "layer", "--shapes", "tiny", "--shapes", "nano"), "--shapes is given twice"),
        (("generate", "x", "--prompt", "a", "--top-k", "1", "--top_k", "2"), "--top-k is given"),
        (("theory", "--sed", "1"), "--sed, 1; did you mean --seed?; For full helptext, run acmoe"),
        # Options of the same name have a text in each subcommand, which are not repeated here.
        (("bench", "layer", "--repeats", "1"), "--repeats, 1; did you mean --repeat?; For full"),
        (("bench", "layr"), "Unrecognized options: layr; did you mean layer?; For full helptext"),
        (("data", "lst"), "Unrecognized options: lst; did you mean list?; For full helptext"),
        (("data", "nosuch"), "Unrecognized options: nosuch; choose one of list, prepare; For full"),
        (("data", "prepare", "stdlb"), "data set 'stdlb' is not known; did you mean stdlib?"),
        (("train", "switch-nano", "model.router=adaptve"), "is unknown; did you mean adaptive or"),
        (
            ("bench", "train", "--models", "glam-nan"),
            "model 'glam-nan' is unknown; did you mean gl",
        ),
        (("evaluate", "x", "--contaminate", "nan"), "--contaminate nan; it must lie between 0 and"),
        (("analyze", "x", "--contaminate", "1"), "--contaminate 1.0; it must lie between 0 and 1"),
        (("theory", "--seed", "x"), "--seed"),
        (("theory", "--seed", "-1"), "seed"),
        (("train",), "no recipe given"),
        (("train", "nosuch"), "recipe 'nosuch' is unknown"),
        (("train", "switch-nan"), "did you mean switch-nano"),
        (("train", "switch-nano", "nosuch=1"), "setting nosuch is unknown"),
        (("train", "switch-nano", "steps=many"), "steps='many'"),
        (("train", "switch-nano", "model.top_k=99"), "top_k=99 exceeds num_experts"),
        (("train", "switch-nano", "steps"), "'steps' is no setting"),
        (("data", "prepare", "bytes"), "bytes needs a file; name it with --from"),
        (("evaluate", "nowhere"), "nowhere is no run"),
        (
            ("evaluate", "x", "--contaminate-seed", "3"),
            "--contaminate-seed 3 without --contaminate",
        ),
        (("evaluate", "x", "--block", f"{10**30}"), f"--block {10**30} does not fit into 64 bits"),
        (("bench", "layer", "--tokens", "8", f"{2**63}"), f"--tokens {2**63} does not fit into 64"),
        (("bench", "layer", "--shapes", f"8x{10**30}x8x4x2"), "give at most 18 digits"),
        (("generate", "nowhere", "--prompt", "x"), "nowhere is no run"),
        (("finetune", "nowhere", "--task", "sst2"), "nowhere is no run"),
        (("finetune", "nowhere", "--task", "sst9"), "sst9"),
        (("data", "prepare", "nosuch"), "data set 'nosuch' is not known"),
        (("data", "prepare", "wikitext103"), "wikitext103 needs a folder with wiki.train.tokens"),
        (("data", "prepare", "bytes", "--from", "nowhere"), "nowhere"),
        (("demo", "--steps", "3"), "--steps 3; fewer than 20 steps show no curve"),
        (("demo", "--steps", "-3"), "--steps -3; fewer than 20 steps show no curve"),
        (("models", "--json", "--markdown"), "--json and --markdown; give one of them"),
        (("train", "--list", "switch-nano"), "'switch-nano' has no effect with --list"),
        (("train", "switch-nano", "--keys", "--out", "x"), "--out x has no effect with --keys"),
        (("train", "switch-nano", "steps=many", "--keys"), "steps='many'"),
        (("train", "switch-nano", "lr=1", "--out", "x", "steps=3"), "all settings in one row"),
        (("bench", "layer", "--shapes", "nosuch"), "nosuch"),
        (("bench", "scaling", "--gpus", "8", "0"), "--gpus 0; it must be at least 1"),
        (("bench", "scaling", "--bandwidth", "inf"), "--bandwidth=inf; it must be positive and"),
        (("bench", "scaling", "--hop", "nan"), "--hop=nan; it must be 0 or more, and finite"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, monkeypatch, tmp_path, arguments, says):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("acmoe: ")
    assert err.count("\n") == 1
    assert says in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("generate", "--prompt", "a", "--", "--prompt"), "--prompt is no run"),
        (("generate", "x", "--prompt", "a", "--temperature", "-inf", "--top-p", "-inf"), "x is no"),
    ],
    ids=["after a lone --", "two equal values"],
)
def test_what_only_looks_like_an_option_may_be_repeated(
    capsys, monkeypatch, tmp_path, arguments, says
):
    monkeypatch.chdir(tmp_path)
    assert says in call(capsys, *arguments)[2]


def test_nothing_is_written_by_a_mistake(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    call(capsys, "train", "switch-nano", "model.top_k=99")
    assert list(tmp_path.iterdir()) == []


def test_keys_are_those_of_the_changed_recipe(capsys):
    code, out, _ = call(capsys, "train", "switch-nano", "steps=7", "--keys")
    assert code == 0 and "steps=7" in out.splitlines()


@pytest.mark.parametrize("setting", [f"model.dim={4 * 10**12}", f"model.hidden={10**13}"])
def test_a_model_too_large_for_the_memory_is_one_line_and_can_be_corrected(
    capsys, monkeypatch, tmp_path, setting
):
    monkeypatch.chdir(tmp_path)
    code, _, err = call(capsys, "train", "switch-nano", "data.limit=2000", setting)
    assert code == 1
    assert "acmoe: out of memory; use a smaller model" in err and "Traceback" not in err


@pytest.mark.parametrize("columns", ["40", "70", "80"])
def test_the_list_of_recipes_cuts_no_name(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = call(capsys, "train", "--list")
    assert code == 0 and "\u2026" not in out  # the character for cut text
    assert max(map(len, out.splitlines())) <= int(columns)
    assert set(recipes()) <= {word.strip(":") for word in out.split()}


def test_data_list_names_every_data_set(capsys, tmp_path):
    code, out, _ = call(capsys, "data", "list", "--root", str(tmp_path), "--json")
    found = {row["name"]: row["state"] for row in json.loads(out)}
    assert code == 0
    assert set(found) >= {"stdlib", "wikitext103", "enwik8", "sst2", "sst5", "banking77"}
    assert set(found.values()) == {"absent"}


def test_preparing_twice_does_the_work_once(capsys, tmp_path):
    prepare = ("data", "prepare", "stdlib", "--limit", "50000", "--root", str(tmp_path))
    assert "prepared in" in call(capsys, *prepare)[1]
    assert "already prepared, nothing to do" in call(capsys, *prepare)[1]


def test_data_that_replaces_other_data_says_so(capsys, tmp_path):
    (tmp_path / "text").write_text("a line of text\n" * 20)
    prepare = ("data", "prepare", "bytes", "--from", str(tmp_path / "text"))
    (tmp_path / "data" / "bytes").mkdir(parents=True)  # an empty folder is no data
    for more, replaced in (((), False), ((), False), (("--limit", "100"), True)):
        code, out, _ = call(capsys, *prepare, "--root", str(tmp_path / "data"), *more)
        assert code == 0
        assert out.endswith(", in place of what was there\n") is replaced


@pytest.mark.parametrize("columns", ["80", "40", None])  # None: as where stdout is a pipe
def test_data_list_breaks_no_address_and_no_command(capsys, monkeypatch, tmp_path, columns):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    _, out, _ = call(capsys, "data", "list")
    lines = out.splitlines()
    assert "enwik8: http://mattmahoney.net/dc/enwik8.zip, unzipped" in lines
    assert "  acmoe data prepare stdlib" in lines
    assert (
        "  acmoe data prepare banking77 --from hf  (downloads legacy-datasets/banking77)" in lines
    )
    assert "\u2026" not in out  # the character for cut text
    root = tmp_path / "a long name, so that a column would break the line of the command in two"
    _, out, _ = call(capsys, "data", "list", "--root", str(root))
    assert f"  acmoe data prepare stdlib --root '{root}'" in out.splitlines()


def test_which_says_what_runs_here(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = call(capsys, "bench", "--which")
    assert code == 0
    assert "experts" in out
    assert "torch" in out
    assert "update_average_and_scale" in out  # the longest name, which a column must not break


@pytest.mark.slow
def test_a_run_is_trained_evaluated_continued_and_spoken_with(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    logging.disable(logging.NOTSET)
    small = ("model.dim=16", "model.hidden=16", "model.heads=2", "model.repeats=2", "batch=4")
    short = ("steps=20", "warmup=2", "eval_every=10", "checkpoint_every=10", "data.limit=60000")
    train = ("train", "switch-nano-acmoe", *small, *short, "--out", "run")
    code, out, _ = call(capsys, *train)
    assert code == 0
    assert "done: 20 steps" in out
    code, out, _ = call(
        capsys,
        "evaluate",
        "run",
        "--statistics",
        "running",
        "batch",
        "--contaminate",
        "0.05",
        "--json",
    )
    figures = json.loads(out)["figures"]
    assert code == 0
    assert [(f["statistics"], f["contaminated"]) for f in figures] == [
        ("running", False),
        ("running", True),
        ("batch", False),
        ("batch", True),
    ]
    code, out, _ = call(capsys, "generate", "run", "--prompt", "def ", "--tokens", "5", "--json")
    assert code == 0
    assert json.loads(out)["prompt"] == "def "
    code, out, _ = call(capsys, *train)  # the same command finds everything done
    assert code == 0
    assert "done: 20 steps" in out
    code, _, err = call(capsys, "train", "switch-nano", *small, *short, "--out", "run")
    assert code == 2
    assert "model.router" in err


def test_a_command_of_one_process_refuses_torchrun(capsys, monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    code, out, err = call(capsys, "theory")
    assert (code, out) == (2, "")
    assert err == (
        "acmoe: `acmoe theory` runs in one process, and the launcher started 2; give it without "
        "torchrun\n"
    )


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the second: in the C locale
def test_a_terminal_without_unicode_gets_question_marks(monkeypatch, errors):
    raw = io.BytesIO()
    stdout = io.TextIOWrapper(raw, encoding="ascii", errors=errors)
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setenv("COLUMNS", "20")  # so narrow that rich cuts words off with ...
    with pytest.raises(SystemExit) as stop:
        main(["data", "list"])
    assert stop.value.code == 0
    assert b"?" in raw.getvalue() and b"+----" in raw.getvalue()


@pytest.fixture
def closed_pipe():
    """A text file at the writing end of a pipe whose reader has left."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", encoding="utf-8") as file:
        yield file


@pytest.mark.parametrize("arguments", [["doctor"], ["data", "list"], ["--help"]])
def test_a_reader_that_leaves_ends_a_command_without_a_word(
    capsys, monkeypatch, closed_pipe, arguments
):
    monkeypatch.setattr(sys, "stdout", closed_pipe)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert (stop.value.code, capsys.readouterr().err) == (0, "")


def test_a_command_goes_on_where_nobody_reads_its_progress(monkeypatch, closed_pipe):
    monkeypatch.setattr(sys, "stderr", closed_pipe)
    console = Console(stderr=True)
    with plain_output():
        console.print("10 of 20")
        console.print("20 of 20")
        print("wrote a file", file=sys.stderr, flush=True)
    assert sys.stderr is closed_pipe


def test_a_warning_of_a_command_is_one_line(capsys, monkeypatch):
    def warn(arguments):
        warning = UserWarning("another text;\n  figures are of that one")
        print(warnings.formatwarning(warning, UserWarning, "run.py", 7), end="")
        return 0

    monkeypatch.setattr("acmoe.cli._run", warn)
    expected = "acmoe: warning: another text; figures are of that one\n"
    assert call(capsys, "evaluate") == (0, expected, "")
    monkeypatch.setenv("LOCAL_RANK", "1")  # alone, it says nothing of torchrun
    assert call(capsys, "evaluate") == (0, expected, "")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")  # now the first process speaks
    assert call(capsys, "evaluate") == (0, "", "")


class FullDisk(io.StringIO):
    def flush(self):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_version_on_a_full_disk_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", FullDisk())
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 1
    assert capsys.readouterr().err == "acmoe: No space left on device\n"


def test_a_command_runs_where_its_output_is_closed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)  # as Python starts after `>&- 2>&-`
    monkeypatch.setattr(sys, "stderr", None)
    with pytest.raises(SystemExit) as stop:
        main(["data", "list"])
    opened = sys.stdout, sys.stderr
    for file in opened:
        file.close()
    assert stop.value.code == 0
