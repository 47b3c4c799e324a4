"""Triton's interpreter without work that it repeats: tests of kernels take under half the time.

Every function that a kernel calls patches triton.language once more, every conversion builds a
table of types, and every value builds its type and wraps its shape. All are done once here, what
operators decide too (quick_operators.py), and bfloat16 is converted to float32 and back by a shift
of bits. The interpreter also checks each sum and product of 32-bit integers for overflow, by a
second one in 64 bits, which takes as long as everything else together; `without_overflow_checks`
turns that off.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
from quick_operators import OPERATORS, Operands


def quicken(interpreter: ModuleType) -> None:
    """Change triton.runtime.interpreter; a version that has other parts is left as it is."""
    if hasattr(interpreter, "_LangPatchScope") and hasattr(interpreter, "_patch_lang"):
        _patch_once(interpreter)
    if hasattr(interpreter, "_patch_builtin") and hasattr(interpreter, "interpreter_semantic"):
        _list_builtins_once(interpreter, Operands(interpreter))
    if hasattr(interpreter, "_get_np_dtype"):
        _remember_types(interpreter)
    if hasattr(interpreter, "_validate_np_data_size"):
        _remember_sizes(interpreter)
    if hasattr(interpreter, "_convert_float"):
        _convert_by_shifts(interpreter)
    if hasattr(interpreter, "interpreter_semantic"):
        core, semantic = interpreter.tl.core, type(interpreter.interpreter_semantic)
        _share_block_types(core.block_type)
        _share_parts(core.tensor)
        _compare_at_once(core.dtype)
        _unwrap_at_once(core)
        _skip_broadcasts(semantic)
        _remember_promotions(semantic)


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


def _list_builtins_once(interpreter: ModuleType, operands: Operands) -> None:
    """Keep the functions that replace the language's own, and let each call what it stands for.

    Triton looks through its modules at every launch. Its functions are called by a wrapper that
    looks for `_semantic` among the arguments, which is always there.
    """
    semantic, known = interpreter.interpreter_semantic, {}

    def with_semantic(member: Any) -> Any:
        function = getattr(member, "__wrapped__", member)

        def call(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*arguments, **options)

        return call

    def patch(owner: Any, builder: Any, scope: Any) -> None:
        if owner not in known:
            members = inspect.getmembers(owner, interpreter.tl.core.is_builtin)
            calls = [(name, with_semantic(member)) for name, member in members]
            if owner is interpreter.tl.core.tensor:
                calls = [
                    (name, operands.quick(call) if name in OPERATORS else call)
                    for name, call in calls
                ]
            known[owner] = calls
        for name, call in known[owner]:
            scope.set_attr(owner, name, call)

    interpreter._patch_builtin = patch


def _remember_types(interpreter: ModuleType) -> None:
    convert, known = interpreter._get_np_dtype, {}

    def remembered(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = convert(dtype)
        return known[name]

    interpreter._get_np_dtype = remembered


def _remember_sizes(interpreter: ModuleType) -> None:
    """Keep how many bytes a number of each type may take; each new value is checked for it."""
    fits, known = interpreter._validate_np_data_size, {}

    def remembered(data: Any, dtype: Any) -> bool:
        place = (data.itemsize, dtype.name)
        if place not in known:
            known[place] = fits(data, dtype)
        return known[place]

    interpreter._validate_np_data_size = remembered


def _convert_by_shifts(interpreter: ModuleType) -> None:
    """Convert bfloat16, the upper half of a float32, by a shift; narrowing cuts the lower half off.

    The interpreter does the same in a loop over the bits of the mantissa. It gives subnormal
    numbers other values than a shift, so they are left to it.
    """
    convert = interpreter._convert_float

    @functools.wraps(convert)
    def convert_or_shift(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        names = (source.name, target.name)
        if rounding is None and names == ("bf16", "fp32"):
            bits = np.asarray(data).view(np.uint16)
            if not _subnormal(bits & 0x7FFF, 0x0080):
                return bits.astype(np.uint32, order="C") << 16
        if rounding is None and names == ("fp32", "bf16"):
            bits = np.asarray(data).view(np.uint32)
            if not _subnormal(bits & 0x7FFFFFFF, 0x00800000):
                return (bits >> 16).astype(np.uint16, order="C")
        return convert(data, source, target, rounding)

    interpreter._convert_float = convert_or_shift


def _subnormal(magnitude: Any, smallest: int) -> bool:
    return bool(((magnitude != 0) & (magnitude < smallest)).any())


def _share_block_types(block_type: Any) -> None:
    """Let equal block types be one object, and their shapes too. Nothing changes a type."""
    initialise, known, shapes = block_type.__init__, {}, {}

    def shared(cls: Any, element_ty: Any, shape: Any, *others: Any, **options: Any) -> Any:
        if cls is not block_type:  # Gluon's, which has a layout
            return object.__new__(cls)
        sizes = tuple(getattr(size, "value", size) for size in shape)
        place = (element_ty.name, getattr(element_ty, "address_space", None), sizes)
        if place not in known:
            known[place] = object.__new__(cls)
        return known[place]

    def initialise_once(self: Any, element_ty: Any, shape: Any) -> None:
        if "name" not in vars(self):
            initialise(self, element_ty, shape)
            self.shape = shapes.setdefault(tuple(self.shape), self.shape)

    block_type.__new__, block_type.__init__ = shared, initialise_once


def _share_parts(tensor: Any) -> None:
    """Keep a tensor's wrapped shape and the like with its type: they depend on nothing else."""
    initialise = tensor.__init__

    def initialise_from_type(self: Any, handle: Any, type: Any) -> None:
        parts = vars(type).get("parts_of_a_tensor")
        if parts is None:
            initialise(self, handle, type)
            type.parts_of_a_tensor = {**vars(self)}
            del type.parts_of_a_tensor["handle"]
        else:
            self.__dict__ = {**parts, "handle": handle}

    tensor.__init__ = initialise_from_type


def _compare_at_once(dtype: Any) -> None:
    equal = dtype.__eq__
    dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _unwrap_at_once(core: Any) -> None:
    unwrap = core._unwrap_if_constexpr
    unwrapped = {bool, int, float, str, type(None), core.dtype, core.block_type, core.tensor}
    core._unwrap_if_constexpr = lambda it: it if type(it) in unwrapped else unwrap(it)


def _skip_broadcasts(semantic: Any) -> None:
    broadcast = semantic.broadcast_impl_value

    def broadcast_unless_equal(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_unless_equal


def _remember_promotions(semantic: Any) -> None:
    promote, known = semantic.computation_type_impl, {}

    def remembered(self: Any, left: Any, is_scalar: bool, right: Any, *others: bool) -> Any:
        place = (left.name, is_scalar, right.name, *others)
        if place not in known:
            known[place] = promote(self, left, is_scalar, right, *others)
        return known[place]

    semantic.computation_type_impl = remembered


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
