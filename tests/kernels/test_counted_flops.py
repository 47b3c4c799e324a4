"""FlopCounterMode counts the kernels as it counts the plain path. Letters as in ops/flops.py."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import acmoe
from acmoe.ops.attention import window_attention
from acmoe.ops.dispatch import use_backend
from acmoe.ops.map_attention import map_attention
from slow_cases import mostly_slow

pytest.importorskip("triton")

T, K, D, F, E = 16, 2, 32, 48, 4


def counts(backend: str, call: Callable[[], Tensor]) -> tuple[int, int, set[str]]:
    """The operations of a forward and of its backward, and the names of the counted operators."""
    with use_backend(backend), FlopCounterMode(display=False) as counter:
        found = call()
        forward = counter.get_total_flops()
        found.float().sum().backward()
        backward = counter.get_total_flops() - forward
    return forward, backward, {str(op) for op in counter.get_flop_counts()["Global"]}


@mostly_slow(
    ("frozen", "activation"),
    [(False, "relu"), (False, "swiglu"), (True, "relu"), (True, "swiglu")],
    keep={0, 3},
    gpu=range(4),
)
def test_the_kernels_of_a_layer_count_as_the_plain_path(
    activation: str, frozen: bool, device: str
) -> None:
    torch.manual_seed(0)
    model = acmoe.MoE(dim=D, hidden=F, num_experts=E, top_k=K, activation=activation, bias=False)
    model.to(device)
    model.experts.requires_grad_(not frozen)
    x = torch.randn(1, T, D, device=device, requires_grad=True)
    *plain, _ = counts("torch", lambda: model(x)[0])
    *found, operators = counts("triton", lambda: model(x)[0])
    assert found == plain
    assert operators == {
        *("acmoe.route", "acmoe.route_backward"),
        *("acmoe.expert_mlp", "acmoe.expert_mlp_backward"),
    }


def test_the_counted_layer_computes_the_gradients_of_the_layer(device: str) -> None:
    torch.manual_seed(0)
    model = acmoe.MoE(dim=D, hidden=F, num_experts=E, top_k=K).to(device)
    x = torch.randn(1, T, D, device=device, requires_grad=True)

    def gradients() -> list[Tensor | None]:
        leaves = [x, *model.parameters()]
        for leaf in leaves:
            leaf.grad = None
        model(x)[0].square().sum().backward()
        return [leaf.grad for leaf in leaves]

    with use_backend("triton"):
        expected = gradients()
        with FlopCounterMode(display=False):
            found = gradients()
    for one, other in zip(found, expected, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


def test_window_attention_counts_the_pairs_inside_the_window(device: str) -> None:
    B, H, L, N, P, span = 1, 2, 16, 18, 16, 4
    q, k, v = (torch.randn(B, H, n, P, device=device).requires_grad_() for n in (L, N, N))
    positions = torch.randn(P, span, device=device).requires_grad_()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tensors = [one.to(dtype) for one in (q, k, v, positions)]
    # Queries at positions 2 and 3 see 2 and 3 keys, the other 14 see 4: 61 pairs. A pair has
    # P products each with the key, the position and the value.
    forward = 2 * 3 * P * 61 * B * H
    found = counts(
        "triton",
        lambda: window_attention(*tensors[:3], span=span, positions=tensors[3]),
    )
    names = {"acmoe.window_attention", "acmoe.window_attention_backward"}
    assert found == (forward, 2 * forward, names)


def test_attention_inside_a_map_counts_all_pairs_of_a_window(device: str) -> None:
    B, Y, X, H, P, window = 2, 4, 8, 2, 16, (2, 4)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    qkv = torch.randn(B, Y, X, 3 * H * P, device=device, dtype=dtype, requires_grad=True)
    bias = torch.randn(H, 8, 8, device=device, requires_grad=True)
    # Each of B * 32 tokens has 8 keys and 8 values of H * P features in its window.
    forward = 2 * 2 * B * 32 * 8 * H * P
    found = counts("triton", lambda: map_attention(qkv, bias, window=window, shift=(1, 2)))
    assert found == (forward, 2 * forward, {"acmoe.map_attention", "acmoe.map_attention_backward"})
