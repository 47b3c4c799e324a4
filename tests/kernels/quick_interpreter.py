"""Triton's interpreter without work that it repeats: tests of kernels take under half the time.

Every function that a kernel calls patches triton.language once more, and every conversion builds a
table of types. Both are done once here. The interpreter also checks each sum and product of 32-bit
integers for overflow, by a second one in 64 bits, which takes as long as everything else together;
`without_overflow_checks` turns that off.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from types import ModuleType
from typing import Any


def quicken(interpreter: ModuleType) -> None:
    """Change triton.runtime.interpreter; a version that has other parts is left as it is."""
    if hasattr(interpreter, "_LangPatchScope") and hasattr(interpreter, "_patch_lang"):
        _patch_once(interpreter)
    if hasattr(interpreter, "_get_np_dtype"):
        _remember_types(interpreter)


def _patch_once(interpreter: ModuleType) -> None:
    """Patch the language once in a launch for each set of its modules that a function can see."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    language = {id(module) for module in (interpreter.tl, interpreter.tl.core)}
    done: set[frozenset[int]] = set()
    seen_by: dict[int, frozenset[int]] = {}  # the globals of a module's functions are one dict

    def patch_once(fn: Any) -> Any:
        place = id(fn.__globals__)
        if place not in seen_by:
            seen_by[place] = frozenset(map(id, fn.__globals__.values())) & language
        if seen_by[place] in done:
            return interpreter._LangPatchScope()
        done.add(seen_by[place])
        return patch(fn)

    def launch_once(self: Any, *arguments: Any, **options: Any) -> Any:
        done.clear()  # the launch before has restored the language
        return launch(self, *arguments, **options)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_once


def _remember_types(interpreter: ModuleType) -> None:
    convert, known = interpreter._get_np_dtype, {}

    def remembered(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = convert(dtype)
        return known[name]

    interpreter._get_np_dtype = remembered


@contextlib.contextmanager
def without_overflow_checks(interpreter: ModuleType) -> Iterator[None]:
    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if not hasattr(options, "sanitize_overflow"):
        yield
        return
    builder.options = dataclasses.replace(options, sanitize_overflow=False)
    try:
        yield
    finally:
        builder.options = options
