"""Rows copied into sorted order before the GEMMs of the experts: when, how, and to what effect."""

import pytest
import torch
from expert_cases import KERNELS, Layer, close

from acmoe.ops.device.block_sizes import Blocks


# Wide experts read rows that were copied into sorted order; here every expert counts as wide. Each
# case has an expert without rows and rows without an expert, the third rows of no multiple of 16
# bytes, which the copy engine cannot read.
@pytest.mark.parametrize(
    ("case", "copy_engine"),
    [
        (("swiglu", True, (12, 36, 20, 3, 2)), True),
        pytest.param(("relu", True, (12, 36, 20, 3, 2)), False, marks=pytest.mark.slow),
        (("gelu", True, (12, 33, 20, 3, 1)), True),
    ],
)
def test_experts_over_copied_rows_are_the_experts(case, copy_engine, device, monkeypatch):
    from acmoe.ops.experts.settings import lookup

    blocks = Blocks(16, 32, 32, 4, 2, copy_engine)
    monkeypatch.setattr(lookup, "OVERRIDE", dict.fromkeys(KERNELS, blocks))
    monkeypatch.setattr(lookup, "COPY_OVERRIDE", [True, True])
    layer = Layer(*case, device)
    expected, found = layer.reference(), layer.fused()
    close(found, expected)
    for mine, right in zip(layer.gradients(found), layer.gradients(expected), strict=True):
        close(mine, right)


def test_copied_rows_give_the_bits_of_gathered_ones(device, monkeypatch):
    """The same products of the same rows, in the same order."""
    from acmoe.ops.experts.settings import lookup

    results = []
    for copied in (False, True):
        monkeypatch.setattr(lookup, "COPY_OVERRIDE", [copied, copied])
        layer = Layer("relu", True, (9, 16, 16, 3, 2), device)
        found = layer.fused()
        results.append([found, *layer.gradients(found)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_rows_are_copied_in_sorted_order_where_experts_are_wide(device):
    from acmoe.ops.experts.hopper.choice import gathers
    from acmoe.ops.experts.settings.rules import COPY_WIDTH
    from acmoe.ops.experts.triton.sizes import Sizes
    from acmoe.ops.experts.triton.tokens import row_operand

    x = torch.arange(12.0, device=device).view(4, 3)
    back = torch.tensor([1, 3, 5, 0, 6, 7, 2, 4], device=device)  # of choice k of token t: 2 t + k
    # W = COPY_WIDTH, and 64 rows an expert: with 32 or fewer the GEMM gathers.
    wide = Sizes(64, 3, COPY_WIDTH // 2, 2, 2, "swiglu")
    assert gathers("up", wide._replace(tokens=32), x.dtype, x.device)
    assert not gathers("up", wide, x.dtype, x.device)
    values, gather = row_operand(x, back, wide, gather=False)
    assert not gather and torch.equal(values, x[[1, 0, 3, 0, 3, 1, 2, 2]])
    assert gathers("up", wide._replace(act="relu"), x.dtype, x.device)
    values, gather = row_operand(x, back, wide, gather=True)
    assert gather and values is x


@pytest.mark.parametrize(("T", "D", "K"), [(5, 2500, 3), (3, 70, 18)])
@pytest.mark.parametrize("gated", [True, False])
def test_long_rows_and_many_choices_are_copied_and_summed(T, D, K, gated, device):
    # Rows of more than one block, and more choices than are under way together. The last two rows
    # are for no expert: never written, and in no sum.
    from acmoe.ops.experts.triton.sizes import Sizes
    from acmoe.ops.experts.triton.tokens import row_operand, run_combine

    generator = torch.Generator().manual_seed(0)
    back = torch.randperm(T * K, generator=generator)
    x = torch.randn(T, D, generator=generator)
    size = Sizes(T, D, 8, 4, K, "relu")
    rows = row_operand(x.to(device), back.to(device), size, gather=False).values.cpu()
    for choice, row in enumerate(back.tolist()):
        assert torch.equal(rows[row], x[choice // K])

    y, gate = torch.randn(T * K, D, generator=generator), torch.rand(T, K, generator=generator)
    y[-2:] = float("nan")
    end = torch.tensor([T * K - 2])
    found = run_combine(
        y.to(device), gate.to(device) if gated else None, back.to(device), end.to(device), T
    )
    for token in range(T):
        terms = [(back[token * K + k].item(), gate[token, k].item()) for k in range(K)]
        terms = [(row, share if gated else 1.0) for row, share in terms if row < T * K - 2]
        wanted = sum((y[row].double() * share for row, share in terms), torch.zeros(D).double())
        torch.testing.assert_close(found[token].cpu().double(), wanted, rtol=1e-5, atol=1e-5)


def test_the_table_has_the_last_word_on_copying(monkeypatch):
    from acmoe.ops.experts.settings import lookup, tables
    from acmoe.ops.experts.settings.rules import Layer

    layer = Layer(8, 4, 2, 8, rows=128)
    assert not lookup.copies_rows(layer)
    monkeypatch.setattr(tables, "package_table", lambda: {"copy/8/4/2": [False, True]})
    assert not lookup.copies_rows(layer)
    assert lookup.copies_rows(layer, backward=True)
