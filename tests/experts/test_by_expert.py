"""Products of rows with the weights of their experts, in one call of torch or as a loop."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acmoe import MoE
from acmoe.ops.dispatch import use_backend
from acmoe.ops.experts.cpu import by_expert as products
from acmoe.ops.experts.cpu.by_expert import by_expert, outer_by_expert

HAS_GROUPED = products.has_grouped_on_cpu()
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.1}


def draw(counts, tail, inputs, outputs, dtype, seed, *, transposed=False):
    """Return rows, weights, biases, gradients of the results, and the end of each expert's rows."""
    draws = torch.Generator().manual_seed(seed)
    rows, experts = sum(counts) + tail, len(counts)
    x = torch.randn(rows, inputs, generator=draws, dtype=torch.float64).to(dtype)
    weight = torch.randn(experts, outputs, inputs, generator=draws, dtype=torch.float64).to(dtype)
    weight = weight.mT.contiguous().mT if transposed else weight
    bias = torch.randn(experts, outputs, generator=draws, dtype=torch.float64).to(dtype)
    grad = torch.randn(rows, outputs, generator=draws, dtype=torch.float64).to(dtype)
    return x, weight, bias, grad, torch.tensor(counts).cumsum(0)


@given(
    counts=st.lists(st.integers(0, 7), min_size=1, max_size=9),
    tail=st.integers(0, 3),
    inputs=st.integers(1, 20),
    outputs=st.integers(1, 20),
    aligned=st.booleans(),
    transposed=st.booleans(),
    has_bias=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 99),
)
def test_each_row_is_multiplied_by_the_weight_of_its_expert(
    counts, tail, inputs, outputs, aligned, transposed, has_bias, dtype, seed
):
    if aligned:  # rows of a multiple of 16 bytes, which torch's grouped GEMM takes
        inputs, outputs = 8 * inputs, 8 * outputs
    x, weight, bias, grad, offsets = draw(
        counts, tail, inputs, outputs, dtype, seed, transposed=transposed
    )
    found = by_expert(x, weight, offsets, bias if has_bias else None)
    outer = outer_by_expert(grad, x, offsets)
    expected = torch.zeros(len(x), outputs, dtype=torch.float64)  # rows of no expert give zeros
    of_weights = torch.zeros(len(counts), outputs, inputs, dtype=torch.float64)
    row = 0
    for expert, count in enumerate(counts):
        for _ in range(count):
            expected[row] = weight[expert].double() @ x[row].double()
            expected[row] += bias[expert].double() if has_bias else 0.0
            of_weights[expert] += torch.outer(grad[row].double(), x[row].double())
            row += 1
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype] * inputs}
    assert found.dtype == outer.dtype == dtype
    torch.testing.assert_close(found.double(), expected, **close)
    torch.testing.assert_close(outer.double(), of_weights, **close)
    assert not found[sum(counts) :].any()


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of torch's grouped GEMM."""
    made, grouped_mm = [], torch.nn.functional.grouped_mm

    def counted(*args, **options):
        made.append(args)
        return grouped_mm(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    monkeypatch.setattr(products, "chooses_onednn", lambda x: False)
    return made


@pytest.mark.skipif(not HAS_GROUPED, reason="torch has no grouped GEMM for CPUs")
def test_one_call_has_the_bits_of_a_loop(calls, monkeypatch):
    x, weight, bias, grad, offsets = draw([40, 0, 3, 1, 21], 2, 32, 24, torch.float32, seed=0)
    one = by_expert(x, weight, offsets, bias), outer_by_expert(grad, x, offsets)
    assert len(calls) == 2
    monkeypatch.setattr(products, "MOST_EXPERTS", 0)
    loop = by_expert(x, weight, offsets, bias), outer_by_expert(grad, x, offsets)
    assert len(calls) == 2
    for found, expected in zip(one, loop, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
    if not torch.backends.mkl.is_available():
        return
    assert all(torch.equal(*pair) for pair in zip(one, loop, strict=True))


@pytest.mark.skipif(not HAS_GROUPED, reason="torch has no grouped GEMM for CPUs")
@pytest.mark.parametrize("bias", [True, False])
def test_a_training_step_multiplies_in_six_calls(bias, calls):
    moe = MoE(dim=16, hidden=32, num_experts=4, top_k=2, activation="gelu", bias=bias)
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with use_backend("cpu"):  # so small a layer would run in C
        y, _ = moe(x)
    y.sum().backward()
    assert len(calls) == 6  # up and down: forward, gradient of rows, gradient of weights
    assert all(one.grad is not None for one in (x, *moe.experts.parameters()))


@pytest.mark.skipif(not HAS_GROUPED, reason="torch has no grouped GEMM for CPUs")
def test_a_loop_adds_to_biases_where_they_would_take_longer_afterwards(calls):
    x, weight, bias, _, offsets = draw([2048], 0, 8, 8, torch.float32, seed=1)
    assert x.shape[0] * weight.shape[1] > products.MOST_WITH_BIAS
    by_expert(x, weight, offsets, bias)
    assert not calls
    by_expert(x, weight, offsets)
    assert len(calls) == 1


@pytest.mark.skipif(not HAS_GROUPED, reason="torch has no grouped GEMM for CPUs")
def test_a_loop_skips_experts_without_rows_where_nearly_all_have_none(calls):
    counts = [0] * 31 + [2]
    x, weight, _, grad, offsets = draw(counts, 0, 8, 8, torch.float32, seed=2)
    by_expert(x, weight, offsets)
    outer_by_expert(grad, x, offsets)
    assert not calls
