"""Implementations of the MoE layer, ours and baselines, behind one interface with shared weights.

Only this module imports the baselines' packages, inside the functions that need them. A package
that has only experts gets the plain router of plain.py. Weights have acmoe's layout.

T tokens, D features, F hidden units, W = F or 2F, E experts, K experts per token.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from acmoe.errors import UserError
from acmoe.lab.bench.implementations.ours import (
    build_ours,
    sonicmoe_unsupported,
    triton_unsupported,
)
from acmoe.lab.bench.implementations.plain import activate, grouped_layer, route
from acmoe.lab.bench.implementations.weights import Weights
from acmoe.lab.bench.shapes import Shape
from acmoe.ops.experts.op import grouped_gemm_unsupported

Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One implementation of the layer that takes part in a benchmark."""

    name: str
    unsupported: Callable[[Shape, Tensor], str | None]  # why it cannot run; None if it can
    build: Callable[[Shape, Weights], Layer]
    optional: bool = False  # measured only if requested by name


# The functions below return the reason why something cannot run, or None if it can.


def _not_installed(package: str) -> str | None:
    return None if importlib.util.find_spec(package) else f"{package} is not installed"


def _not_on_cuda(x: Tensor) -> str | None:
    return None if x.device.type == "cuda" else f"it needs a CUDA device, not {x.device.type}"


def _not_gated(shape: Shape) -> str | None:
    return None if shape.activation == "swiglu" else f"it has swiglu, not {shape.activation}"


def _runs_always(shape: Shape, x: Tensor) -> str | None:
    return None


def _compile_unsupported(shape: Shape, x: Tensor) -> str | None:
    return _not_on_cuda(x)


def _grouped_unsupported(shape: Shape, x: Tensor) -> str | None:
    return grouped_gemm_unsupported(x, shape.width, shape.dim, shape.hidden)


def _scattermoe_unsupported(shape: Shape, x: Tensor) -> str | None:
    return _not_installed("scattermoe") or _not_on_cuda(x)


def _transformers_unsupported(shape: Shape, x: Tensor) -> str | None:
    missing = _not_installed("transformers")
    if x.device.type == "cpu":  # torch's grouped GEMM is a loop there, for every dtype
        return missing
    return missing or _not_gated(shape) or _grouped_unsupported(shape, x)


def _eager_unsupported(shape: Shape, x: Tensor) -> str | None:
    on_cpu = "it is measured on a CPU only" if x.device.type != "cpu" else None
    return _not_installed("transformers") or on_cpu


def _liger_unsupported(shape: Shape, x: Tensor) -> str | None:
    return _not_installed("liger_kernel") or _not_on_cuda(x) or _not_gated(shape)


def _compiled_ours(shape: Shape, weights: Weights) -> Layer:
    layer: Layer = torch.compile(build_ours(shape, weights, "auto"), dynamic=False)
    return layer


def _compiled_grouped(shape: Shape, weights: Weights) -> Layer:
    compiled = torch.compile(grouped_layer, dynamic=False)
    return lambda x_TD: compiled(x_TD, weights, shape)


def _scattermoe(shape: Shape, weights: Weights) -> Layer:
    from scattermoe import (  # type: ignore[import-not-found]
        flatten_sort_count,
        parallel_linear,
    )

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *sort: Tensor, **options: object):  # type: ignore[no-untyped-def]
        if bias is not None:
            options["expert_biases"] = bias
        return parallel_linear(x, weight.mT, options.pop("k"), *sort, **options)

    def layer(x_TD: Tensor) -> Tensor:
        expert_ids_TK, gate_TK = route(x_TD, weights.embedding, shape.top_k)
        sort = flatten_sort_count(expert_ids_TK, shape.num_experts)
        h_NW = linear(x_TD, weights.up, weights.up_bias, *sort, k=shape.top_k, grouped_out=True)
        a_NF = activate(h_NW, shape.activation)
        gates = gate_TK.to(x_TD.dtype)
        y_TD: Tensor = linear(
            a_NF, weights.down, weights.down_bias, *sort, k=1, grouped_in=True, gates=gates
        )
        return y_TD

    return layer


def _transformers(shape: Shape, weights: Weights, implementation: str = "grouped_mm") -> Layer:
    from acmoe.lab.bench.implementations.transformers_experts import build_experts

    experts = build_experts(shape, weights, implementation)

    def layer(x_TD: Tensor) -> Tensor:
        expert_ids_TK, gate_TK = route(x_TD, weights.embedding, shape.top_k)
        return experts(x_TD, expert_ids_TK, gate_TK.to(x_TD.dtype))

    return layer


def _liger(shape: Shape, weights: Weights) -> Layer:
    from liger_kernel.ops import LigerFusedMoEFunction  # type: ignore[import-not-found]

    def layer(x_TD: Tensor) -> Tensor:
        expert_ids_TK, gate_TK = route(x_TD, weights.embedding, shape.top_k)
        y_TD: Tensor = LigerFusedMoEFunction.apply(
            x_TD, weights.up, weights.down, expert_ids_TK.int(), gate_TK.to(x_TD.dtype)
        )
        return y_TD

    return layer


def _ours(backend: str) -> Callable[[Shape, Weights], Layer]:
    return partial(build_ours, backend=backend)


IMPLEMENTATIONS = (
    Implementation(name="acmoe", unsupported=_runs_always, build=_ours("auto")),
    Implementation(name="acmoe+compile", unsupported=_compile_unsupported, build=_compiled_ours),
    Implementation(
        name="triton", unsupported=triton_unsupported, build=_ours("triton"), optional=True
    ),
    Implementation(name="torch", unsupported=_runs_always, build=_ours("torch"), optional=True),
    Implementation(name="grouped_mm", unsupported=_grouped_unsupported, build=_ours("grouped_mm")),
    Implementation(
        name="grouped_mm+compile", unsupported=_grouped_unsupported, build=_compiled_grouped
    ),
    Implementation(name="scattermoe", unsupported=_scattermoe_unsupported, build=_scattermoe),
    Implementation(name="sonicmoe", unsupported=sonicmoe_unsupported, build=_ours("sonicmoe")),
    Implementation(name="transformers", unsupported=_transformers_unsupported, build=_transformers),
    Implementation(
        name="transformers-eager",
        unsupported=_eager_unsupported,
        build=partial(_transformers, implementation="eager"),
    ),
    Implementation(name="liger", unsupported=_liger_unsupported, build=_liger),
)


def find_implementations(names: Sequence[str]) -> list[Implementation]:
    """Return the named implementations, or all that are not optional. acmoe is always included."""
    known = {one.name: one for one in IMPLEMENTATIONS}
    for name in names:
        if name not in known:
            raise UserError(f"rival {name!r} is unknown; choose among {', '.join(known)}")
    wanted = {"acmoe", *names} if names else {c.name for c in IMPLEMENTATIONS if not c.optional}
    return [one for one in IMPLEMENTATIONS if one.name in wanted]
