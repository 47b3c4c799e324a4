"""Values of an emulated Gluon kernel: torch tensors with Triton's types, and their functions.

A block carries its layout. An operation on two blocks with different known layouts raises, as it
does in the compiler. A layout that only the compiler can infer (after reshape, join, ...) is None
and matches every other. Memory and results that are not yet written are poisoned: all their bytes
are 0xFF, which is NaN as a float.
"""

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton.experimental.gluon.language as gl
from triton.language.semantic import TritonSemantic

POISON = 0xFF
TORCH = {
    gl.int1: torch.bool,
    gl.int8: torch.int8,
    gl.int16: torch.int16,
    gl.int32: torch.int32,
    gl.int64: torch.int64,
    gl.uint8: torch.uint8,
    gl.uint16: torch.uint16,
    gl.uint32: torch.uint32,
    gl.float8e4nv: torch.float8_e4m3fn,
    gl.float8e5: torch.float8_e5m2,
    gl.float16: torch.float16,
    gl.bfloat16: torch.bfloat16,
    gl.float32: torch.float32,
    gl.float64: torch.float64,
}
TRITON = {torch_dtype: dtype for dtype, torch_dtype in TORCH.items()}
# Storage of registers: torch has little arithmetic on wide unsigned integers, so int64 mod 2^bits.
REGISTER_DTYPE = TORCH | {gl.uint16: torch.int64, gl.uint32: torch.int64}
_SEMANTIC = TritonSemantic(None)
EMULATED: dict[str, Any] = {}


def emulates(*names: str) -> Callable[[Any], Any]:
    """Register the emulation of the Gluon functions `names` ("name" or "module.name")."""

    def register(function: Any) -> Any:
        EMULATED.update(dict.fromkeys(names, function))
        return function

    return register


def poison(shape: Any, dtype: Any) -> torch.Tensor:
    """Return a tensor for values that were not written yet: NaN, or all bits set in integers."""
    full = torch.full((*shape, TORCH[dtype].itemsize), POISON, dtype=torch.uint8)
    return full.view(TORCH[dtype])[..., 0].to(REGISTER_DTYPE[dtype])


class Value:
    """A scalar or block inside a kernel; a pointer's `data` holds offsets into the flat `base`."""

    def __init__(
        self, data: torch.Tensor, dtype: Any, layout: Any = None, base: Any = None
    ) -> None:
        self.data, self.dtype, self.base = data, dtype, base
        known = layout is not None and type(layout).__name__ not in (
            "AutoLayout",
            "CoalescedLayout",
        )
        self.layout = layout if known and data.ndim else None

    shape = property(lambda self: list(self.data.shape))
    T = property(lambda self: permute(self, (1, 0)))
    __hash__ = object.__hash__

    @property
    def type(self) -> Any:
        """Return the attributes of a type that kernels use; the type of a scalar is its dtype."""
        if self.data.ndim == 0:
            return self.dtype
        return SimpleNamespace(
            layout=self.layout, shape=self.shape, element_ty=self.dtype, scalar=self.dtype
        )

    def _scalar(self) -> Any:
        if self.data.ndim:
            raise TypeError(f"Gluon needs a scalar here, not a block of shape {self.shape}")
        return self.data.item()

    def __bool__(self) -> bool:
        return bool(self._scalar())

    def __index__(self) -> int:
        return operator.index(self._scalar())

    def __repr__(self) -> str:
        return f"Value({self.data}, {self.dtype})"

    def __getitem__(self, keys: Any) -> "Value":
        result = self
        for axis, key in enumerate(keys if isinstance(keys, tuple) else (keys,)):
            if key is None:
                result = expand_dims(result, axis)
            elif key != slice(None):
                raise TypeError(f"a block takes only `:` and None as indices, not {key!r}")
        return result

    def to(self, dtype: Any, fp_downcast_rounding: Any = None, bitcast: bool = False) -> "Value":
        return cast(self, dtype, fp_downcast_rounding, bitcast)

    def with_data(self, data: torch.Tensor) -> "Value":
        return Value(data, self.dtype, self.layout, self.base)


def as_value(x: Any) -> Value:
    """Convert a Python number with the type that Triton gives it; return a Value unchanged."""
    if isinstance(x, Value):
        return x
    if isinstance(x, bool):
        return Value(torch.tensor(x), gl.int1)
    if isinstance(x, int):
        dtype = gl.int32 if -(2**31) <= x < 2**31 else gl.uint32 if 0 <= x < 2**32 else gl.int64
        return Value(torch.tensor(x, dtype=REGISTER_DTYPE[dtype]), dtype)
    if isinstance(x, float):
        return Value(torch.tensor(x, dtype=torch.float32), gl.float32)
    raise TypeError(f"{x!r} cannot be a value inside a Gluon kernel")


def common_layout(*values: Value) -> Any:
    """Return the layout that the blocks share; raise if their layouts or ranks differ."""
    blocks = [value for value in values if value.data.ndim]
    layouts = [value.layout for value in blocks if value.layout is not None]
    if len({value.data.ndim for value in blocks}) > 1:
        raise ValueError(f"blocks of different rank: {[value.shape for value in blocks]}")
    if any(layout != layouts[0] for layout in layouts):
        raise ValueError(f"layout mismatch: {' and '.join(map(str, layouts))}")
    return layouts[0] if layouts else None


def _to_register(data: torch.Tensor, dtype: Any) -> torch.Tensor:
    """Convert data to the torch dtype that stores registers of type `dtype`; integers wrap."""
    data = data.to(REGISTER_DTYPE[dtype])
    wide_unsigned = dtype in (gl.uint16, gl.uint32)
    return data & (2**dtype.primitive_bitwidth - 1) if wide_unsigned else data


@emulates("cast")
def cast(x: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: bool = False) -> Value:
    x = as_value(x)
    if fp_downcast_rounding not in (None, "rtne"):
        raise NotImplementedError(f"rounding {fp_downcast_rounding} is not emulated")
    if bitcast:
        data = x.data.to(TORCH[x.dtype]).view(TORCH[dtype]).to(REGISTER_DTYPE[dtype])
    elif x.dtype.is_floating() and dtype in (gl.uint16, gl.uint32):
        data = _to_register(x.data.to(torch.int64), dtype)
    else:
        data = _to_register(x.data, dtype)
    return Value(data, dtype, x.layout)


def promote(x: Any, y: Any, divides: bool = False) -> tuple[Value, Value]:
    """Convert both operands to the type in which Triton computes their operation."""
    x_weak, y_weak = not isinstance(x, Value), not isinstance(y, Value)
    x, y = as_value(x), as_value(y)
    dtype = _SEMANTIC.computation_type_impl(x.dtype, x_weak, y.dtype, y_weak, divides)
    return cast(x, dtype), cast(y, dtype)


def _binary(function: Callable[..., Any], divides: bool = False, compares: bool = False) -> Any:
    """Return the emulation of a binary operator, with pointer arithmetic and type promotion."""

    def apply(x: Any, y: Any) -> Any:
        if x is None or y is None:
            return NotImplemented
        for pointer, other in ((x, y), (y, x)):
            if isinstance(pointer, Value) and pointer.base is not None and not compares:
                offsets = as_value(other)
                data = function(pointer.data, offsets.data.to(torch.int64))
                return Value(data, pointer.dtype, common_layout(pointer, offsets), pointer.base)
        x, y = promote(x, y, divides)
        if function is torch.true_divide and not x.dtype.is_floating():
            x, y = cast(x, gl.float32), cast(y, gl.float32)
        data = function(x.data, y.data)
        dtype = gl.int1 if compares else x.dtype
        return Value(_to_register(data, dtype), dtype, common_layout(x, y))

    return apply


def _floor_div(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Divide integers as C does, rounding towards zero."""
    return torch.div(x, y, rounding_mode="trunc")


for _name, _function, _divides, _compares in (
    ("add", torch.add, False, False),
    ("sub", torch.sub, False, False),
    ("mul", torch.mul, False, False),
    ("truediv", torch.true_divide, True, False),
    ("floordiv", _floor_div, True, False),
    ("mod", torch.fmod, True, False),
    ("and", torch.bitwise_and, False, False),
    ("or", torch.bitwise_or, False, False),
    ("xor", torch.bitwise_xor, False, False),
    ("lshift", torch.bitwise_left_shift, False, False),
    ("rshift", torch.bitwise_right_shift, False, False),
    ("lt", torch.lt, False, True),
    ("le", torch.le, False, True),
    ("gt", torch.gt, False, True),
    ("ge", torch.ge, False, True),
    ("eq", torch.eq, False, True),
    ("ne", torch.ne, False, True),
):
    _operation = _binary(_function, _divides, _compares)
    setattr(Value, f"__{_name}__", _operation)
    setattr(Value, f"__r{_name}__", lambda self, other, _op=_operation: _op(other, self))
    EMULATED[_name] = _operation
setattr(Value, "__neg__", lambda self: 0 - self)  # noqa: B010
setattr(Value, "__invert__", lambda self: self.with_data(_to_register(~self.data, self.dtype)))  # noqa: B010

for _name in ("exp", "exp2", "log", "log2", "sin", "cos", "rsqrt", "sqrt", "abs", "erf", "floor"):
    _unary = getattr(torch, _name)
    EMULATED[_name] = lambda x, _f=_unary: as_value(x).with_data(_f(as_value(x).data))
EMULATED |= {"ceil": lambda x: x.with_data(torch.ceil(x.data)), "sqrt_rn": EMULATED["sqrt"]}
EMULATED |= {"fdiv": EMULATED["truediv"], "div_rn": EMULATED["truediv"]}
# NaN propagates, unlike on the GPU, so that poison shows in the result.
EMULATED["maximum"] = lambda x, y, propagate_nan=None: _binary(torch.maximum)(x, y)
EMULATED["minimum"] = lambda x, y, propagate_nan=None: _binary(torch.minimum)(x, y)
EMULATED["fma"] = lambda x, y, z: cast(cast(x, gl.float64) * y + z, promote(x, z)[0].dtype)
EMULATED["umulhi"] = lambda x, y: x.with_data(_high_half_product(*promote(x, y)))


def _high_half_product(x: Value, y: Value) -> torch.Tensor:
    if x.dtype == gl.int32:
        return (x.data.to(torch.int64) * y.data >> 32).to(torch.int32)
    return (x.data >> 16) * y.data + ((x.data & 0xFFFF) * y.data >> 16) >> 16


@emulates("expand_dims")
def expand_dims(x: Value, axis: int) -> Value:
    parent = None
    axis = axis % (x.data.ndim + 1)
    if x.layout is not None:
        if getattr(x.layout, "dim", None) != axis:
            raise ValueError(
                f"expand_dims({axis}) needs a slice layout of that axis, not {x.layout}"
            )
        parent = x.layout.parent
    return Value(x.data.unsqueeze(axis), x.dtype, parent, x.base)


@emulates("permute")
def permute(x: Value, *dims: Any) -> Value:
    dims = dims[0] if isinstance(dims[0], tuple | list) else dims
    return Value(x.data.permute(tuple(dims)), x.dtype, None, x.base)


@emulates("reshape")
def reshape(x: Value, *shape: Any) -> Value:
    shape = shape[0] if isinstance(shape[0], tuple | list) else shape
    return Value(x.data.reshape(tuple(shape)), x.dtype, None, x.base)


@emulates("broadcast")
def broadcast(x: Value, y: Value) -> tuple[Value, Value]:
    layout = common_layout(x, y)
    pair = torch.broadcast_tensors(x.data, y.data)
    return Value(pair[0], x.dtype, layout, x.base), Value(pair[1], y.dtype, layout, y.base)


@emulates("where")
def where(condition: Any, x: Any, y: Any) -> Value:
    condition, (x, y) = as_value(condition), promote(x, y)
    layout = common_layout(condition, x, y)
    return Value(torch.where(condition.data.bool(), x.data, y.data), x.dtype, layout)


@emulates("convert_layout", "set_auto_layout")
def convert_layout(x: Value, layout: Any, assert_trivial: bool = False) -> Value:
    return Value(x.data, x.dtype, layout, x.base)


@emulates("join")
def join(x: Value, y: Value) -> Value:
    return Value(torch.stack(torch.broadcast_tensors(x.data, y.data), dim=-1), x.dtype)


@emulates("split")
def split(x: Value) -> tuple[Value, Value]:
    return Value(x.data[..., 0], x.dtype), Value(x.data[..., 1], x.dtype)


@emulates("full")
def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Value:
    filled = cast(value, dtype).data.expand(tuple(int(size) for size in shape))
    return Value(filled.clone(), dtype, layout)


@emulates("arange")
def arange(start: int, end: int, layout: Any = None) -> Value:
    return Value(torch.arange(start, end, dtype=torch.int32), gl.int32, layout)
