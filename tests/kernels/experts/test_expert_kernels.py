"""The expert kernels against experts/mlp.py, the definition, forward and every gradient."""

import pytest
import torch

from acmoe.experts.mlp import ExpertMLP
from acmoe.ops.device.settings import Blocks
from acmoe.ops.experts import ExpertWeights, expert_mlp
from acmoe.ops.experts.autograd import fused_expert_mlp
from acmoe.ops.sort import Rows, sort_rows
from slow_cases import mostly_slow, slow_on_cpu

KERNELS = ("up", "down", "hidden", "down_weight", "up_weight", "input")
# activation, bias, (tokens, features, hidden units, experts, experts per token)
CASES = [
    ("relu", True, (37, 40, 24, 5, 2)),
    ("gelu", True, (20, 33, 40, 3, 1)),
    ("swiglu", False, (37, 48, 40, 4, 3)),
    ("swiglu", True, (19, 64, 70, 4, 2)),
    ("relu", False, (5, 16, 16, 1, 1)),
    ("swiglu", False, (3, 40, 33, 9, 2)),  # more experts than tokens, widths of no even bytes
]


class Layer:
    """Experts, tokens, gate and a routing that leaves expert 1 empty and two tokens unserved."""

    def __init__(self, activation, bias, sizes, device, *, one_expert=False):
        tokens, dim, hidden, experts, top_k = sizes
        torch.manual_seed(tokens)
        mlp = ExpertMLP(
            dim=dim, hidden=hidden, num_experts=experts, activation=activation, bias=bias
        )
        if bias:
            torch.nn.init.normal_(mlp.up_bias)
            torch.nn.init.normal_(mlp.down_bias)
        self.mlp = mlp.to(device)
        self.x = torch.randn(tokens, dim, device=device, requires_grad=True)
        self.gate = torch.rand(tokens, top_k, device=device, requires_grad=True)
        ids = torch.rand(tokens, experts).topk(top_k).indices
        if experts > 2:
            ids[ids == 1] = 2
        if one_expert:
            ids[:] = experts - 1
        ids[2:4] = experts  # no expert
        self.ids = ids.to(device)
        self.order: Rows = sort_rows.definition(self.ids, experts)
        self.cotangent = torch.randn(tokens, dim, device=device)

    @property
    def leaves(self):
        return [self.x, self.gate, *self.mlp.parameters()]

    def reference(self):
        mlp = self.mlp
        weights = ExpertWeights(mlp.up, mlp.down, mlp.up_bias, mlp.down_bias)
        return expert_mlp.definition(
            self.x, weights, self.order, self.gate, activation=mlp.activation
        )

    def fused(self, **options):
        mlp = self.mlp
        weights = ExpertWeights(mlp.up, mlp.down, mlp.up_bias, mlp.down_bias)
        return fused_expert_mlp(
            *(self.x, weights, self.order, self.gate), activation=mlp.activation, **options
        )

    def gradients(self, out):
        return torch.autograd.grad(out, self.leaves, self.cotangent)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# Rows of 33 numbers are no multiple of 16 bytes: asked for the copy engine, the kernels do without.
@pytest.mark.parametrize(
    ("activation", "bias", "sizes", "copy_engine"),
    [
        *((*CASES[n], False) for n in (0, 1, 4, 5)),
        pytest.param(*CASES[2], False, marks=pytest.mark.slow),
        pytest.param(*CASES[3], False, marks=pytest.mark.slow),
        pytest.param(*CASES[1], True, marks=pytest.mark.slow),
        (*CASES[2], True),
    ],
)
def test_the_fused_experts_are_the_experts(
    activation, bias, sizes, copy_engine, device, monkeypatch
):
    from acmoe.ops.device import tuning

    blocks = Blocks(16, 32, 32, 4, 2, copy_engine)
    monkeypatch.setattr(tuning, "OVERRIDE", dict.fromkeys(KERNELS, blocks))
    layer = Layer(activation, bias, sizes, device)
    expected, found = layer.reference(), layer.fused()
    close(found, expected)
    for mine, right in zip(layer.gradients(found), layer.gradients(expected), strict=True):
        close(mine, right)


# Swin-MoE has a bias in the first product alone.
@pytest.mark.parametrize("missing", ["up_bias", "down_bias"])
def test_each_bias_gets_its_gradient_without_the_other(missing, device):
    layer = Layer("gelu", True, (14, 20, 24, 3, 2), device)
    setattr(layer.mlp, missing, None)
    expected, found = layer.reference(), layer.fused()
    close(found, expected)
    for mine, right in zip(layer.gradients(found), layer.gradients(expected), strict=True):
        close(mine, right)


@mostly_slow("compiled", [False, True])
def test_tokens_of_16_bits_give_wide_weights_a_gradient_that_is_not_rounded(compiled, device):
    layer = Layer("relu", False, (40, 20, 24, 4, 2), device)
    mlp = layer.mlp

    def fused(up, down):
        low = layer.x.detach().bfloat16()
        weights = ExpertWeights(up, down, None, None)
        return fused_expert_mlp(low, weights, layer.order, layer.gate, activation="relu")

    call = torch.compile(fused, fullgraph=True, backend="aot_eager") if compiled else fused
    cotangent = layer.cotangent.bfloat16()
    weights = [weight.detach().requires_grad_() for weight in (mlp.up, mlp.down)]
    wide = torch.autograd.grad(call(*weights), weights, cotangent)
    weights = [weight.detach().bfloat16().requires_grad_() for weight in weights]
    narrow = torch.autograd.grad(fused(*weights), weights, cotangent)
    for one, other in zip(wide, narrow, strict=True):
        assert one.dtype == torch.float32 and other.dtype == torch.bfloat16
        # The interpreter cuts off what a GPU rounds.
        torch.testing.assert_close(one, other.float(), rtol=2**-7, atol=1e-6)
        assert not torch.equal(one, other.float())


@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_an_expert_s_rows_may_be_summed_in_parts(splits, device, monkeypatch):
    """A part has at most 16 rows, so that some experts have fewer than there are parts."""
    from acmoe.ops.device import tuning

    blocks = Blocks(16, 16, 16, 4, 2, splits=splits)
    monkeypatch.setattr(tuning, "OVERRIDE", {"down_weight": blocks, "up_weight": blocks})
    layer = Layer("relu", True, (40, 20, 24, 4, 2), device)
    expected, found = layer.reference(), layer.fused()
    for mine, right in zip(layer.gradients(found), layer.gradients(expected), strict=True):
        close(mine, right)


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
    from acmoe.ops.device import tuning

    blocks = Blocks(16, 32, 32, 4, 2, copy_engine)
    monkeypatch.setattr(tuning, "OVERRIDE", dict.fromkeys(KERNELS, blocks))
    monkeypatch.setattr(tuning, "COPY_OVERRIDE", [True, True])
    layer = Layer(*case, device)
    expected, found = layer.reference(), layer.fused()
    close(found, expected)
    for mine, right in zip(layer.gradients(found), layer.gradients(expected), strict=True):
        close(mine, right)


def test_copied_rows_give_the_bits_of_gathered_ones(device, monkeypatch):
    """The same products of the same rows, in the same order."""
    from acmoe.ops.device import tuning

    results = []
    for copied in (False, True):
        monkeypatch.setattr(tuning, "COPY_OVERRIDE", [copied, copied])
        layer = Layer("relu", True, (9, 16, 16, 3, 2), device)
        found = layer.fused()
        results.append([found, *layer.gradients(found)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_rows_are_copied_in_sorted_order_where_experts_are_wide(device):
    from acmoe.ops.device.rules import COPY_WIDTH
    from acmoe.ops.experts.hopper.choice import gathers
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
    from acmoe.ops.device import tuning
    from acmoe.ops.device.rules import Layer

    layer = Layer(8, 4, 2, 8, rows=128)
    assert not tuning.copies_rows(layer)
    monkeypatch.setattr(tuning, "_table", lambda: {"copy/8/4/2": [False, True]})
    assert not tuning.copies_rows(layer)
    assert tuning.copies_rows(layer, backward=True)


def test_no_tokens_have_no_outputs_and_no_gradient(device):
    mlp = ExpertMLP(dim=16, hidden=24, num_experts=3, activation="swiglu", bias=False).to(device)
    x, gate = torch.empty(0, 16, device=device), torch.empty(0, 2, device=device)
    rows = sort_rows(torch.empty(0, 2, dtype=torch.int64, device=device), 3)
    out = expert_mlp(
        x, ExpertWeights(mlp.up, mlp.down, None, None), rows, gate, activation="swiglu"
    )
    assert out.shape == (0, 16)
    for gradient in torch.autograd.grad(out.sum(), (mlp.up, mlp.down)):
        assert not gradient.any()


def test_all_rows_may_go_to_one_expert(device):
    layer = Layer("swiglu", True, (40, 32, 24, 3, 2), device, one_expert=True)
    expected, found = layer.reference(), layer.fused()
    close(found, expected)
    for mine, right in zip(layer.gradients(found), layer.gradients(expected), strict=True):
        close(mine, right)


def test_a_token_without_an_expert_gets_zeros_and_sends_no_gradient(device):
    layer = Layer("gelu", True, (12, 16, 16, 3, 2), device)
    found = layer.fused()
    dx, dgate, *_ = layer.gradients(found)
    assert found[2:4].abs().max() == 0
    assert dx[2:4].abs().max() == 0
    assert dgate[2:4].abs().max() == 0


@slow_on_cpu
def test_equal_inputs_give_equal_bits(device):
    layer = Layer("swiglu", True, (24, 32, 24, 4, 2), device)
    first, second = layer.fused(), layer.fused()
    assert torch.equal(first, second)
    for a, b in zip(layer.gradients(first), layer.gradients(second), strict=True):
        assert torch.equal(a, b)


@mostly_slow("case", [CASES[0], CASES[2]])
def test_nothing_is_kept_for_a_backward_that_will_not_come(case, device, monkeypatch):
    from acmoe.ops.experts.triton import launched

    kept = []

    def watched(*args, **options):
        h, a = run_up(*args, **options)
        kept.append(h.shape[0])
        return h, a

    run_up = launched.run_up
    monkeypatch.setattr(launched, "run_up", watched)
    layer = Layer(*case, device)
    trained = layer.fused()
    with torch.no_grad():
        plain = layer.fused()
    compiled = torch.compile(layer.fused, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(), trained)
    assert torch.equal(plain, trained)
    assert kept == [layer.ids.numel(), 0, 0]
    for parameter in layer.leaves:
        parameter.requires_grad_(False)
    assert torch.equal(layer.fused(), trained) and kept[-1] == 0


def test_backward_drops_the_units_that_forward_dropped(device):
    """ReLU of positive units: y is linear in down, so that <y, g> = <down, dy/ddown g>."""
    layer = Layer("relu", False, (10, 16, 16, 2, 1), device)
    with torch.no_grad():
        layer.x.abs_()
        layer.mlp.up.abs_()
    out = layer.fused(dropout=0.5)
    (d_down,) = torch.autograd.grad(out, [layer.mlp.down], layer.cotangent)
    close((d_down * layer.mlp.down).sum(), (out * layer.cotangent).sum())
    plain = layer.fused()
    assert not torch.allclose(out, plain)


def test_a_second_backward_through_a_retained_graph_raises(device):
    """The first one wrote the gradient of h over h."""
    layer = Layer("relu", False, (8, 16, 16, 2, 1), device)
    out = layer.fused().sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.filterwarnings("ignore:.*")  # dynamo warns of its own internals
def test_the_op_compiles_in_one_graph(device):
    layer = Layer("swiglu", True, (12, 16, 16, 3, 2), device)
    compiled = torch.compile(lambda: layer.fused(), fullgraph=True, backend="aot_eager")
    expected, found = layer.reference(), compiled()
    close(found, expected)
    for mine, right in zip(layer.gradients(found), layer.gradients(expected), strict=True):
        close(mine, right)


@mostly_slow("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_stay_near_the_float32_result(dtype, device):
    layer = Layer("swiglu", True, (24, 32, 24, 4, 2), device)
    expected = layer.reference()
    right = [expected, *layer.gradients(expected)]
    layer.mlp.to(dtype)
    layer.x, layer.cotangent = (
        layer.x.detach().to(dtype).requires_grad_(),
        layer.cotangent.to(dtype),
    )
    found = layer.fused()
    # Up to four products and an activation, each rounded to 8 (bf16) or 11 bits.
    for mine, wanted in zip([found, *layer.gradients(found)], right, strict=True):
        assert (mine.float() - wanted).norm() < 2e-2 * wanted.norm()


def test_tensors_need_not_lie_row_by_row(device):
    """Kernels count places by rows; what lies otherwise is copied, not misread."""
    layer = Layer("gelu", True, (9, 20, 24, 3, 2), device)
    expected = layer.reference()
    right = [expected, *layer.gradients(expected)]

    def turned(tensor):
        return tensor.detach().mT.contiguous().mT.requires_grad_()

    layer.x, layer.gate = turned(layer.x), turned(layer.gate)
    for name, parameter in layer.mlp.named_parameters():
        setattr(layer.mlp, name, torch.nn.Parameter(turned(parameter).detach()))
    found = layer.fused()
    for mine, wanted in zip([found, *layer.gradients(found)], right, strict=True):
        close(mine, wanted)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"),
    [(100, 2, 5), (1, 1, 1), (700, 3, 16), (300, 8, 40), (64, 2, 100)],
)
def test_the_counting_sort_is_the_stable_sort(tokens, top_k, experts, device, monkeypatch):
    from acmoe.ops.sort.triton import sort
    from acmoe.ops.sort.triton.sort import sort_rows as counting_sort

    monkeypatch.setattr(sort, "FEW_ROWS", 0)
    torch.manual_seed(tokens)
    ids = torch.randint(0, experts + 1, (tokens, top_k), device=device)
    right = sort_rows.definition(ids, experts)
    for found, wanted in zip(counting_sort(ids, experts), right[:4], strict=True):
        assert torch.equal(found, wanted)


def test_tiles_cover_every_row_once(device):
    from acmoe.ops.experts.triton.tiles import HEIGHTS, Plan

    # Experts of 0, 5, 0, 32 and 3 rows; 7 rows for no expert.
    end = torch.tensor([0, 5, 5, 37, 40], device=device)
    plan = Plan(torch.arange(47, device=device), end, 1)
    expert, start = (table.tolist() for table in plan[16])
    tiles = list(zip(expert, start, strict=True))
    assert tiles[:4] == [(1, 0), (3, 5), (3, 21), (4, 37)]
    assert tiles[4:] == [(-1, 40), (-1, 56), (-1, 72), (-1, 88)]  # of 47 / 16, up, and 5
    for height in HEIGHTS:
        expert, start = plan[height]
        of_experts = [e for e in expert.tolist() if e >= 0]
        assert of_experts == ([1, 3, 3, 4] if height == 16 else [1, 3, 4])
        assert start[expert < 0].min() == 40


def test_every_row_finds_its_token(device):
    from acmoe.ops.experts.triton.tiles import Plan

    order = torch.tensor([5, 0, 3, 1, 4, 2], device=device)  # row 3 t + k of token t
    plan = Plan(order, torch.tensor([6], device=device), 3)
    assert plan.token.tolist() == [1, 0, 1, 0, 1, 0]
