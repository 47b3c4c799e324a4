"""The expert kernels against experts/mlp.py, the definition, forward and every gradient."""

import pytest
import torch
from expert_cases import CASES, KERNELS, Layer, close

from acmoe.experts.mlp import ExpertMLP
from acmoe.ops.device.block_sizes import Blocks
from acmoe.ops.experts import ExpertWeights, expert_mlp
from acmoe.ops.experts.autograd import fused_expert_mlp
from acmoe.ops.sort import sort_rows
from slow_cases import mostly_slow, slow_on_cpu


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
    from acmoe.ops.experts.settings import lookup

    blocks = Blocks(16, 32, 32, 4, 2, copy_engine)
    monkeypatch.setattr(lookup, "OVERRIDE", dict.fromkeys(KERNELS, blocks))
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
    from acmoe.ops.experts.settings import lookup

    blocks = Blocks(16, 16, 16, 4, 2, splits=splits)
    monkeypatch.setattr(lookup, "OVERRIDE", {"down_weight": blocks, "up_weight": blocks})
    layer = Layer("relu", True, (40, 20, 24, 4, 2), device)
    expected, found = layer.reference(), layer.fused()
    for mine, right in zip(layer.gradients(found), layer.gradients(expected), strict=True):
        close(mine, right)


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
