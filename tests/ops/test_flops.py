"""FlopCounterMode counts the GEMMs of the library's ops. T, K, D, F, W, E as in ops/flops.py."""

import importlib
import pkgutil

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import acmoe
import acmoe.fast
import acmoe.ops
from acmoe.fast.projection import project, project_both
from acmoe.ops import flops
from acmoe.ops.experts.grouped_mm import grouped_mm

T, K, D, F, E = 32, 2, 16, 24, 4
WITHOUT_GEMM = {
    *("clamped_swiglu", "clamped_swiglu_backward", "embedding", "sum_by_word"),
    *("norm_sum", "norm_sum_backward", "norm_sum_twice", "norm_sum_twice_backward"),
    *("softmax_gradient_", "sort_rows", "sort_rows_and_tokens"),
    # Statistics of the clusters: sums over rows.
    *("dispersion", "dispersion_backward", "sorted_dispersion", "sorted_scale", "cluster_scale"),
    *("prefix_dispersion", "prefix_scale", "mixed_scale", "fold", "record_batch", "record_count"),
    *("set_scale", "set_rows", "up_to_last"),
    *("sum_over_ranks", "dispersion_over_ranks"),
}


def layer(activation: str) -> acmoe.MoE:
    torch.manual_seed(0)
    return acmoe.MoE(
        dim=D, hidden=F, num_experts=E, top_k=K, activation=activation, bias=False
    )  # its router has no bias either


@pytest.mark.parametrize(("activation", "width"), [("relu", F), ("swiglu", 2 * F)])
def test_the_layer_counts_two_for_each_weight_that_multiplies_a_row(
    activation: str, width: int
) -> None:
    counter = FlopCounterMode(display=False)  # made before the first call of an op
    model, x = layer(activation), torch.randn(1, T, D, requires_grad=True)
    # Affinities: a GEMM (T, D) x (D, E). Experts: (T K, D) x (D, W), then (T K, F) x (F, D).
    forward = 2 * T * D * E + 2 * T * K * D * (width + F)
    with counter:
        y, _ = model(x)
        assert counter.get_total_flops() == forward
        y.sum().backward()
    assert counter.get_total_flops() == 3 * forward  # two GEMMs of backward for each of forward


def test_modules_are_counted_by_name_and_no_call_is_counted_outside() -> None:
    model, x = layer("relu"), torch.randn(1, T, D)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    model(x)
    experts = counter.get_flop_counts()["MoE.experts"]
    assert experts == {torch.ops.acmoe.grouped_linear: 2 * T * K * D * 2 * F}


def test_a_formula_of_the_caller_has_precedence() -> None:
    model, x = layer("relu"), torch.randn(1, T, D)
    own = {torch.ops.acmoe.grouped_linear: lambda *shapes, **options: 1}
    with FlopCounterMode(display=False, custom_mapping=own) as counter, torch.no_grad():
        model(x)
    assert counter.get_total_flops() == 2 * T * D * E + 2  # two calls: up and down


def test_no_counter_is_told_where_none_watches() -> None:
    assert not flops.tell_counters()
    with FlopCounterMode(display=False):
        assert flops.tell_counters()
    assert not flops.tell_counters()


def counted(call: object, *inputs: Tensor) -> tuple[int, int]:
    """The operations of a forward and of its backward."""
    with FlopCounterMode(display=False) as counter:
        found = call(*inputs)  # type: ignore[operator]
        forward = counter.get_total_flops()
        sum(one.sum() for one in (found if isinstance(found, tuple) else (found,))).backward()
    return forward, counter.get_total_flops() - forward


def test_a_map_of_memory_and_segment_counts_the_gradient_of_the_segment_alone() -> None:
    B, N, L, A, C = 2, 7, 3, 5, 6
    context, segment = torch.randn(B, N, D), torch.randn(B, L, D, requires_grad=True)
    weight, other = (torch.randn(n, D, requires_grad=True) for n in (A, C))
    forward = 2 * B * N * D * A
    assert counted(project, context, segment, weight) == (forward, 2 * B * (L + N) * D * A)
    # The second map, of the segment, has a gradient for all of its inputs.
    second = 2 * B * L * D * C
    both = (forward + second, 2 * B * (L + N) * D * A + 2 * second)
    assert counted(project_both, context, segment, weight, other) == both
    constant = other.detach()
    less = (both[0], both[1] - second)
    assert counted(project_both, context, segment, weight, constant) == less


def test_the_grouped_gemm_of_pytorch_is_counted() -> None:
    x, weight = torch.randn(T, D, requires_grad=True), torch.randn(E, F, D, requires_grad=True)
    offsets = torch.tensor([8, 8, 24, 32])
    x_low, weight_low = x.bfloat16(), weight.bfloat16()
    forward = 2 * T * D * F
    assert counted(grouped_mm, x_low, weight_low, offsets) == (forward, 2 * forward)


def test_every_custom_op_has_a_formula_or_multiplies_no_matrices() -> None:
    for package in (acmoe.ops, acmoe.fast):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not {"triton", "hopper", "device"} & set(module.name.split(".")):
                importlib.import_module(module.name)
    names = torch._C._dispatch_get_all_op_names()
    ours = {name.removeprefix("acmoe::") for name in names if name.startswith("acmoe::")}
    assert "expert_mlp" in ours
    assert ours - WITHOUT_GEMM == set(flops._FORMULAS) and not WITHOUT_GEMM & set(flops._FORMULAS)
