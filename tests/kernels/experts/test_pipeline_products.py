"""The Hopper GEMMs with a multistage TMA pipeline, emulated on a CPU, against float64 and Triton.

Gluon has no interpreter: tools/gluon_emulator runs the kernels' Python, with warps of different
roles as threads, and completes asynchronous copies and MMAs as late as it may.
D features, F hidden units, N rows, E experts; I, O inner and outer dimension of a product.
"""

import pytest
import torch
from expert_cases import Layer
from pipeline_cases import (
    COUNTS,
    NOBODY,
    assert_near,
    assert_sums_of_experts,
    drawn,
    each_expert,
    noted,
    plan_of,
)

from slow_cases import mostly_slow


@mostly_slow(
    ("across", "inner", "outer", "settings"),
    [
        (True, 192, 256, ("ping-pong", 3)),
        (False, 192, 256, ("ping-pong", 6)),  # a tile has fewer K blocks than stages
        (True, 256, 512, ("cooperative", 3)),
        (False, 256, 256, ("cooperative", 4)),
        (False, 64, 512, ("cooperative", 4)),  # a tile has fewer K blocks than stages
        # Outer dimensions that are no multiple of a tile: the last one overlaps its neighbour.
        (True, 64, 208, ("ping-pong", 2)),
        (False, 256, 272, ("cooperative", 3)),
    ],
    keep=(0, 3),
)
def test_rows_gemms_by_a_pipeline_are_their_products(
    across, inner, outer, settings, device, hopper_launch
):
    from acmoe.ops.experts.settings.gemms import PipelineConfig

    plan = plan_of(COUNTS, NOBODY, device)
    a_NI = drawn(plan.num_rows, inner, device=device)
    shape = (inner, outer) if across else (outer, inner)
    weight = drawn(len(COUNTS), *shape, device=device)
    y_NO = hopper_launch.launch_rows(a_NI, weight, plan, PipelineConfig(*settings), across=across)
    right_NO = torch.zeros(y_NO.shape, dtype=torch.float64, device=device)
    for expert, rows in each_expert(plan):
        w = weight[expert].double()
        right_NO[rows] = a_NI[rows].double() @ (w if across else w.T)
    routed = sum(COUNTS)
    assert_near(y_NO[:routed], right_NO[:routed])


@pytest.mark.parametrize("over", [False, True])
@mostly_slow(
    ("counts", "dim", "hidden", "settings"),
    [
        (COUNTS, 128, 256, ("ping-pong", 2, 2)),
        ((1, 256, 63), 192, 128, ("ping-pong", 4, 1)),
        ((130, 0, 70), 64, 192, ("ping-pong", 2, 2)),  # the last tile has one panel of two
        ((70,), 64, 64, ("ping-pong", 2, 1)),  # and the only one
        (COUNTS, 128, 256, ("cooperative", 2, 2)),
        ((1, 256, 63), 192, 512, ("cooperative", 3, 1)),
        ((130, 0, 70), 64, 320, ("cooperative", 2, 2)),  # the last tile has one panel of four
        ((70,), 64, 64, ("cooperative", 3, 2)),  # and the only one
    ],
    keep=(1, 6),
)
def test_the_activation_s_backward_behind_the_product(
    counts, dim, hidden, settings, over, device, hopper_launch
):
    from acmoe.ops.experts.settings.gemms import PipelineConfig

    plan = plan_of(counts, NOBODY, device)
    x_ND = drawn(plan.num_rows, dim, device=device)
    down_EDF = drawn(len(counts), dim, hidden, device=device) / dim**0.5
    h_NW = drawn(plan.num_rows, 2 * hidden, device=device)
    gate_N = torch.rand(plan.num_rows, device=device)
    before_NW = h_NW.clone()
    dh_NW = h_NW if over else torch.zeros_like(h_NW)
    found_NF, share_BN = hopper_launch.launch_hidden(
        x_ND, down_EDF, h_NW, dh_NW, gate_N, plan, PipelineConfig(*settings)
    )

    # By autograd: the gradient by h of the sum of gate * (down a) * x.
    leaf_NW = before_NW.double().requires_grad_()
    g_NF, u_NF = leaf_NW.split(hidden, dim=1)
    a_NF = torch.nn.functional.silu(g_NF) * u_NF
    gate_N1 = gate_N[plan.permutation].double()[:, None].requires_grad_()
    routed = sum(counts)
    total = sum(
        (gate_N1[rows] * (a_NF[rows] @ down_EDF[expert].double().T) * x_ND[rows].double()).sum()
        for expert, rows in each_expert(plan)
    )
    right_NW, right_gate_N1 = torch.autograd.grad(total, (leaf_NW, gate_N1))
    assert_near(dh_NW[:routed], right_NW[:routed])
    assert_near(found_NF[:routed], (a_NF * gate_N1).detach()[:routed])
    assert_near(share_BN.sum(0)[:routed], right_gate_N1[:routed, 0], 1e-4)
    untouched = before_NW if over else torch.zeros_like(h_NW)
    assert torch.equal(dh_NW[routed:], untouched[routed:])


@mostly_slow(
    ("widths", "dtype"),
    [((144, 272), torch.bfloat16), ((256, 512), torch.bfloat16), ((144, 272), torch.float32)],
)
def test_weight_gradients_by_a_pipeline_see_their_expert_s_rows_alone(
    widths, dtype, device, hopper_launch
):
    """Rows for no expert, which nobody writes, are NaN. An expert without rows gets zeros."""
    from acmoe.ops.experts.settings.gemms import PipelineConfig

    plan, routed = plan_of(COUNTS, NOBODY, device), sum(COUNTS)
    p_NO, q_NI = (drawn(plan.num_rows, width, device=device) for width in widths)
    p_NO[routed:] = q_NI[routed:] = torch.nan
    settings = PipelineConfig("cooperative", 4)
    dw_EOI = hopper_launch.launch_weights(p_NO, q_NI, plan, settings, dtype=dtype)
    assert dw_EOI.dtype == dtype
    most = 4e-3 if dtype == torch.bfloat16 else 1e-6  # one rounding of exact products of bf16
    for expert, rows in each_expert(plan):
        if COUNTS[expert] == 0:
            assert not dw_EOI[expert].any()
        else:
            assert_near(dw_EOI[expert], p_NO[rows].double().T @ q_NI[rows].double(), most)


@mostly_slow(("transposed", "stages", "widths"), [(False, 4, (256, 512)), (True, 3, (144, 272))])
def test_gathered_weight_gradients_see_their_expert_s_tokens_alone(
    transposed, stages, widths, device, hopper_launch
):
    """Rows for no expert are NaN, and so are the tokens that only they name."""
    from acmoe.ops.experts.settings.gemms import PipelineConfig

    plan, routed = plan_of(COUNTS, NOBODY, device, top_k=2), sum(COUNTS)
    x_TD = drawn(plan.num_rows // 2, widths[0], device=device)
    r_NR = drawn(plan.num_rows, widths[1], device=device)
    r_NR[routed:] = torch.nan
    token_N = plan.permutation // 2
    unused_T = torch.ones(len(x_TD), dtype=torch.bool, device=device)
    unused_T[token_N[:routed]] = False
    x_TD[unused_T] = torch.nan
    settings = PipelineConfig("cooperative", stages)
    dw = hopper_launch.launch_gathered_weights(x_TD, r_NR, plan, settings, transposed=transposed)
    assert_sums_of_experts(dw, x_TD[token_N], r_NR, plan, transposed=transposed)


@mostly_slow(
    ("copied", "gathers", "dtype", "calls"),
    [
        (True, False, torch.bfloat16, ["launch_weights", "launch_weights"]),
        # The rows that "hidden" reads stay copied.
        pytest.param(
            *(True, True, torch.bfloat16, ["launch_weights", "launch_gathered_weights"]),
            marks=pytest.mark.slow,
        ),
        (False, True, torch.bfloat16, ["launch_gathered_weights", "launch_gathered_weights"]),
        # Gradients in float32, which the Hopper kernel that gathers does not give: x is copied.
        (True, True, torch.float32, ["launch_weights", "launch_weights"]),
    ],
    keep=(2,),
)
def test_a_layer_by_pipelined_gemms_is_the_layer(
    copied, gathers, dtype, calls, device, hopper_launch, fresh_choice, monkeypatch
):
    from acmoe.ops.experts.settings import tables

    called = []
    for name in ("launch_weights", "launch_gathered_weights"):
        monkeypatch.setattr(hopper_launch, name, noted(called, getattr(hopper_launch, name)))
    table = {
        "pipeline_hidden/256/256/4": ["ping-pong", 2, 2],
        "pipeline_down/256/256/4": ["cooperative", 3],
        "pipeline_input/256/256/4": ["ping-pong", 3],
        "pipeline_down_weight/256/256/4": ["cooperative", 2, 0, gathers],
        "pipeline_up_weight/256/256/4": ["cooperative", 2, 0, gathers],
        "copy/256/256/4": [False, copied],
    }
    monkeypatch.setattr(tables, "user_table", lambda: table)
    monkeypatch.setattr(fresh_choice, "gluon_unsupported", lambda device: None)
    layer = Layer("swiglu", False, (37, 256, 256, 4, 2), device)
    expected = layer.reference().detach(), *layer.gradients(layer.reference())
    layer.x, layer.gate = (
        leaf.detach().to(torch.bfloat16).requires_grad_() for leaf in (layer.x, layer.gate)
    )
    layer.mlp.to(dtype)
    layer.cotangent = layer.cotangent.to(torch.bfloat16)
    out = layer.fused()
    found = out, *layer.gradients(out)
    for mine, right in zip(found, expected, strict=True):
        assert_near(mine, right.double(), 1.5e-2)  # a chain of three roundings
    assert called == calls
    for weight in found[3:]:
        is_rounded = torch.equal(weight, weight.bfloat16().to(dtype))
        assert weight.dtype == dtype and is_rounded == (dtype == torch.bfloat16)


def on_known_card():
    from acmoe.ops.device.hopper import gluon_unsupported

    return gluon_unsupported(torch.device("cuda")) is None


@pytest.mark.gpu
def test_on_a_card_both_ways_to_the_hidden_gradient_agree(fresh_choice, monkeypatch):
    from acmoe.ops.experts.triton.sizes import HiddenInputs, RowOperand, Sizes, Sums

    if not on_known_card():
        pytest.skip("the Hopper kernels are for another card or another triton")
    plan = plan_of((1000, 0, 64, 3001), 70, "cuda")
    size = Sizes(plan.num_rows, 512, 384, 4, 1, "swiglu")
    x_ND = drawn(plan.num_rows, size.dim, device="cuda")
    down_EDF = drawn(4, size.dim, size.hidden, device="cuda") / size.dim**0.5
    h_NW = drawn(plan.num_rows, size.width, device="cuda")
    gate_N1 = torch.rand(plan.num_rows, 1, device="cuda")

    def results():
        dh_NW = h_NW.clone()
        given = HiddenInputs(dh_NW, dh_NW, gate_N1, x_ND, Sums(0, 0), 0.0, plan.offsets)
        rows = RowOperand(x_ND, False)
        a_NF, shares = fresh_choice.run_hidden(rows, down_EDF, given, plan, size)
        return [dh_NW[:4065], a_NF[:4065], shares.gate.sum(0)[:4065]]

    first, second = results(), results()
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    monkeypatch.setattr(fresh_choice, "gluon_unsupported", lambda device: "not today")
    fresh_choice._usable_settings.cache_clear()
    apart = results()
    for one, other in zip(first, apart, strict=True):
        assert_near(one, other.double(), 8e-3)  # apart, the gradient by a is rounded on its way


@mostly_slow("hidden", [208, 256])
def test_the_up_projection_by_a_pipeline_is_its_product(hidden, device, hopper_launch):
    """Hidden units that are no multiple of a tile: the last tile overlaps its neighbour."""
    plan = plan_of(COUNTS, NOBODY, device, top_k=2)
    tokens = drawn(plan.num_rows // 2, 192, device=device)
    up = drawn(len(COUNTS), 2 * hidden, 192, device=device) / 14
    a_NF = hopper_launch.launch_up(tokens, up, plan, hidden)
    for expert, rows in each_expert(plan):
        h = tokens[plan.token[rows].long()].double() @ up[expert].double().T
        gate, other = h.bfloat16().double().split(hidden, dim=1)
        right = torch.nn.functional.silu(gate) * other
        if len(right):
            assert_near(a_NF[rows], right)
