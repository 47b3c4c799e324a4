"""The quick form of Triton's interpreter gives the bits of the interpreter."""

import functools

import numpy as np
import pytest


@pytest.fixture
def convert():
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if not hasattr(getattr(interpreter, "_convert_float", None), "__wrapped__"):
        pytest.skip("the interpreter converts by itself: this Triton has other parts, or a GPU")
    return interpreter._convert_float


@pytest.mark.parametrize("shape", [(256, 256), ()])
def test_bfloat16_is_converted_to_the_same_bits(convert, shape):
    import triton.language as tl

    every = np.arange(2**16, dtype=np.uint16)
    normal = np.where((every & 0x7F80 == 0) & (every & 0x7F != 0), 0, every)
    short = (normal if shape else normal[12345]).reshape(shape)
    long = (short.astype(np.uint32) << 16) + np.uint32(0x8765) * (short & 0x7FFF != 0)
    for bits, source, target in (
        (short, tl.bfloat16, tl.float32),
        (long.view(np.float32), tl.float32, tl.bfloat16),
        (long.T.view(np.float32), tl.float32, tl.bfloat16),
    ):
        expected = convert.__wrapped__(bits, source, target, None)
        found = convert(bits, source, target, None)
        assert found.dtype == expected.dtype and found.flags.c_contiguous
        assert np.array_equal(found, expected) and found.shape == shape


def test_numbers_below_the_normal_ones_are_converted_by_the_interpreter(convert):
    import triton.language as tl

    tiny = np.array([0, 1, 0x7F, 0x3F80], dtype=np.uint16)
    expected = convert.__wrapped__(tiny, tl.bfloat16, tl.float32, None)
    assert np.array_equal(convert(tiny, tl.bfloat16, tl.float32, None), expected)


def test_equal_block_types_are_one_object_with_the_facts_of_the_first(convert):
    import triton.language as tl

    one, other = (tl.block_type(tl.float32, shape) for shape in ([4, 8], [tl.constexpr(4), 8]))
    assert one is other and one != tl.block_type(tl.float32, [8, 4])
    assert one != tl.block_type(tl.int32, [4, 8])
    assert one.with_element_ty(tl.int32) is tl.block_type(tl.int32, [4, 8])
    pointers = [
        tl.block_type(tl.pointer_type(tl.float32, **kind), [4])
        for kind in ({}, {"const": True}, {"address_space": "shared"})
    ]
    assert all(a is b or a != b for a in pointers for b in pointers)
    assert len(set(map(id, pointers))) == 3
    for _ in range(2):
        with pytest.raises((TypeError, ValueError)):
            tl.block_type(tl.float32, [3])  # no power of two


@pytest.fixture
def operands(convert):
    """What the interpreter remembers of operands, whose own functions it still has."""
    from triton.runtime import interpreter

    return interpreter.interpreter_semantic.binary_op_type_checking_impl.__self__


def operand_values(operands, seed):
    """Blocks and scalars of several types and shapes, a pointer, and numbers."""
    import triton.language as tl

    draw = np.random.default_rng(seed)
    made = []
    for dtype, kind in ((tl.int32, np.int32), (tl.int64, np.int64), (tl.float32, np.float32)):
        for shape in ((1,), (4, 1), (1, 8), (8,), (4, 8)):
            handle = operands.new_handle(draw.integers(1, 9, shape).astype(kind), dtype)
            kept = dtype if shape == (1,) else tl.block_type(dtype, list(shape))
            made.append(operands.tensor(handle, kept))
    true = operands.new_handle(draw.integers(0, 2, (4, 8)).astype(bool), tl.int1)
    address = operands.new_handle(np.array([4096], dtype=np.uint64), tl.pointer_type(tl.float32))
    made += [
        operands.tensor(true, tl.block_type(tl.int1, [4, 8])),
        operands.tensor(address, address.dtype),
    ]
    return [*made, 0.0, -0.0, 2.5, 1, 3, True]


def outcome(call, *arguments):
    """The type, the shape and the bits of a result, or the class of its error."""
    try:
        found = call(*arguments)
    except Exception as error:
        return type(error)
    data = np.broadcast_to(found.handle.data, getattr(found.type, "shape", (1,)))
    return str(found.type), found.handle.dtype.name, data.dtype, data.tobytes()


@pytest.mark.parametrize("name", ["add", "radd", "sub", "mul", "truediv", "lt", "eq", "and", "mod"])
def test_an_operator_gives_the_bits_of_the_interpreter_the_first_time_and_again(name, operands):
    import triton.language as tl
    from triton.runtime.interpreter import interpreter_semantic as semantic

    plain = functools.partial(getattr(tl.core.tensor, f"__{name}__"), _semantic=semantic)
    quick = operands.quick(plain)
    for seed in range(3):  # decided, then repeated with other numbers
        values = operand_values(operands, seed)
        for left in values[:-6]:
            for right in values:
                semantic.binary_op_type_checking_impl = operands.check
                try:
                    expected = outcome(plain, left, right)
                finally:
                    semantic.binary_op_type_checking_impl = operands.check_once
                with np.errstate(all="ignore"):
                    assert outcome(quick, left, right) == expected, (name, left.type, right)
