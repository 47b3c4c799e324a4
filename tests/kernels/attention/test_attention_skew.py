"""The buffer of position scores in memory, and their gradient that the backward leaves there.

Shapes: X heads of all streams, L queries, S keys before them, N = S + L, W span, P features of a
head, C columns of the buffer, M rows of eight queries.
"""

import math

import pytest
import torch
from attention_cases import Shape, draw
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from acmoe.ops.attention.inputs import Inputs
from slow_cases import mostly_slow


def one_stream(before: int, queries: int, span: int, heads: int = 2) -> Shape:
    return Shape(before, queries, span, features=16, streams=1, heads=heads)


# No memory; windows shorter than a tile of 32, and longer than two; queries that fill neither a row
# of eight nor a tile; distances that reach beyond the first key.
SLOW = pytest.mark.slow
SHAPES = [
    one_stream(0, 40, 7),
    one_stream(0, 75, 74, heads=1),
    one_stream(33, 20, 33),
    one_stream(3, 17, 9),
    one_stream(100, 64, 100, heads=1),
    one_stream(5, 41, 45),
]


def entry_of(shape: Shape, columns: int, left: int, device: str) -> tuple[Tensor, Tensor]:
    """(8, M, C) query and key of each place in one head's buffer, -1 where there is no key.

    The row of query i is shifted right by i mod 8.
    """
    num_rows = math.ceil(shape.queries / 8)
    shift_8 = torch.arange(8, device=device)[:, None, None]
    row_M = torch.arange(num_rows, device=device)[:, None]
    column_C = torch.arange(columns, device=device)
    query_8MC = (8 * row_M + shift_8).expand(8, num_rows, columns)
    nearness_8MC = column_C - left - shift_8  # W - distance
    key_8MC = shape.before + query_8MC - (shape.span - nearness_8MC)
    real = (nearness_8MC >= 0) & (nearness_8MC < shape.span) & (query_8MC < shape.queries)
    return query_8MC, torch.where(real, key_8MC, -1)


def score_gradient(shape: Shape, tensors: list[Tensor]) -> Tensor:
    """(X, L, N) float64 gradient of q . (k + position), zero outside the window; before the scale:
    weight * (dweight - output . its gradient)."""
    q, k, v, table, upstream = (tensor.double() for tensor in tensors)
    num_keys = shape.before + shape.queries
    at_L = torch.arange(shape.before, num_keys, device=q.device)
    distance_LN = at_L[:, None] - torch.arange(num_keys, device=q.device)
    open_LN = (distance_LN >= 1) & (distance_LN <= shape.span)
    column_LN = (shape.span - distance_LN).clamp(0, shape.span - 1)
    position = (q @ table).gather(-1, column_LN.expand(1, shape.heads, -1, -1))
    score = ((q @ k.mT + position) / math.sqrt(shape.features)).masked_fill(~open_LN, -math.inf)
    weight = torch.where(open_LN, score.softmax(-1), 0.0)
    dweight = upstream @ v.mT
    return (weight * (dweight - (weight * dweight).sum(-1, keepdim=True)))[0]


@mostly_slow(
    "shape", [*SHAPES[:2], SHAPES[3], *(pytest.param(SHAPES[n], marks=SLOW) for n in (2, 4, 5))]
)
def test_the_backward_leaves_the_gradient_of_each_score_and_zeros_elsewhere(
    shape: Shape, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from acmoe.ops.attention.triton import backward as attention_backward
    from acmoe.ops.attention.triton import forward as attention
    from acmoe.ops.attention.triton import skew as attention_skew

    q, k, v, table, upstream = tensors = draw(shape, device)
    buffers = []

    def recorded(q_8RP: Tensor, dscore_8RC: Tensor) -> Tensor:
        buffers.append(dscore_8RC.clone())
        return dscore_8RC.new_zeros(8, table.shape[0], dscore_8RC.shape[2], dtype=torch.float32)

    monkeypatch.setattr(attention_backward, "rel_emb_gradient", recorded)
    bits = torch.zeros(q.shape[:3], dtype=torch.int32, device=device)
    scale = 1 / math.sqrt(shape.features)
    given = Inputs(q, k, v, table, None, bits, scale, 0.0, shape.features)
    out, lse = attention.run_forward(given)
    grad = upstream.transpose(1, 2).contiguous().transpose(1, 2)  # as the output lies
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    attention_backward.run_backward(grad, given, out, lse, dk, dv)
    (buffer,) = buffers
    skew = attention_skew.SkewLayout(shape.heads, shape.queries, k.shape[2], shape.span)
    query_8MC, key_8MC = entry_of(shape, skew.columns, skew.left_pad, device)
    met = key_8MC >= 0
    expected_XLN = score_gradient(shape, tensors)
    found = buffer.view(8, shape.heads, -1, skew.columns)
    for head in range(shape.heads):
        assert not found[:, head][~met].any()
        expected = expected_XLN[head][query_8MC[met], key_8MC[met]]
        error = (found[:, head][met].double() - expected).norm()
        assert error <= 2e-6 * (1 + expected.norm())
    # Every score of a window has a place of its own.
    assert int(met.sum()) == sum(min(shape.before + i, shape.span) for i in range(shape.queries))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 60))
def test_key_zero_of_every_row_stands_at_a_multiple_of_eight_numbers(
    before: int, queries: int, beyond: int
) -> None:
    from acmoe.ops.attention.triton.skew import SkewLayout

    span = before + beyond
    skew = SkewLayout(5, queries, before + queries, span)
    for i in range(queries):
        # Key j lies W - distance columns in, past the empty ones and the row's own shift.
        column = skew.left_pad + i % 8 + span - (before + i)
        assert column == 8 * (skew.key0_block - i // 8)
        assert skew.left_pad + i % 8 + span <= skew.columns and skew.columns % 16 == 0


@settings(derandomize=True, deadline=None, max_examples=15)
@given(st.integers(0, 20), st.integers(1, 20), st.integers(1, 600), st.integers(1, 5))
def test_eight_tables_shifted_apart_and_the_gradients_they_hand_back(
    before: int, queries: int, beyond: int, width: int
) -> None:
    from acmoe.ops.attention.triton.skew import SkewLayout, add_shifted_gradient, shift_rel_emb

    device = "cuda" if torch.cuda.is_available() else "cpu"
    span = before + beyond
    skew = SkewLayout(1, queries, before + queries, span)
    table_PW = torch.randn(width, span, device=device)
    found_8PC = shift_rel_emb(table_PW, skew, torch.float32)
    for r in range(8):
        first = skew.left_pad + r
        assert torch.equal(found_8PC[r, :, first : first + span], table_PW)
        assert not found_8PC[r, :, :first].any() and not found_8PC[r, :, first + span :].any()
    # The gradient of a sum of products with what was handed out, from 1 on.
    grad_8PC = torch.randn_like(found_8PC)
    dtable_PW = torch.ones_like(table_PW)
    add_shifted_gradient(dtable_PW, grad_8PC, skew, 0.5)
    own = [grad_8PC[r, :, skew.left_pad + r : skew.left_pad + r + span].double() for r in range(8)]
    expected_PW = 1 + 0.5 * torch.stack(own).sum(0)
    torch.testing.assert_close(dtable_PW.double(), expected_PW, rtol=1e-6, atol=1e-6)
