"""Sliding-window attention against loops that read like its definition.

Shapes: B batch, H heads, L queries, S keys before them, N = S + L, P features of a head.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from acmoe.models.text.rotary import rotate
from acmoe.ops.attention.reference import window_attention, window_attention_reference


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def by_loops(
    q: Tensor, k: Tensor, v: Tensor, span: int, table: Tensor | None, key_mask: Tensor | None
) -> Tensor:
    batch, heads, num_queries, features = q.shape
    num_before = k.shape[2] - num_queries
    out = torch.zeros_like(q)
    for b in range(batch):
        for h in range(heads):
            for i in range(num_queries):
                own = num_before + i
                nearest = own if table is None else own - 1
                seen = [
                    n
                    for n in range(max(0, nearest - span + 1), nearest + 1)
                    if key_mask is None or key_mask[b, n]
                ]
                if not seen:
                    continue
                scores = []
                for n in seen:
                    score = q[b, h, i] @ k[b, h, n]
                    if table is not None:
                        score = score + q[b, h, i] @ table[:, span - (own - n)]
                    scores.append(score / math.sqrt(features))
                weights = torch.stack(scores).softmax(0)
                out[b, h, i] = (weights[:, None] * v[b, h, seen]).sum(0)
    return out


shapes = st.tuples(st.integers(1, 9), st.integers(1, 7), st.integers(0, 9)).filter(
    lambda shape: shape[2] <= shape[0]
)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(shape=shapes, relative=st.booleans(), masked=st.booleans(), seed=st.integers(0, 10**6))
def test_both_forms_equal_the_loops(
    shape: tuple[int, int, int], relative: bool, masked: bool, seed: int
) -> None:
    span, num_queries, num_before = shape
    num_keys = num_before + num_queries
    q = draw(seed, 2, 2, num_queries, 4)
    k, v = draw(seed + 1, 2, 2, num_keys, 4), draw(seed + 2, 2, 2, num_keys, 4)
    table = draw(seed + 3, 4, span) if relative else None
    key_mask = draw(seed + 4, 2, num_keys) > 0 if masked else None
    expected = by_loops(q, k, v, span, table, key_mask)
    for form in (window_attention, window_attention_reference):
        found = form(q, k, v, span=span, positions=table, key_mask=key_mask)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(shape=shapes, relative=st.booleans(), masked=st.booleans(), seed=st.integers(0, 10**6))
def test_gradients_of_the_fast_form_equal_the_reference_s(
    shape: tuple[int, int, int], relative: bool, masked: bool, seed: int
) -> None:
    span, num_queries, num_before = shape
    num_keys = num_before + num_queries
    leaves = [
        draw(seed, 2, 3, num_queries, 4),
        draw(seed + 1, 2, 3, num_keys, 4),
        draw(seed + 2, 2, 3, num_keys, 4),
        draw(seed + 3, 4, span),
    ]
    leaves = [leaf.requires_grad_() for leaf in (leaves if relative else leaves[:3])]
    key_mask = draw(seed + 4, 2, num_keys) > 0 if masked else None
    upstream = draw(seed + 5, 2, 3, num_queries, 4)
    results = []
    for form in (window_attention, window_attention_reference):
        q, k, v, *table = leaves
        out = form(q, k, v, span=span, positions=table[0] if table else None, key_mask=key_mask)
        loss = (out * upstream).sum() + sum(0.0 * leaf.sum() for leaf in leaves)
        results.append(torch.autograd.grad(loss, leaves))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("num_before", [0, 3, 5])
def test_a_long_sequence_in_chunks_equals_the_whole(relative: bool, num_before: int) -> None:
    # Span 5 makes chunks of 64 queries: 150 of them are three chunks, the last a short one.
    q = draw(0, 2, 2, 150, 4)
    k, v = draw(1, 2, 2, 150 + num_before, 4), draw(2, 2, 2, 150 + num_before, 4)
    table = draw(3, 4, 5) if relative else None
    key_mask = draw(4, 2, 150 + num_before) > -1
    for mask in (None, key_mask):
        torch.testing.assert_close(
            window_attention(q, k, v, span=5, positions=table, key_mask=mask),
            window_attention_reference(q, k, v, span=5, positions=table, key_mask=mask),
            rtol=1e-10,
            atol=1e-12,
        )


def test_the_last_column_of_the_table_is_distance_one() -> None:
    # A table that shouts at one column makes each query copy the value at that distance.
    q = torch.ones(1, 1, 4, 2, dtype=torch.float64)
    k = torch.zeros_like(q)
    v = torch.arange(8, dtype=torch.float64).view(1, 1, 4, 2)
    near, far = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    near[:, -1] = far[:, 0] = 1e3
    copied = window_attention(q, k, v, span=3, positions=near)
    torch.testing.assert_close(copied[0, 0, 1:], v[0, 0, :3])
    # Only the fourth token has another three before it.
    copied = window_attention(q, k, v, span=3, positions=far)
    torch.testing.assert_close(copied[0, 0, 3], v[0, 0, 0])


@pytest.mark.parametrize("length", [1, 2, 70])
def test_a_first_token_with_nothing_to_see_gets_zeros_and_finite_gradients(length: int) -> None:
    q, k, v = (draw(seed, 2, 2, length, 4).requires_grad_() for seed in range(3))
    table = draw(3, 4, 66).requires_grad_()
    out = window_attention(q, k, v, span=66, positions=table)
    assert not out[:, :, 0].any()
    (out + 0 * (q + k + v) + 0 * table.sum()).sum().backward()
    for leaf in (q, k, v, table):
        assert leaf.grad is not None and torch.isfinite(leaf.grad).all()


def test_a_row_of_nothing_but_masked_keys_gets_zeros() -> None:
    q, k, v = (draw(seed, 2, 1, 3, 4) for seed in range(3))
    key_mask = torch.tensor([[False, False, False], [True, True, True]])
    for table in (None, draw(3, 4, 3)):
        out = window_attention(q, k, v, span=3, positions=table, key_mask=key_mask)
        assert not out[0].any()
        assert torch.equal(out[1], window_attention(q, k, v, span=3, positions=table)[1])


def test_what_lies_outside_the_window_changes_nothing_bitwise() -> None:
    q, k, v, table = draw(0, 1, 2, 6, 4), draw(1, 1, 2, 9, 4), draw(2, 1, 2, 9, 4), draw(3, 4, 3)
    before = window_attention(q, k, v, span=3, positions=table)
    # Query 2 stands at position 5: it sees 2, 3 and 4.
    for position in (0, 1, 5, 6, 7, 8):
        k2, v2 = k.clone(), v.clone()
        k2[:, :, position] = 50.0
        v2[:, :, position] = -50.0
        after = window_attention(q, k2, v2, span=3, positions=table)
        assert torch.equal(after[:, :, 2], before[:, :, 2])
    k[:, :, 4] = 50.0
    assert not torch.equal(
        window_attention(q, k, v, span=3, positions=table)[:, :, 2], before[:, :, 2]
    )


def test_dropped_probabilities_leave_the_mean_alone() -> None:
    # With all values one the output is the sum of kept probabilities, doubled: mean 1.
    q, k = torch.zeros(64, 4, 32, 4), torch.zeros(64, 4, 64, 4)
    v = torch.ones(64, 4, 64, 4)
    table = torch.zeros(4, 32, requires_grad=True)
    torch.manual_seed(0)
    out = window_attention(q, k, v, span=32, positions=table, dropout=0.5)
    # 32 equal probabilities, each kept half the time: variance 1/32 a query over 8,192 queries.
    assert out.mean().item() == pytest.approx(1.0, abs=4 * math.sqrt(1 / 32 / 8192))
    assert out[..., 0].var().item() == pytest.approx(1 / 32, rel=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(
    ("num_before", "num_queries", "span", "features"),
    [(0, 40, 64, 44), (64, 64, 64, 44), (64, 64, 64, 18), (7, 1, 64, 44), (0, 200, 64, 16)],
)
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_the_fused_kernels_of_a_gpu_equal_the_reference(
    dtype: torch.dtype,
    tolerance: float,
    num_before: int,
    num_queries: int,
    span: int,
    features: int,
    relative: bool,
    masked: bool,
) -> None:
    num_keys = num_before + num_queries
    shapes = [(num_queries, features), (num_keys, features), (num_keys, features)]
    leaves = [draw(seed, 2, 3, *shape).cuda() for seed, shape in enumerate(shapes)]
    leaves += [draw(3, features, span).cuda()] if relative else []
    key_mask = (draw(4, 2, num_keys) > 0).cuda() if masked else None
    upstream = draw(5, 2, 3, num_queries, features).cuda()
    results = []
    for form, kind in ((window_attention, dtype), (window_attention_reference, torch.float64)):
        q, k, v, *table = given = [leaf.to(kind).requires_grad_() for leaf in leaves]
        out = form(q, k, v, span=span, positions=table[0] if table else None, key_mask=key_mask)
        results.append([out, *torch.autograd.grad(out, given, upstream.to(kind))])
    for found, expected in zip(*results, strict=True):
        error = (found.double() - expected).norm() / expected.norm()
        assert error.item() < tolerance


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    q, k = draw(0, 1, 1, 6, 8), draw(1, 1, 1, 6, 8)
    scores = rotate(q, 0) @ rotate(k, 0).mT
    shifted = rotate(q, 1000) @ rotate(k, 1000).mT
    torch.testing.assert_close(shifted, scores, rtol=1e-9, atol=1e-9)
    further = rotate(q, 1) @ rotate(k, 0).mT
    assert (further - scores).abs().max() > 0.1


def test_rotary_turns_the_first_pair_by_one_radian_a_position() -> None:
    x = torch.tensor([[[[1.0, 5.0, 0.0, 0.0]] * 3]], dtype=torch.float64)  # pairs (0, 2), (1, 3)
    turned = rotate(x, 7)
    for row, position in enumerate((7, 8, 9)):
        assert turned[0, 0, row, 0].item() == pytest.approx(math.cos(position))
        assert turned[0, 0, row, 2].item() == pytest.approx(math.sin(position))
        # The second of two pairs turns 10,000^(1/2) = 100 times slower.
        assert turned[0, 0, row, 1].item() == pytest.approx(5 * math.cos(position / 100))
