"""Arguments of a call of each op that has a kernel (CASES), for test_kernel_table.py."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from acmoe.ops.attention.rotary import rotation
from acmoe.ops.experts import ExpertWeights
from acmoe.ops.route import ScaledTokens
from acmoe.ops.sort import sort_rows
from acmoe.ops.statistics.prefix import PrefixMoments, Prior
from acmoe.ops.statistics.scale import ScaleOptions


@dataclass(frozen=True)
class Case:
    """Arguments of a call, the tensors that take gradients, and how near results must be."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    leaves: tuple[Tensor, ...] = ()
    tolerance: float = 2e-4
    written: tuple[Tensor, ...] = ()  # results the call writes in place


class Draw:
    """Tensors from a seed; on a GPU in bf16 where kernels multiply nothing wider."""

    def __init__(self, seed: int, device: str) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def normal(self, *shape: int, grad: bool = False, low: bool = False) -> Tensor:
        dtype = torch.bfloat16 if low and self.device == "cuda" else torch.float32
        drawn = torch.randn(*shape, generator=self.generator).to(self.device, dtype)
        return drawn.requires_grad_(grad)

    def ids(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)

    def mask(self, *shape: int) -> Tensor:
        return (torch.rand(*shape, generator=self.generator) < 0.8).to(self.device)


def route_case(draw: Draw) -> Case:
    x, embedding = draw.normal(37, 20, grad=True), draw.normal(5, 20, grad=True)
    scale, assignment = draw.normal(5, 20).exp(), draw.ids(-1, 5, 37)
    tokens = ScaledTokens(x, scale, assignment)
    options = {"top_k": 2, "over_selected": True, "temperature": 0.7}
    return Case((tokens, embedding, draw.normal(5)), options, (x, embedding), 1e-3)


def few_tokens_case(draw: Draw) -> Case:
    """Tokens that the router's kernel for CPUs serves: few, without gradient."""
    scale, assignment = draw.normal(5, 20).exp(), draw.ids(-1, 5, 9)
    args = (ScaledTokens(draw.normal(9, 20), scale, assignment), draw.normal(5, 20), draw.normal(5))
    return Case(args, {"top_k": 2, "over_selected": True, "temperature": 0.7}, (), 1e-6)


def few_rows_case(draw: Draw) -> Case:
    """Rows that the experts' kernel in C serves: complete, and without gradient."""
    weights = ExpertWeights(draw.normal(3, 8, 16), draw.normal(3, 16, 8), None, draw.normal(3, 16))
    rows = sort_rows.definition(draw.ids(0, 3, 11, 2), 3)
    args = (draw.normal(11, 16), weights, rows, draw.normal(11, 2).sigmoid())
    return Case(args, {"activation": "gelu", "complete": True}, (), 1e-5)


def sort_case(draw: Draw) -> Case:
    return Case((draw.ids(0, 6, 40, 2), 5))


def experts_case(draw: Draw) -> Case:
    T, D, F, E = 24, 16, 16, 3
    x = draw.normal(T, D, grad=True, low=True)
    up, down = draw.normal(E, F, D, grad=True), draw.normal(E, D, F, grad=True)
    biases = draw.normal(E, F, grad=True), draw.normal(E, D, grad=True)
    gate = draw.normal(T, 2).sigmoid().requires_grad_()
    rows = sort_rows.definition(draw.ids(0, E + 1, T, 2), E)
    weights = ExpertWeights(up, down, *biases)
    tolerance = 5e-2 if draw.device == "cuda" else 1e-3
    args = (x, weights, rows, gate)
    return Case(args, {"activation": "gelu"}, (x, up, down, *biases, gate), tolerance)


def complete_experts_case(draw: Draw) -> Case:
    """Experts that SonicMoE serves: gated, without biases, and every row has an expert."""
    T, D, F, E = 128, 64, 64, 4
    x = draw.normal(T, D, grad=True, low=True)
    up, down = draw.normal(E, 2 * F, D, grad=True), draw.normal(E, D, F, grad=True)
    gate = draw.normal(T, 2).sigmoid().requires_grad_()
    rows = sort_rows.definition(draw.normal(T, E).topk(2).indices, E)
    options = {"activation": "swiglu", "complete": True}
    args = (x, ExpertWeights(up, down, None, None), rows, gate)
    return Case(args, options, (x, up, down, gate), 5e-2)


def one_token_case(draw: Draw) -> Case:
    """Experts that the kernel for CPUs serves: of a single token, without gradient."""
    D, F, E = 16, 12, 5
    weights = ExpertWeights(
        *(draw.normal(E, F, D), draw.normal(E, D, F), draw.normal(E, F), draw.normal(E, D))
    )
    rows = sort_rows.definition(draw.normal(1, E).topk(3).indices, E)
    args = (draw.normal(1, D), weights, rows, draw.normal(1, 3).softmax(-1))
    return Case(args, {"activation": "gelu", "complete": True}, (), 1e-5)


def dispersion_case(draw: Draw) -> Case:
    x = draw.normal(50, 12, grad=True)
    return Case((x, draw.ids(-1, 4, 50), 4), {"measure": "std"}, (x,), 1e-3)


def scale_case(draw: Draw) -> Case:
    options = ScaleOptions(
        normalize="cluster", strength=None, floor=1e-3, eps=0.0, clamp=None, min_tokens=2
    )
    args = (draw.normal(50, 12), draw.ids(-1, 4, 50), 4, options)
    return Case(args, {"measure": "mad", "token_mask": draw.mask(50)}, (), 1e-3)


def constant_tokens_case(op: str, draw: Draw) -> Case:
    """Tokens that the kernels for CPUs serve: without gradient and mask, cluster 4 empty."""
    options = scale_case(draw).args[3:] if op == "measure_scale" else ()
    buffers = draw.normal(5, 12), draw.normal(5)
    args = (draw.normal(50, 12), draw.ids(0, 4, 50), 5, *options)
    return Case(args, {"measure": "std", "out": buffers}, (), 1e-5, buffers)


def chosen_case(draw: Draw) -> Case:
    """Masked tokens alone chose cluster 6; the ids -1 and 7 mean "none"."""
    ids, mask = draw.ids(0, 6, 50, 2), draw.mask(50)
    ids[~mask] = 6
    ids[0] = 7
    return Case((ids, draw.ids(-1, 4, 50, 1), 7, mask), {}, (), 0)


def rows_case(draw: Draw) -> Case:
    return Case((draw.ids(-1, 5, 60), 4, 5), {}, (), 0)


def unit_case(draw: Draw) -> Case:
    x = draw.normal(7, 33)
    x[2] = 0.0
    x[3] *= 1e-8
    return Case((x.requires_grad_(),), {}, (x,), 1e-5)


def prefix_case(draw: Draw) -> Case:
    before = PrefixMoments.empty(2, 3, 8, device=draw.device, dtype=torch.float32)
    args = (draw.normal(2, 17, 8), draw.ids(0, 3, 2, 17, 1), before)
    return Case(args, {"measure": "mad"}, (), 1e-3)


def prefix_scale_case(draw: Draw) -> Case:
    """Cluster 2 has an average of too few tokens to be read."""
    average = draw.normal(3, 8).exp()
    prior = Prior(average, torch.tensor([5.0, 9.0, 1.0], device=draw.device), 4.0)
    args = (*prefix_case(draw).args, prior, scale_case(draw).args[3])
    return Case(args, {"measure": "std"}, (), 1e-4)


def rescaled_case(draw: Draw) -> Case:
    """Rows 1 and 2 are shrunk, before and after they are rescaled."""
    x = draw.normal(19, 20)
    x[1] *= 1e12
    x[2] *= 1e9
    scale = draw.normal(5, 20).exp()
    scale[3] *= 1e6
    assignment = draw.ids(-1, 5, 19)
    assignment[2] = 3
    return Case((x.requires_grad_(), scale, assignment), {}, (x,), 1e-5)


def mixed_case(draw: Draw) -> Case:
    args = (draw.normal(5, 20).exp(), draw.ids(-1, 5, 37, 3), draw.normal(37, 3).softmax(-1))
    return Case(args, {}, (), 1e-6)


def theorem_case(draw: Draw) -> Case:
    """A row of equal numbers, a zero, and lambdas that are small and large."""
    s = draw.normal(5, 37).exp().double()
    s[0], s[1, 3] = 2.0, 0.0
    lam = torch.tensor([0.7, 0.3, 1e-6, 1e6, 2.0], dtype=torch.float64, device=draw.device)
    return Case((s, lam[:, None]), {}, (), 1e-12)


def batch_case(draw: Draw) -> Case:
    mean, new = draw.normal(4, 6).exp(), draw.normal(4, 6).exp()
    new[1, 2] = torch.inf  # such a cluster stays as it is
    count, new_count = draw.ids(0, 3, 4).float(), draw.ids(1, 6, 4).float()
    return Case((mean, count, new, new_count, 2), written=(mean, count))


def average_case(draw: Draw) -> Case:
    average, last = draw.normal(4, 6).exp(), draw.normal(4, 6).exp()
    weight, count = draw.normal(4).exp(), draw.ids(0, 5, 4).float()
    return Case((average, weight, last, count, 0.9), written=(average, weight, count))


def average_and_scale_case(draw: Draw) -> Case:
    (average, weight, last, count, momentum) = average_case(draw).args
    options = ScaleOptions(
        normalize="cluster", strength=None, floor=1e-3, eps=0.0, clamp=None, min_tokens=2
    )
    scale = torch.zeros_like(average)
    args = (average, weight, last, count, scale, momentum, options)
    return Case(args, written=(average, weight, count, scale))


def attention_case(draw: Draw) -> Case:
    q, k, v = (draw.normal(2, 2, n, 16, grad=True, low=True) for n in (16, 24, 24))
    positions = draw.normal(16, 12, grad=True, low=True)
    options = {"span": 12, "positions": positions, "key_mask": draw.mask(2, 24)}
    tolerance = 5e-2 if draw.device == "cuda" else 1e-3
    return Case((q, k, v), options, (q, k, v, positions), tolerance)


def map_case(draw: Draw) -> Case:
    qkv, bias = draw.normal(2, 4, 6, 36, grad=True, low=True), draw.normal(2, 4, 4, grad=True)
    options = {"window": (2, 2), "shift": (1, 1)}
    return Case((qkv, bias), options, (qkv, bias), 5e-2 if draw.device == "cuda" else 1e-3)


def norm_of(draw: Draw, dim: int) -> nn.LayerNorm:
    norm = nn.LayerNorm(dim).to(draw.device)
    with torch.no_grad():
        norm.weight.copy_(draw.normal(dim).exp())
        norm.bias.copy_(draw.normal(dim))
    return norm


def norm_case(draw: Draw) -> Case:
    x, y, norm = (
        draw.normal(3, 7, 24, grad=True),
        draw.normal(3, 7, 24, grad=True),
        norm_of(draw, 24),
    )
    return Case((x, y, norm), {}, (x, y, *norm.parameters()), 1e-3)


def norm_twice_case(draw: Draw) -> Case:
    x, y = draw.normal(3, 7, 24, grad=True), draw.normal(3, 7, 24, grad=True)
    inner, norm = norm_of(draw, 24), norm_of(draw, 24)
    return Case((x, y, inner, norm), {}, (x, y, *inner.parameters(), *norm.parameters()), 1e-3)


def entropy_case(draw: Draw) -> Case:
    """Logits of 9 tokens over 64 words; some tokens do not count."""
    x, weight = draw.normal(9, 24), draw.normal(64, 24)
    return Case((x, weight, draw.ids(0, 64, 9), draw.ids(0, 2, 9).bool()), {}, (), 1e-3)


def embedding_case(draw: Draw) -> Case:
    weight = draw.normal(11, 6, grad=True)
    return Case((draw.ids(0, 11, 4, 9), weight), {}, (weight,))


def clamped_case(draw: Draw) -> Case:
    h = draw.normal(9, 2 * 20, grad=True)
    return Case((h,), {"alpha": 1.702, "limit": 0.9, "interleaved": True}, (h,))


def ring_case(draw: Draw) -> Case:
    """Heads of 6 features, stored as 8, in the third of five places."""
    new = [draw.normal(2, 1, 3 * 6, low=True).view(2, 1, 3, 6).transpose(1, 2) for _ in range(3)]
    rings = [draw.normal(2, 3, 5, 8, low=True) for _ in range(2)]
    place, turned = draw.ids(2, 3, 1), rotation(draw.normal(1), 6)
    tolerance = 2e-2 if draw.device == "cuda" else 1e-5
    return Case((*new, *rings, place, turned, 0.5), {}, (), tolerance, tuple(rings))


CASES: dict[str, Callable[[Draw], Case]] = {
    "route": route_case,
    "sort_rows": sort_case,
    "expert_mlp": experts_case,
    "clamped_swiglu": clamped_case,
    "measure_dispersion": dispersion_case,
    "measure_scale": scale_case,
    "clusters_up_to_last": chosen_case,
    "set_rows": rows_case,
    "unit_rows": unit_case,
    "measure_prefix": prefix_case,
    "measure_prefix_scale": prefix_scale_case,
    "theorem_weights": theorem_case,
    "mixed_scale": mixed_case,
    "rescaled_tokens": rescaled_case,
    "add_batch": batch_case,
    "update_average": average_case,
    "update_average_and_scale": average_and_scale_case,
    "window_attention": attention_case,
    "store_in_ring": ring_case,
    "map_attention": map_case,
    "add_norm": norm_case,
    "add_norm_twice": norm_twice_case,
    "cross_entropy_chunk": entropy_case,
    "embedding": embedding_case,
}


def case_of(op: str, kernel: str) -> Callable[[Draw], Case]:
    if kernel in ("native", "cpu") and op in ("measure_dispersion", "measure_scale"):
        return partial(constant_tokens_case, op)
    if kernel == "cpu" and op == "route":
        return few_tokens_case
    if kernel == "cpu" and op == "expert_mlp":
        return one_token_case
    if kernel == "native" and op == "expert_mlp":
        return few_rows_case
    return complete_experts_case if kernel == "sonicmoe" else CASES[op]
