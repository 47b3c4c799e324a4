"""Run Gluon kernels on the CPU: `emulate(kernel)[grid](*arguments, **constexprs)`.

The Python function of a kernel runs once for each program of the grid, one program after the other.
The globals that it uses are replaced by emulations: of types (gluon_values), memory (gluon_memory),
mbarriers (gluon_barrier), asynchronous copies and MMAs (gluon_async) and partitions of warps
(gluon_program). This module has the reductions, the replacement of names, and the launch.
"""

import itertools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton.experimental.gluon.language as gl

import gluon_async
from gluon_memory import pointer_to
from gluon_program import Program, current_partition, yield_point
from gluon_values import EMULATED, Value, as_value, cast, emulates, permute, reshape

_LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
_ASM: dict[str, Callable[..., Any]] = {}


def register_asm(text: str, function: Callable[..., Any]) -> None:
    """Emulate the inline assembly `text` by `function`, from torch tensors to torch tensors."""
    _ASM[text] = function


@emulates("inline_asm_elementwise")
def inline_asm_elementwise(
    asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int
) -> Any:
    if asm not in _ASM:
        raise NotImplementedError(
            f"no function is registered for the assembly {asm!r}: register_asm"
        )
    results = _ASM[asm](*(as_value(x).data for x in args))
    if not isinstance(dtype, tuple | list):
        return _typed(results, dtype, args)
    return tuple(_typed(data, one, args) for data, one in zip(results, dtype, strict=True))


def _typed(data: torch.Tensor, dtype: Any, args: Any) -> Value:
    return Value(data, dtype, as_value(args[0]).layout)


def _slice(x: Value, axis: int) -> Any:
    return gl.SliceLayout(axis, x.layout) if x.layout is not None and x.data.ndim > 1 else None


def _reduced(x: Value, data: torch.Tensor, axis: int | None, keep_dims: bool, dtype: Any) -> Value:
    """Return a reduction's result; with keep_dims its layout is the block's, else a slice of it."""
    if axis is None:
        return Value(data, dtype)
    axis %= x.data.ndim
    return (
        Value(data.unsqueeze(axis), dtype, x.layout)
        if keep_dims
        else Value(data, dtype, _slice(x, axis))
    )


@emulates("sum")
def sum_(x: Value, axis: int | None = None, keep_dims: bool = False, dtype: Any = None) -> Value:
    if dtype is None and (
        x.dtype == gl.bfloat16 or (x.dtype.primitive_bitwidth < 32 and x.dtype.is_int())
    ):
        dtype = gl.float32 if x.dtype == gl.bfloat16 else gl.int32
    dtype = dtype or x.dtype
    data = cast(x, dtype).data
    total = cast(Value(data.sum() if axis is None else data.sum(axis), dtype), dtype)
    return _reduced(x, total.data, axis, keep_dims, dtype)


def _extreme(reduction: Callable[..., Any]) -> Callable[..., Any]:
    def apply(
        x: Value,
        axis: int | None = None,
        return_indices: bool = False,
        *_: Any,
        keep_dims: bool = False,
        **__: Any,
    ) -> Any:
        data, at = reduction(x.data.reshape(-1), 0) if axis is None else reduction(x.data, axis)
        best = _reduced(x, data, axis, keep_dims, x.dtype)
        if not return_indices:
            return best
        return best, _reduced(x, at.to(torch.int32), axis, keep_dims, gl.int32)

    return apply


EMULATED |= {"max": _extreme(torch.max), "min": _extreme(torch.min)}


@emulates("reduce")
def reduce(
    x: Any, axis: int | None, combine_fn: Callable[..., Any], keep_dims: bool = False
) -> Any:
    """Reduce by combining the two halves of the axis elementwise, as a tree."""
    parts = list(x) if isinstance(x, tuple | list) else [x]
    first = parts[0]
    along = 0 if axis is None else axis
    if axis is None:
        parts = [reshape(part, part.data.numel()) for part in parts]
    while parts[0].data.shape[along] > 1:
        half = parts[0].data.shape[along] // 2
        lows = [Value(p.data.narrow(along, 0, half), p.dtype) for p in parts]
        highs = [Value(p.data.narrow(along, half, half), p.dtype) for p in parts]
        combined = combine_fn(*lows, *highs)
        parts = list(combined) if isinstance(combined, tuple | list) else [combined]
    done = [_reduced(first, p.data.squeeze(along), axis, keep_dims, p.dtype) for p in parts]
    return tuple(done) if isinstance(x, tuple | list) else done[0]


for _name in ("sum", "max", "min", "reduce", "exp", "exp2", "log2", "abs", "expand_dims"):
    setattr(
        Value, _name, lambda self, *args, _f=EMULATED[_name], **options: _f(self, *args, **options)
    )
for _name, _method in (("permute", permute), ("reshape", reshape), ("trans", permute)):
    setattr(Value, _name, _method)


def _range(*bounds: Any, **_hints: Any) -> Iterator[Any]:
    """Return an iterator over int32 scalars, the type of a loop counter on the GPU."""
    return map(as_value, range(*(int(bound) for bound in bounds)))


def _static_range(*bounds: Any) -> range:
    return range(*(int(bound) for bound in bounds))


def _static_assert(condition: Any, message: str = "") -> None:
    if not condition:
        raise AssertionError(f"static_assert: {message}")


def _no_op(*_: Any, **__: Any) -> None:
    """Ignore a hint or a print: it does not change what a kernel computes."""


EMULATED |= {
    "constexpr": lambda value: value,
    "range": _range,
    "static_range": _static_range,
    "static_assert": _static_assert,
    "device_assert": lambda condition, message="", mask=None: _static_assert(
        condition.data.all(), message
    ),
    "static_print": _no_op,
    "device_print": _no_op,
    "assume": _no_op,
    "thread_barrier": yield_point,
    "barrier": lambda cluster=False: yield_point(),
    "multiple_of": lambda x, _: x,
    "max_contiguous": lambda x, _: x,
    "max_constancy": lambda x, _: x,
    "to_tensor": as_value,
    "program_id": lambda axis: as_value(current_partition().program.index[axis]),
    "num_programs": lambda axis: as_value(current_partition().program.grid[axis]),
    "num_warps": lambda: current_partition().num_warps,
    "num_ctas": lambda: 1,
}


@emulates("warp_specialize")
def warp_specialize(
    functions_and_args: Any, worker_num_warps: Any, worker_num_regs: Any = None
) -> Any:
    return current_partition().program.specialize(functions_and_args, worker_num_warps)


_BUILTINS = {"range": _range, "max": EMULATED["maximum"], "min": EMULATED["minimum"]}
_emulated: dict[Any, Any] = {}


class _EmulatedModule:
    """A module of Triton as a kernel sees it: its attributes are emulated."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        key = f"{self._module.__name__.rsplit('.')[-1]}.{name}"
        if not hasattr(self._module, name):  # a name from another version of Triton
            return EMULATED[key if key in EMULATED else name]
        return _emulated_value(getattr(self._module, name))


def _emulated_value(value: Any) -> Any:
    """Return the emulation of a global of the kernel's module, or the value itself."""
    if isinstance(value, gl.constexpr):
        return value.value
    if isinstance(value, types.ModuleType):
        return _EmulatedModule(value) if value.__name__.startswith("triton.") else value
    module, name = str(getattr(value, "__module__", "")), getattr(value, "__name__", "")
    if module.startswith("triton.") and not isinstance(value, gl.dtype):
        for key in (f"{module.rsplit('.')[-1]}.{name}", name):
            if key in EMULATED:
                return EMULATED[key]
        if hasattr(value, "__triton_builtin__") and isinstance(value, types.FunctionType):
            raise NotImplementedError(f"{module}.{name} is not emulated")
    if getattr(value, "__triton_aggregate__", False):
        return _aggregate(value)
    if type(value).__name__ in ("GluonJITFunction", "JITFunction", "InterpretedFunction"):
        return _emulated_function(value.fn)
    return value


def _aggregate(cls: Any) -> type:
    """Return a plain class with the aggregate's methods, whose fields are emulated values."""
    if cls not in _emulated:
        start = cls.hash_attrs[0]
        written = not hasattr(getattr(start, "fn", start), "__triton_builtin__")
        members = {name: member for name, member in vars(cls).items() if not name.startswith("_")}
        methods = {name: _method(member) for name, member in members.items()}
        methods["__init__"] = _method(start) if written else _set_fields
        methods["fields"] = tuple(getattr(cls, "__annotations__", ()))
        _emulated[cls] = type(cls.__name__, (), methods)
    return _emulated[cls]


def _set_fields(self: Any, *values: Any, **named: Any) -> None:
    vars(self).update(dict(zip(self.fields, values, strict=False)) | named)


def _method(member: Any) -> Any:
    if isinstance(member, staticmethod):
        return staticmethod(_method(member.__func__))
    inner = getattr(member, "fn", member)
    return _emulated_function(inner) if isinstance(inner, types.FunctionType) else member


def _global_names(code: types.CodeType) -> set[str]:
    nested = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*map(_global_names, nested))


def _emulated_function(function: types.FunctionType) -> types.FunctionType:
    """Return a copy of the function with its globals and closure replaced by emulations."""
    if function not in _emulated:
        names = {"__builtins__": __builtins__} | _BUILTINS
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        defaults = tuple(map(_emulated_value, function.__defaults__ or ()))
        copy = types.FunctionType(function.__code__, names, function.__name__, defaults, cells)
        copy.__kwdefaults__ = {
            k: _emulated_value(v) for k, v in (function.__kwdefaults__ or {}).items()
        }
        _emulated[function] = copy
        for name in _global_names(function.__code__) & function.__globals__.keys():
            names[name] = _emulated_value(function.__globals__[name])
        for cell, outer in zip(cells, function.__closure__ or (), strict=True):
            cell.cell_contents = _emulated_value(outer.cell_contents)
    return _emulated[function]


def _argument(value: Any, is_constexpr: bool) -> Any:
    """Convert an argument of the launch to what the kernel sees: pointers, descriptors, scalars."""
    if is_constexpr or value is None:
        return getattr(value, "value", value) if isinstance(value, gl.constexpr) else value
    if isinstance(value, torch.Tensor):
        return pointer_to(value)
    if hasattr(value, "block_shape"):
        return gluon_async.descriptor(value)
    if isinstance(value, tuple | list):
        return tuple(_argument(item, False) for item in value)
    return as_value(value)


class emulate:  # noqa: N801
    """`emulate(kernel, seed=0)[grid](...)` runs on the CPU what `kernel[grid](...)` runs on a GPU.

    The seed determines the schedule of the partitions.
    """

    def __init__(self, kernel: Any, seed: int = 0) -> None:
        self.kernel, self.seed = kernel, seed

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **named: self._launch(grid, arguments, named)

    def _launch(self, grid: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        parameters = self.kernel.params
        unknown = named.keys() - {p.name for p in parameters} - set(_LAUNCH_OPTIONS)
        if unknown:
            raise TypeError(f"{self.kernel.fn.__name__} takes no {', '.join(sorted(unknown))}")
        bound = dict(zip((p.name for p in parameters), arguments, strict=False)) | named
        converted = {
            p.name: _argument(bound[p.name], p.is_constexpr) for p in parameters if p.name in bound
        }
        grid = grid(bound) if callable(grid) else grid
        sizes = (*grid, 1, 1)[:3]
        function = _emulated_function(self.kernel.fn)
        for number, index in enumerate(itertools.product(*map(range, sizes[::-1]))):
            seed = self.seed * math.prod(sizes) + number
            program = Program(index[::-1], sizes, named.get("num_warps", 4), seed)
            program.run(lambda: function(**converted))
