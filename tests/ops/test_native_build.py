"""Compiling the C kernels: once per machine, and never in the way of those who cannot."""

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from acmoe import MoE
from acmoe.errors import UserError
from acmoe.ops.dispatch import record_choices
from acmoe.ops.native import build as building
from acmoe.ops.native import library
from acmoe.ops.native.build import BuildError, build, find_compiler, folder, identity

NONE = library.missing()
needs_compiler = pytest.mark.skipif(NONE is not None, reason=f"no C kernels here: {NONE}")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ACMOE_NATIVE", raising=False)
    return tmp_path / "cache" / "acmoe" / "native"


@functools.cache
def compiled() -> bytes:
    """Return the library, compiled once for all tests."""
    with tempfile.TemporaryDirectory() as drafts:
        building._run_compiler(find_compiler(), Path(drafts) / "kernels.so")
        return (Path(drafts) / "kernels.so").read_bytes()


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that has the library at hand."""
    library = compiled()
    monkeypatch.setattr(building, "_run_compiler", lambda _, to: to.write_bytes(library))


def program(path: Path, text: str) -> str:
    """Write a program in shell, and return its path."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@needs_compiler
def test_the_second_build_compiles_nothing(
    quick_compiler: None, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert folder() == own_cache and not own_cache.exists()
    build()
    (kept,) = own_cache.iterdir()
    digest = hashlib.sha256(kept.read_bytes()).hexdigest()[:16]
    assert kept.name == f"{identity(find_compiler())}-{digest}.so"
    monkeypatch.setattr(building, "_compiled", None)
    assert build().acmoe_sort_rows


@needs_compiler
def test_other_sources_options_and_cpus_have_other_libraries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = find_compiler()
    names = {identity(compiler)}
    with monkeypatch.context() as patch:
        patch.setattr(building, "OPTIONS", (*building.OPTIONS, "-g"))
        names.add(identity(compiler))
    with monkeypatch.context() as patch:
        patch.setattr(building, "_instructions", lambda: "another CPU")
        names.add(identity(compiler))
    shutil.copytree(building.SOURCES, tmp_path / "source")
    (tmp_path / "source" / "sort.c").write_text("/* other */\n")
    with monkeypatch.context() as patch:
        patch.setattr(building, "SOURCES", tmp_path / "source")
        names.add(identity(compiler))
    assert len(names) == 4


@needs_compiler
def test_a_damaged_library_is_compiled_again(
    quick_compiler: None, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build()
    (path,) = own_cache.iterdir()
    whole = path.read_bytes()
    # Unlike b"no library", half of one would be loaded, and end the process by a bus error.
    for damaged in (b"no library", whole[: len(whole) // 2]):
        path.unlink()  # the library in this process keeps its file
        path.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level("WARNING", "acmoe"):
            assert build().acmoe_sort_rows
        assert "its content has changed); it is compiled again" in caplog.text
        (kept,) = own_cache.iterdir()
        assert kept.name == building._named(identity(find_compiler()), kept)


@needs_compiler
def test_a_folder_without_programs_costs_the_next_process_a_build(
    quick_compiler: None, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = ctypes.CDLL

    def refused(path: str) -> ctypes.CDLL:
        if Path(path).parent == own_cache:  # as on a file system that is mounted with noexec
            raise OSError(f"{path}: failed to map segment from shared object")
        return load(path)

    monkeypatch.setattr(ctypes, "CDLL", refused)
    for _ in range(2):
        assert build().acmoe_sort_rows


@needs_compiler
def test_a_folder_that_cannot_be_written_costs_the_next_process_a_build(
    quick_compiler: None, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own_cache.parent.mkdir(parents=True)
    own_cache.write_text("a file where the folder should be")
    with caplog.at_level("WARNING", "acmoe"):
        assert build().acmoe_sort_rows
    assert "are not kept for the next process" in caplog.text


@needs_compiler
def test_two_threads_may_build_at_once(own_cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: build(), range(4)))
    assert all(one.acmoe_sort_rows for one in found)
    assert [path.suffix for path in own_cache.iterdir()] == [".so"]


@needs_compiler
def test_two_processes_may_build_at_once(own_cache: Path) -> None:
    code = "from acmoe.ops.native.build import build; print(build().acmoe_sort_rows is not None)"
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [one.communicate()[0].strip() for one in both] == ["True", "True"]
    assert [path.suffix for path in own_cache.iterdir()] == [".so"]


@needs_compiler
def test_the_sources_have_no_warnings(tmp_path: Path) -> None:
    sources = sorted(str(path) for path in building.SOURCES.glob("*.c"))
    strict = ["-Wall", "-Wextra", "-Werror", "-o", str(tmp_path / "kernels.so")]
    done = subprocess.run(
        [*find_compiler(), *building.OPTIONS, *strict, *sources, "-lm"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@needs_compiler
def test_no_call_reads_or_writes_beyond_its_memory(tmp_path: Path) -> None:
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]
    options = [one for one in building.OPTIONS if one not in ("-shared", "-fPIC")]
    sources = sorted(str(path) for path in building.SOURCES.glob("*.c"))
    harness = [str(Path(__file__).with_name("native_harness.c")), f"-I{building.SOURCES}"]
    to = str(tmp_path / "harness")
    command = [*find_compiler(), *options, *checks, *harness, *sources, "-o", to, "-lm"]
    built = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in built.stderr:
        pytest.skip("this compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([to], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("all calls are right", 0), done.stderr[-2000:]


def test_without_a_compiler_the_reason_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.INFO, "acmoe"):
        found = library.Functions()
    assert found.reason == "no C compiler was found (cc, gcc, clang)"
    assert [record.levelname for record in caplog.records] == ["INFO"]
    monkeypatch.setenv("CC", "icx -O1")
    with pytest.raises(BuildError, match="the C compiler 'icx', named by CC, was not found"):
        build()


def test_a_compiler_that_fails_is_named_with_its_first_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = program(
        tmp_path / "cc", '[ "$1" = --version ] && exit 0\necho "x.c:1: error: bad" >&2; exit 1'
    )
    monkeypatch.setenv("CC", bad)
    found = library.Functions()
    assert found.reason == f"the C compiler {bad} failed: x.c:1: error: bad"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with pytest.raises(AttributeError):
        found.no_such_function  # noqa: B018


def test_a_compiler_that_writes_no_library_is_no_error_of_the_layer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", program(tmp_path / "cc", "exit 0"))
    assert "no library" in (library.Functions().reason or "")


def test_nothing_that_fails_keeps_a_layer_from_running(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", 'gcc "')
    assert "CC='gcc \"' is no command" in (library.Functions().reason or "")
    monkeypatch.delenv("CC")
    empty = ctypes.CDLL(None)  # a library without our functions
    monkeypatch.setattr(library, "build", lambda: empty)
    assert "acmoe_" in (library.Functions().reason or "")

    def refuse() -> ctypes.CDLL:
        raise FileNotFoundError("no usable temporary folder")

    monkeypatch.setattr(library, "build", refuse)
    assert library.Functions().reason == "no usable temporary folder"


@needs_compiler
def test_a_cache_that_cannot_be_read_is_no_error(
    quick_compiler: None,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    build()
    read = Path.read_bytes

    def refused(path: Path) -> bytes:
        if path.parent == own_cache:
            raise PermissionError(f"{path} is another user's")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refused)
    with caplog.at_level("WARNING", "acmoe"):
        assert build().acmoe_sort_rows
    assert "another user's" in caplog.text


def test_an_option_leaves_them_out(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    monkeypatch.setenv("ACMOE_NATIVE", "never")
    assert library.Functions().reason == "ACMOE_NATIVE=never"
    assert not own_cache.exists()
    monkeypatch.setenv("ACMOE_NATIVE", "always")
    for read in (build, library.Functions):
        with pytest.raises(UserError, match="ACMOE_NATIVE='always' is unknown; choose auto or n"):
            read()


def test_a_layer_without_them_runs_on_other_kernels(no_native: None) -> None:
    moe = MoE(dim=4, hidden=4, num_experts=3, top_k=2)
    with torch.no_grad(), record_choices() as choices:
        moe(torch.randn(2, 4))
    assert {one.kernel for one in choices} == {"cpu"}
    assert {one.reasons["native"] for one in choices} == {"a test does without"}


def test_without_a_home_folder_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert folder() == Path(os.devnull) / "acmoe" / "native"


@needs_compiler
def test_a_compiler_that_does_not_know_the_cpu_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    real = " ".join(find_compiler())
    text = (
        f'case "$*" in *march=native*) echo "error: bad march" >&2; exit 1;; esac\nexec {real} "$@"'
    )
    monkeypatch.setenv("CC", program(tmp_path / "cc", text))
    with caplog.at_level("INFO", "acmoe"):
        assert build().acmoe_sort_rows
    assert "without -march=native" in caplog.text


def test_the_path_of_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert folder() == Path(os.path.expanduser("~")) / ".cache" / "acmoe" / "native"
