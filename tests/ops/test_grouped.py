"""One matrix product per expert, against a loop over rows.

N rows, I features in, O features out, E experts.
"""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from acmoe.ops.experts.cpu import products
from acmoe.ops.experts.grouped import grouped_linear
from acmoe.ops.experts.grouped_mm import grouped_mm
from slow_cases import mostly_slow

# Rows per expert, and rows behind the last one.
LOADS = {
    "some experts empty": ([3, 0, 2, 0], 0),
    "all rows to one expert": ([0, 0, 6, 0], 0),
    "rows of no expert": ([1, 2, 0, 1], 3),
    "every row of no expert": ([0, 0, 0, 0], 4),
    "no rows": ([0, 0, 0, 0], 0),
    "one expert": ([5], 2),
}
loads = pytest.mark.parametrize(("load", "behind"), LOADS.values(), ids=LOADS.keys())
few_loads = mostly_slow(("load", "behind"), LOADS.values(), ids=LOADS.keys(), keep=(0, 3))


def case(load: list[int], behind: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x_NI = torch.randn(sum(load) + behind, 3, dtype=torch.float64, generator=generator)
    weight_EOI = torch.randn(len(load), 5, 3, dtype=torch.float64, generator=generator)
    return x_NI, weight_EOI, torch.tensor(load).cumsum(0)


def wide_case(load: list[int], behind: int) -> tuple[Tensor, Tensor, Tensor]:
    """float32 and widths of 16 bytes, which torch's own grouped kernel asks for."""
    generator = torch.Generator().manual_seed(0)
    x_NI = torch.randn(sum(load) + behind, 8, generator=generator)
    weight_EOI = torch.randn(len(load), 16, 8, generator=generator)
    return x_NI, weight_EOI, torch.tensor(load).cumsum(0)


def loop(x_NI: Tensor, weight_EOI: Tensor, end_E: Tensor) -> Tensor:
    """Each number of each row as a sum of products, in plain Python."""
    out = torch.zeros(x_NI.shape[0], weight_EOI.shape[1], dtype=x_NI.dtype)
    for expert, (start, end) in enumerate(pairwise([0, *end_E.tolist()])):
        for row in range(start, end):
            for o in range(weight_EOI.shape[1]):
                products = zip(x_NI[row].tolist(), weight_EOI[expert, o].tolist(), strict=True)
                out[row, o] = sum(x * w for x, w in products)
    return out


@given(
    load=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    behind=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_every_row_meets_its_own_expert(load: list[int], behind: int, seed: int) -> None:
    x_NI, weight_EOI, end_E = case(load, behind, seed)
    torch.testing.assert_close(
        grouped_linear(x_NI, weight_EOI, end_E), loop(x_NI, weight_EOI, end_E)
    )


@loads
def test_torchs_own_grouped_kernel_agrees(load: list[int], behind: int) -> None:
    x_NI, weight_EOI, end_E = wide_case(load, behind)
    inputs = [x_NI.requires_grad_(), weight_EOI.requires_grad_()]
    results = []
    for product in (grouped_linear, grouped_mm):
        out_NO = product(x_NI, weight_EOI, end_E)
        results.append([out_NO, *torch.autograd.grad(out_NO.square().sum(), inputs)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@loads
def test_gradcheck_in_rows_and_weights(load: list[int], behind: int) -> None:
    x_NI, weight_EOI, end_E = case(load, behind)
    inputs = (x_NI.requires_grad_(), weight_EOI.requires_grad_(), end_E)
    assert torch.autograd.gradcheck(grouped_linear, inputs)


@loads
@pytest.mark.parametrize("product", [grouped_linear, grouped_mm])
def test_rows_of_no_expert_and_experts_of_no_row_get_zeros(
    load: list[int],
    behind: int,
    product: Callable[[Tensor, Tensor, Tensor], Tensor],
    poisoned_empty: None,
) -> None:
    x_NI, weight_EOI, end_E = wide_case(load, behind)
    x_NI[end_E[-1] :] = torch.nan
    out_NO = product(x_NI.requires_grad_(), weight_EOI.requires_grad_(), end_E)
    (out_NO * torch.randn_like(out_NO)).sum().backward()
    assert x_NI.grad is not None
    assert weight_EOI.grad is not None
    assert (out_NO[end_E[-1] :] == 0).all()
    assert (x_NI.grad[end_E[-1] :] == 0).all()
    assert x_NI.grad.isfinite().all()
    for expert, rows in enumerate(load):
        assert bool((weight_EOI.grad[expert] != 0).any()) == (rows > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_calls_give_equal_bits(dtype: torch.dtype, generator: torch.Generator) -> None:
    x_NI = torch.randn(200, 24, generator=generator).to(dtype)
    weight_EOI = torch.randn(8, 40, 24, generator=generator).to(dtype)
    end_E = torch.arange(25, 201, 25)

    def run() -> list[Tensor]:
        x, weight = x_NI.clone().requires_grad_(), weight_EOI.clone().requires_grad_()
        out = grouped_linear(x, weight, end_E)
        return [out, *torch.autograd.grad(out.float().square().sum(), [x, weight])]

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


def test_strided_rows_weights_and_gradients_are_read_rightly() -> None:
    x_NI, weight_EOI, end_E = case([2, 0, 3], 1)
    x = x_NI.T.contiguous().T.requires_grad_()
    weight = weight_EOI.mT.contiguous().mT.requires_grad_()
    out = grouped_linear(x, weight, end_E)
    upstream = torch.ones(1, 1, dtype=torch.float64).expand_as(out)
    found = torch.autograd.grad(out, [x, weight], upstream)
    plain = [x_NI.requires_grad_(), weight_EOI.requires_grad_()]
    expected = torch.autograd.grad(grouped_linear(*plain, end_E).sum(), plain)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@few_loads
def test_both_operators_keep_what_they_promise_the_compiler(load: list[int], behind: int) -> None:
    x_NI, weight_EOI, end_E = case(load, behind)
    linear = torch.ops.acmoe.grouped_linear.default
    torch.library.opcheck(linear, (x_NI, weight_EOI, end_E))
    torch.library.opcheck(linear, (x_NI.requires_grad_(), weight_EOI.requires_grad_(), end_E))
    grad_NO = torch.ones(x_NI.shape[0], 5, dtype=torch.float64)
    torch.library.opcheck(torch.ops.acmoe.grouped_outer.default, (grad_NO, x_NI.detach(), end_E))


def test_the_compiler_sees_one_graph_for_every_load() -> None:
    compiled = torch.compile(grouped_linear, fullgraph=True, backend="aot_eager")
    for load in ([2, 0, 3], [0, 5, 0]):
        x_NI, weight_EOI, end_E = case(load, 1)
        plain = [x_NI.requires_grad_(), weight_EOI.requires_grad_()]
        found, expected = compiled(*plain, end_E), grouped_linear(*plain, end_E)
        torch.testing.assert_close(found, expected)
        for mine, theirs in zip(
            torch.autograd.grad(found.square().sum(), plain),
            torch.autograd.grad(expected.square().sum(), plain),
            strict=True,
        ):
            torch.testing.assert_close(mine, theirs)


# Bounds of products.py under which products take each of its layouts.
LAYOUTS = {
    "weights copied": {"FEW_ROWS": 0},
    "result copied": {"FEW_ROWS": 0, "TINY": 0},
    "operands exchanged": {"FEW_ROWS": 0, "TINY": 0, "LARGE": 0},
    "as they are": {"FEW_ROWS": 0, "TINY": 0, "LARGE": 0, "MANY_ROWS": 0},
}


@pytest.mark.parametrize("bounds", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_of_a_product_gives_the_same(
    bounds: dict[str, int], monkeypatch: pytest.MonkeyPatch, poisoned_empty: None
) -> None:
    monkeypatch.setattr(products, "chooses_onednn", lambda x: True)
    for name, value in bounds.items():
        monkeypatch.setattr(products, name, value)
    x_NI, weight_EOI, end_E = case([3, 0, 2, 1, products.FEWEST_ROWS + 1], 1)
    expected = loop(x_NI, weight_EOI, end_E)
    transposed = weight_EOI.mT.contiguous().mT
    for weight in (weight_EOI, transposed):
        torch.testing.assert_close(grouped_linear(x_NI, weight, end_E), expected)
        inputs = (x_NI.requires_grad_(), weight.requires_grad_(), end_E)
        assert torch.autograd.gradcheck(grouped_linear, inputs)


def test_layouts_change_only_where_torch_would_take_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_arm_with_onednn", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
    assert products.chooses_onednn(torch.ones(1))
    assert not products.chooses_onednn(torch.ones(1, dtype=torch.float64))
    assert not products.chooses_onednn(torch.ones(1, device="meta"))
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not products.chooses_onednn(torch.ones(1))


@loads
def test_each_row_gets_the_bias_of_its_expert(load: list[int], behind: int) -> None:
    x_NI, weight_EOI, end_E = case(load, behind)
    bias_EO = torch.arange(len(load) * 5, dtype=torch.float64).view(-1, 5)
    expected = loop(x_NI, weight_EOI, end_E)
    start = 0
    for expert, end in enumerate(end_E.tolist()):
        expected[start:end] += bias_EO[expert]
        start = end
    torch.testing.assert_close(grouped_linear(x_NI, weight_EOI, end_E, bias_EO), expected)
    inputs = [one.requires_grad_() for one in (x_NI, weight_EOI, bias_EO)]
    grads = torch.autograd.grad(grouped_linear(*inputs[:2], end_E, bias_EO).sum(), inputs)
    # The gradient of a sum: each bias is added once for every row of its expert.
    assert torch.equal(grads[2], torch.tensor(load, dtype=torch.float64)[:, None].expand(-1, 5))
    assert torch.autograd.gradcheck(
        lambda x, weight, bias: grouped_linear(x, weight, end_E, bias), tuple(inputs)
    )


def test_second_derivatives_of_products_with_a_bias() -> None:
    x_NI, weight_EOI, end_E = case([2, 0, 1], 1)
    bias_EO = torch.ones(3, 5, dtype=torch.float64)
    inputs = tuple(one.requires_grad_() for one in (x_NI, weight_EOI, bias_EO))
    assert torch.autograd.gradgradcheck(
        lambda x, weight, bias: grouped_linear(x, weight, end_E, bias).pow(3), inputs
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's
def test_compiled_autograd_traces_the_gradients_of_products_as_one_graph() -> None:
    x_NI, weight_EOI, end_E = case([3, 0, 2], 1)
    leaves = x_NI.requires_grad_(), weight_EOI.requires_grad_()
    y = grouped_linear(*leaves, end_E).square().sum()
    wanted = torch.autograd.grad(y, leaves, retain_graph=True)
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(compiler):
        found = torch.autograd.grad(y, leaves)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("rows", [[1, 0, 1], [2, 5, 0], [2, 7, 1]])
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_of_an_expert_are_products_with_vectors(
    rows: list[int], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "WIDE", 1)  # every weight counts as a large one
    monkeypatch.setattr(products, "chooses_onednn", lambda x: True)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(rows) + 1, 5, generator=generator, requires_grad=True)
    weight = torch.randn(3, 4, 5, generator=generator, requires_grad=True)
    bias_EO = torch.randn(3, 4, generator=generator) if bias else None
    offsets = torch.tensor(rows).cumsum(0)
    found = grouped_linear(x, weight, offsets, bias_EO)
    expert = [e for e, n in enumerate(rows) for _ in range(n)]
    wanted = torch.stack(
        [weight[e] @ x[r] + (0 if bias_EO is None else bias_EO[e]) for r, e in enumerate(expert)]
        + [torch.zeros(4)]  # the last row has no expert
    )
    torch.testing.assert_close(found, wanted)
    up = torch.randn(found.shape, generator=generator)
    got = torch.autograd.grad(found, (x, weight), up)
    for one, other in zip(got, torch.autograd.grad(wanted, (x, weight), up), strict=True):
        torch.testing.assert_close(one, other)


@loads
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_a_bias_has_the_bits_of_a_one_hot_product(
    dtype: torch.dtype, load: list[int], behind: int
) -> None:
    x_NI, weight_EOI, end_E = (one for one in case(load, behind))
    bias_EO = torch.zeros(len(load), 5, dtype=dtype, requires_grad=True)
    y_NO = grouped_linear(x_NI.to(dtype), weight_EOI.to(dtype), end_E, bias_EO)
    grad_NO = torch.randn(y_NO.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    (found,) = torch.autograd.grad(y_NO, bias_EO, grad_NO)
    expert_N = [e for e, rows in enumerate(load) for _ in range(rows)] + [len(load)] * behind
    one_hot_NE = torch.zeros(len(expert_N), len(load) + 1, dtype=dtype)
    one_hot_NE[range(len(expert_N)), expert_N] = 1
    assert torch.equal(found, one_hot_NE[:, :-1].contiguous().T.mm(grad_NO))
