"""Compile the C sources with the machine's compiler, once, and load the result.

The shared library is in $XDG_CACHE_HOME/acmoe/native, by default ~/.cache/acmoe/native. Its name
has a digest of the sources, the options, the compiler and the instructions of the CPU, so that
machines which share a home folder do not run each other's code. It also has a digest of the
library's bytes: to load one that a full disk or a power cut left incomplete would end the process.
If the folder cannot be written, each process compiles for itself.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from acmoe.config.environment import native_requested
from acmoe.storage.user_cache import user_cache

SOURCES = Path(__file__).parent / "source"
CPU = "-march=native"  # instructions of this CPU
# -ffp-contract: a product may be added without rounding it first. -fopenmp-simd: vectors, and no
# threads: those of a second OpenMP runtime would compete with torch's.
OPTIONS = (
    *("-std=c11", "-O3", "-fPIC", "-shared", "-fopenmp-simd", "-fno-math-errno"),
    *("-fno-trapping-math", "-ffp-contract=fast", CPU, "-Wno-psabi"),
)
_COMPILERS = ("cc", "gcc", "clang")
_SECONDS = 120  # a compiler that takes longer counts as missing

_log = logging.getLogger("acmoe")


class BuildError(Exception):
    """The sources were not compiled or loaded; the message is the reason.

    expected: True if no compiler is installed, or if ACMOE_NATIVE=never forbids to compile.
    """

    def __init__(self, reason: str, *, expected: bool = False) -> None:
        super().__init__(reason)
        self.expected = expected


def build() -> ctypes.CDLL:
    """Return the shared library, compiled if it is not in the cache; raise BuildError."""
    if native_requested() == "never":
        raise BuildError("ACMOE_NATIVE=never", expected=True)
    compiler = find_compiler()
    name = identity(compiler)
    for path in _kept(name):
        try:
            if _named(name, path) != path.name:
                raise OSError("its content has changed")
            return ctypes.CDLL(str(path))
        except OSError as error:
            _log.warning("%s cannot be loaded (%s); it is compiled again", path, error)
            _remove(path)
    return _compiled(compiler, name)


def find_compiler() -> list[str]:
    """Return the command of the C compiler: that of $CC, or the first on the path."""
    try:
        given = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise BuildError(f"CC={os.environ['CC']!r} is no command: {error}") from error
    for command in [given] if given else [[name] for name in _COMPILERS]:
        found = shutil.which(command[0])
        if found is not None:
            return [found, *command[1:]]
    if given:
        raise BuildError(f"the C compiler {given[0]!r}, named by CC, was not found")
    raise BuildError(f"no C compiler was found ({', '.join(_COMPILERS)})", expected=True)


def folder() -> Path:
    """Return the folder of compiled libraries, which need not exist."""
    return user_cache("native")


def _kept(name: str) -> list[Path]:
    """Return the libraries of this identity in the cache.

    There are several only if compilers of the same version text write different bytes.
    """
    try:
        return sorted(folder().glob(f"{name}-*.so"))
    except OSError as error:
        _log.warning("%s cannot be read (%s); the C kernels are compiled", folder(), error)
        return []


def _named(name: str, library: Path) -> str:
    """Return the name under which a library is kept: its identity, and a digest of its bytes."""
    return f"{name}-{hashlib.sha256(library.read_bytes()).hexdigest()[:16]}.so"


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def identity(compiler: list[str]) -> str:
    """Return a name of what is compiled, by what, and for which CPU."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    version = _run([*compiler, "--version"])
    for text in (*OPTIONS, *compiler, version, platform.machine(), _instructions()):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:24]


@functools.cache
def _instructions() -> str:
    """Return a text that differs between CPUs with different instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = [line for line in lines if line.lower().startswith(("flags", "features", "cpu\t"))]
    return "\n".join([torch.backends.cpu.get_cpu_capability(), platform.processor(), *flags[:1]])


def _compiled(compiler: list[str], name: str) -> ctypes.CDLL:
    """Compile, load the library and keep it."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="acmoe-native-", ignore_cleanup_errors=True) as drafts:
        draft = Path(drafts) / "kernels.so"
        _run_compiler(compiler, draft)
        if not draft.exists():
            raise BuildError(f"the C compiler {compiler[0]} wrote no library")
        kept = _keep(draft, name)
        found = _loaded(kept, draft)  # a loaded library needs its file no longer
    took = time.perf_counter() - began
    _log.info("compiled the C kernels with %s in %.1f s: %s", compiler[0], took, kept)
    return found


def _run_compiler(compiler: list[str], to: Path) -> None:
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    rest = [*sources, "-o", str(to), "-lm"]
    try:
        _run([*compiler, *OPTIONS, *rest])
    except BuildError as error:  # a compiler that does not know this CPU
        _log.info("the C kernels are compiled for any CPU of this kind, without %s: %s", CPU, error)
        _run([*compiler, *[one for one in OPTIONS if one != CPU], *rest])


def _keep(draft: Path, name: str) -> Path:
    """Move the draft to the folder of libraries in one step; return where the library is."""
    try:
        path = folder() / _named(name, draft)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        try:
            shutil.copyfile(draft, beside)
            os.replace(beside, path)
        finally:
            Path(beside).unlink(missing_ok=True)
    except OSError as error:
        _log.warning(
            "the C kernels are not kept for the next process: %s; set XDG_CACHE_HOME to a folder "
            "that can be written",
            error,
        )
        return draft
    return path


def _loaded(kept: Path, draft: Path) -> ctypes.CDLL:
    """Load the kept library, or the draft if the folder's file system forbids programs."""
    try:
        return ctypes.CDLL(str(kept))
    except OSError as error:
        if kept != draft:
            return _loaded(draft, draft)
        raise BuildError(f"the compiled library cannot be loaded: {error}") from error


def _run(command: list[str]) -> str:
    """Return what a command prints; raise BuildError with its first line of errors."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C compiler {command[0]} cannot run: {error}") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        first = next((line for line in lines if "error" in line), lines[0])
        raise BuildError(f"the C compiler {command[0]} failed: {first.strip()}")
    return done.stdout
