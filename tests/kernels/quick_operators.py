"""Sums, products and comparisons of Triton's interpreter, decided once for each pair of types.

For `x + y` the interpreter finds the type of the result, converts both operands to it, makes both
as large as the result and finds the function of numpy. The types of `x` and `y` decide all that.
numpy itself makes operands as large as the result: here an operand gets the type of its larger form
and keeps its numbers. What is refused is not kept, and raises again.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

OPERATORS = {
    f"__{prefix}{name}__"
    for name in ("add", "sub", "mul", "truediv", "mod", "and", "or", "xor", "lshift", "rshift")
    for prefix in ("", "r")
} | {f"__{name}__" for name in ("lt", "le", "gt", "ge", "eq", "ne")}


class Plan(NamedTuple):
    """How an operator computes: types of both operands (or constants), function, type."""

    left: Any
    right: Any
    swapped: bool
    compute: Callable[[Any, Any], Any]
    type: Any


class Operands:
    """What the semantic of an interpreter decided on pairs of operands."""

    def __init__(self, interpreter: ModuleType) -> None:
        self.semantic = interpreter.interpreter_semantic
        self.builder = interpreter.interpreter_builder
        self.new_handle = interpreter.TensorHandle
        self.tensor = self.semantic.tensor
        self.unwrap = interpreter.tl.core._unwrap_if_constexpr
        self.check = self.semantic.binary_op_type_checking_impl
        self.known: dict[Any, tuple[Any, Any]] = {}
        self.latest: Any = None
        self.semantic.binary_op_type_checking_impl = self.check_once

    def place(self, value: Any) -> Any:
        """Return what decides on an operand: its type, or the number that a constant is."""
        if type(value) in (bool, int, float):
            return type(value), repr(value)  # 0.0 and -0.0 are two, 1 and True too
        parts = vars(value.type)
        if "place_of_an_operand" not in parts:
            space = getattr(value.type.scalar, "address_space", None)
            parts["place_of_an_operand"] = (value.type.name, space)
        return parts["place_of_an_operand"]

    def kept(self, value: Any, result: Any) -> Any:
        """Return the type of an operand in its larger form; a constant itself, as one number."""
        if type(value) is self.tensor:
            return result.type
        number = self.new_handle(result.handle.data.flat[:1], result.handle.dtype)
        return self.tensor(number, result.type)

    def handle(self, value: Any, to: Any) -> Any:
        if type(to) is self.tensor:
            return to.handle
        scalar = to.scalar
        return value.handle if value.dtype is scalar else self.semantic.cast(value, scalar).handle

    def brought(self, value: Any, to: Any) -> Any:
        if type(to) is self.tensor:
            return to
        return value if value.type is to else self.tensor(self.handle(value, to), to)

    def check_once(self, lhs: Any, rhs: Any, *flags: bool, **options: bool) -> Any:
        pair = (self.place(lhs), self.place(rhs), flags, *options.items())
        if pair in self.known:
            left, right = self.known[pair]
            results = self.brought(lhs, left), self.brought(rhs, right)
        else:
            results = self.check(lhs, rhs, *flags, **options)
            self.known[pair] = left, right = self.kept(lhs, results[0]), self.kept(rhs, results[1])
        self.latest = (lhs, rhs, left, right, results)
        return results

    def quick(self, operator: Callable[..., Any]) -> Callable[..., Any]:
        """Return the operator, which repeats what it did on operands of the same types."""
        plans: dict[Any, Plan | None] = {}

        def operate(one: Any, other: Any, **options: Any) -> Any:
            if options or self.builder.options.sanitize_overflow:
                return operator(one, other, **options)
            other = self.unwrap(other)
            if type(other) not in (bool, int, float, self.tensor):
                return operator(one, other)
            pair = (self.place(one), self.place(other))
            if pair not in plans:
                result, plans[pair] = self.watched(operator, one, other)
                return result
            plan = plans[pair]
            if plan is None:
                return operator(one, other)
            left, right = (other, one) if plan.swapped else (one, other)
            handles = self.handle(left, plan.left), self.handle(right, plan.right)
            return self.tensor(plan.compute(*handles), plan.type)

        return operate

    def watched(self, operator: Callable[..., Any], one: Any, other: Any) -> tuple[Any, Any]:
        """Return a result, and the plan if it is one function of numpy on both operands."""
        seen = []

        def binary_op(lhs: Any, rhs: Any, function: Any) -> Any:
            compute = functools.partial(type(self.builder).binary_op, self.builder, op=function)
            seen.append((lhs, rhs, compute, compute(lhs, rhs)))
            return seen[-1][-1]

        def create_addptr(lhs: Any, rhs: Any) -> Any:
            compute = functools.partial(type(self.builder).create_addptr, self.builder)
            seen.append((lhs, rhs, compute, compute(lhs, rhs)))
            return seen[-1][-1]

        self.latest = None
        self.builder.binary_op, self.builder.create_addptr = binary_op, create_addptr
        try:
            result = operator(one, other)
        finally:
            del self.builder.binary_op, self.builder.create_addptr
        if len(seen) != 1 or self.latest is None or type(result) is not self.tensor:
            return result, None
        lhs, rhs, compute, handle = seen[0]
        first, second, left, right, (a, b) = self.latest
        straight, swapped = first is one and second is other, first is other and second is one
        if not (straight or swapped) or handle is not result.handle:
            return result, None
        if lhs is not a.handle or rhs is not b.handle:
            return result, None
        return result, Plan(left, right, not straight, compute, result.type)
