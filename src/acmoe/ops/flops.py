"""Count the floating-point operations of the custom ops under torch's `FlopCounterMode`.

A counter sees a custom op as one call, and counts it if it has a formula. It copies torch's table
of formulas when it is made. The library cannot fill that table when it is imported: that would
import torch.utils.flop_counter, which imports Triton. So every op with GEMMs calls `tell_counters`
first, which gives the formulas to the counters that watch the call. A counter that watches a
backward without its forward may miss GEMMs: no formula was given to it, and the experts' kernels
are then launched without a custom op.

The formulas count the GEMMs of an op's definition: 2 N D (W + F) for the experts, and twice the
forward for a backward with all gradients. GEMMs that a kernel adds are not counted: a float32
factor split into several bf16 numbers, scores recomputed for backward. A row without an expert
counts as any other, since its number is known to the device alone.

T tokens, N rows sorted by expert, D features, F hidden units, W = F (or 2F for swiglu), E experts.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

Formula = Callable[..., int]  # takes the arguments of the op, and its result as `out_val`

_dispatch_modes = torch._C._len_torch_dispatch_stack
_FORMULAS: dict[str, Formula] = {}  # by the name of a custom op of the library


def flop_formula(name: str) -> Callable[[Formula], Formula]:
    """Register the formula of the custom op `acmoe::name`."""

    def add(formula: Formula) -> Formula:
        assert name not in _FORMULAS, f"two formulas for {name}"
        _FORMULAS[name] = formula
        return formula

    return add


def tell_counters() -> bool:
    """Give the formulas to every `FlopCounterMode` that watches; return True if there is one."""
    if is_compiling() or _dispatch_modes() == 0:
        return False
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return False
    found = False
    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, module.FlopCounterMode):
            found = True
            for packet, formula in _formulas():
                counter.flop_registry.setdefault(packet, formula)
    return found


def _formulas() -> list[tuple[Any, Formula]]:
    """Return the formulas of the custom ops that are defined, and that of torch's grouped GEMM,
    which torch 2.13 lacks."""
    ours = torch.ops.acmoe
    defined = [(name, formula) for name, formula in _FORMULAS.items() if hasattr(ours, name)]
    return [
        *[(getattr(ours, name), formula) for name, formula in defined],
        (torch.ops.aten._grouped_mm, _grouped_mm),
    ]


def _grouped_mm(a: Tensor, b: Tensor, *rest: Any, **options: Any) -> int:
    """Count rows (N, I) times (E, I, O), and the weights' gradient (O, N) times (N, I)."""
    return 2 * a.shape[0] * a.shape[1] * b.shape[-1]


@flop_formula("grouped_linear")
def _grouped_linear(x_NI: Tensor, weight_EOI: Tensor, *rest: Any, **options: Any) -> int:
    return 2 * x_NI.numel() * weight_EOI.shape[1]


@flop_formula("grouped_outer")
def _grouped_outer(grad_NO: Tensor, x_NI: Tensor, *rest: Any, **options: Any) -> int:
    return 2 * grad_NO.numel() * x_NI.shape[1]


@flop_formula("expert_mlp")
def _expert_mlp(x: Tensor, up: Tensor, down: Tensor, *rest: Any, **options: Any) -> int:
    of_up, of_down = _expert_gemms(x, up, down, permutation_N=rest[3])
    return of_up + of_down


@flop_formula("expert_mlp_backward")
def _expert_mlp_backward(
    grad: Tensor, x: Tensor, up: Tensor, down: Tensor, *rest: Any, **options: Any
) -> int:
    of_up, of_down = _expert_gemms(x, up, down, permutation_N=rest[3])
    needs_up, needs_down = rest[-2:]
    return of_up * (2 if needs_up else 1) + of_down * (2 if needs_down else 1)


def _expert_gemms(x: Tensor, up: Tensor, down: Tensor, permutation_N: Tensor) -> tuple[int, int]:
    """Return the operations of all rows with the weight up, and of all rows with down."""
    of_feature = 2 * permutation_N.numel() * x.shape[1]
    return of_feature * up.shape[1], of_feature * down.shape[2]


@flop_formula("route")
def _route(x_TD: Tensor, embedding_ED: Tensor, *rest: Any, **options: Any) -> int:
    return 2 * x_TD.numel() * embedding_ED.shape[0]


@flop_formula("route_backward")
def _route_backward(
    grad_gate: Any, grad_affinity: Any, grad_sum: Any, grad_x: Any, *rest: Any, **options: Any
) -> int:
    return 2 * _route(*rest)


def _pairs(num_queries: int, num_keys: int, span: int) -> int:
    """Return the pairs of a query and a key before it, at most `span` positions away."""
    return sum(min(span, position) for position in range(num_keys - num_queries, num_keys))


@flop_formula("window_attention")
def _window_attention(
    given: Tensor, q: Tensor, kv: Tensor, positions: Tensor, *rest: Any, **options: Any
) -> int:
    """Count three GEMMs over the pairs of a window: keys, positions and values."""
    B, H, L, P = given.shape
    return 3 * 2 * B * H * _pairs(L, kv.shape[-2], positions.shape[1]) * P


@flop_formula("window_attention_backward")
def _window_attention_backward(
    grad: Tensor, q: Tensor, kv: Tensor, positions: Tensor, *rest: Any, **options: Any
) -> int:
    B, H, L, _ = q.shape
    features: int = rest[-1]
    return 2 * 3 * 2 * B * H * _pairs(L, kv.shape[-2], positions.shape[1]) * features


@flop_formula("map_attention")
def _map_attention(
    qkv: Tensor, bias: Tensor, rows: int, columns: int, *rest: Any, **options: Any
) -> int:
    """Count two GEMMs, keys and values, of every token with all tokens of its window."""
    B, Y, X, features = qkv.shape
    return 2 * 2 * B * Y * X * rows * columns * (features // 3)


@flop_formula("map_attention_backward")
def _map_attention_backward(grad: Tensor, *rest: Any, **options: Any) -> int:
    return 2 * _map_attention(*rest)
