"""Experts of a few tokens as matrix-vector products, against sums in float64 and the definition."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.experts.mlp import ExpertMLP
from acmoe.ops.experts import ExpertWeights
from acmoe.ops.experts.autograd import fused_expert_mlp
from acmoe.ops.experts.settings import rules
from acmoe.ops.experts.settings.gemms import VectorBlocks
from acmoe.ops.sort import sort_rows
from slow_cases import mostly_slow

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_empty")


def drawn(activation, bias, sizes, device):
    tokens, dim, hidden, experts, top_k = sizes
    torch.manual_seed(dim)
    mlp = ExpertMLP(dim=dim, hidden=hidden, num_experts=experts, activation=activation, bias=bias)
    if bias:
        torch.nn.init.normal_(mlp.up_bias)
        torch.nn.init.normal_(mlp.down_bias)
    ids = torch.rand(tokens, experts).topk(top_k).indices
    return mlp.to(device), torch.randn(tokens, dim), ids, torch.rand(tokens, top_k)


def by_hand(mlp, x, ids, gate, *, absolute=False):
    """Return (T, D) in float64: token by token, choice by choice; the id E adds nothing.

    absolute: sum the absolute values of the terms of the second product instead.
    """
    out = torch.zeros_like(x, dtype=torch.float64)
    weights = [None if one is None else one.detach().double().cpu() for one in mlp.parameters()]
    up, down, *biases = weights
    for t, k in torch.cartesian_prod(torch.arange(ids.shape[0]), torch.arange(ids.shape[1])):
        e = ids[t, k]
        if e == up.shape[0]:
            continue
        h = up[e] @ x[t].double() + (biases[0][e] if biases else 0)
        half = h.shape[0] // 2
        a = {
            "relu": lambda h=h: F.relu(h),
            "gelu": lambda h=h: F.gelu(h),
            "swiglu": lambda h=h, half=half: F.silu(h[:half]) * h[half:],
        }[mlp.activation]()
        if absolute:
            out[t] += gate[t, k] * (down[e].abs() @ a.abs())
            continue
        out[t] += gate[t, k] * (down[e] @ a + (biases[1][e] if biases else 0))
    return out


def fused(mlp, x, ids, gate, device, dtype=torch.float32):
    rows = sort_rows.definition(ids.to(device), mlp.up.shape[0])
    weights = ExpertWeights(mlp.up.to(dtype), mlp.down.to(dtype), mlp.up_bias, mlp.down_bias)
    with torch.no_grad():
        return fused_expert_mlp(
            *(x.to(device, dtype), weights, rows, gate.to(device)), activation=mlp.activation
        ).cpu()


@pytest.fixture
def vectors(monkeypatch):
    """The launches of matrix-vector products, counted, in blocks of which a row has several."""
    from acmoe.ops.experts.triton import launched

    seen = []
    run = launched.run_vectors
    monkeypatch.setattr(launched, "run_vectors", lambda *args: (seen.append(args), run(*args))[1])
    small = {"up": VectorBlocks(4, 256, 4, 1), "down": VectorBlocks(4, 256, 4, 1)}
    monkeypatch.setattr(rules, "VECTORS", small)
    monkeypatch.setattr(rules, "VECTOR_TOKENS", 4)  # more than pay on a card, to test the kernel
    return seen


# activation, bias, (tokens, features, hidden units, experts, experts per token)
@mostly_slow(
    ("activation", "bias", "sizes"),
    [
        ("swiglu", False, (1, 70, 33, 9, 3)),  # widths of no even bytes, 3 of 4 places for choices
        ("relu", True, (3, 40, 50, 12, 2)),
        ("gelu", True, (2, 64, 48, 4, 2)),
        ("swiglu", True, (4, 32, 16, 6, 1)),
        ("relu", False, (1, 1, 1, 1, 1)),
    ],
    keep=(0, 1, 4),
)
def test_a_few_tokens_are_multiplied_as_vectors(activation, bias, sizes, vectors, device):
    given = drawn(activation, bias, sizes, device)
    found = fused(*given, device)
    assert len(vectors) == 1
    torch.testing.assert_close(found.double(), by_hand(*given), rtol=1e-5, atol=1e-6)


def test_a_choice_without_an_expert_adds_nothing(vectors, device):
    mlp, x, ids, gate = drawn("swiglu", False, (3, 24, 20, 8, 2), device)
    ids[0, 1], ids[1] = 8, 8
    gate[1] = float("inf")
    found = fused(mlp, x, ids, gate, device)
    assert len(vectors) == 1 and torch.equal(found[1], torch.zeros(24))
    wanted = by_hand(mlp, x, ids, gate)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


def test_tokens_may_share_an_expert(vectors, device):
    mlp, x, ids, gate = drawn("swiglu", False, (4, 24, 20, 8, 2), device)
    ids[:] = torch.tensor([5, 2])
    found = fused(mlp, x, ids, gate, device)
    assert len(vectors) == 1
    torch.testing.assert_close(found.double(), by_hand(mlp, x, ids, gate), rtol=1e-5, atol=1e-6)


@mostly_slow("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_round_hidden_units_and_outputs(dtype, vectors, device):
    mlp, x, ids, gate = drawn("swiglu", False, (1, 40, 24, 4, 2), device)
    found = fused(mlp, x, ids, gate, device, dtype)
    assert len(vectors) == 1 and found.dtype == dtype
    low, x = mlp.to(dtype), x.to(dtype)
    wanted, size = by_hand(low, x, ids, gate), by_hand(low, x, ids, gate, absolute=True)
    # Rounded on the way: gate (which moves silu by up to twice as much), up, their product and y;
    # by up to eps each, since the interpreter cuts off.
    assert ((found.double() - wanted).abs() <= 5 * torch.finfo(dtype).eps * size).all()


def test_which_calls_are_multiplied_as_vectors():
    """One token of at most 16 choices, no more than there are experts."""
    assert rules.by_vectors(1, 16, 16) and rules.by_vectors(1, 2, 8)
    assert not rules.by_vectors(2, 1, 8)
    assert not rules.by_vectors(1, 17, 64)
    assert not rules.by_vectors(1, 8, 7)


def test_no_call_with_a_gradient_or_dropout_is_multiplied_as_vectors(vectors, device):
    mlp, x, ids, gate = drawn("relu", False, (1, 16, 16, 4, 2), device)
    rows = sort_rows.definition(ids.to(device), 4)
    weights = ExpertWeights(mlp.up, mlp.down, None, None)
    given = (x.to(device), weights, rows, gate.to(device))
    fused_expert_mlp(*given, activation="relu")  # the weights want a gradient
    with torch.no_grad():
        fused_expert_mlp(*given, activation="relu", dropout=0.5)
    assert not vectors


@pytest.mark.parametrize(
    ("kernel", "inner", "parallel", "expected"),
    [
        ("up", 2048, 2, (4, 1024, 4, 1)),  # 8,192 elements: 4 columns of gate and up
        ("up", 40, 1, (4, 64, 4, 1)),
        ("down", 1024, 8, (4, 256, 4, 1)),
        ("down", 512, 16, (4, 128, 4, 1)),
        ("down", 1, 1, (4, 16, 4, 1)),
    ],
)
def test_a_program_loads_so_many_elements_at_a_time(kernel, inner, parallel, expected, monkeypatch):
    blocks = VectorBlocks(4, 8192, 4, 1)
    monkeypatch.setattr(rules, "VECTORS", {"up": blocks, "down": blocks})
    assert rules.vector_blocks(kernel, inner, parallel) == expected


@pytest.mark.parametrize(("rows", "experts"), [(1, 1), (17, 40), (1030, 5)])
def test_few_rows_are_sorted_by_one_launch(rows, experts, device, monkeypatch):
    from acmoe.ops.sort.triton import sort

    monkeypatch.setattr(sort, "_count_kernel", None)
    ids = torch.randint(0, experts + 1, (rows, 1), generator=torch.Generator().manual_seed(rows))
    found = sort.sort_rows(ids.to(device), experts)
    for one, wanted in zip(found, sort_rows.definition(ids, experts), strict=False):
        assert torch.equal(one.cpu(), wanted)
