"""Everybody's MoE layer behind one interface, with the same weights.

Packages of others are imported here alone, inside the functions that need them. The experts of a
package sit behind the plain router of plain.py; layouts are those of acmoe.

T tokens, D features, F hidden units, W = F or 2F, E experts, K experts per token.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from acmoe.errors import UserError
from acmoe.lab.bench.ours import build_ours, sonicmoe_missing, triton_missing
from acmoe.lab.bench.plain import activate, grouped_layer, route
from acmoe.lab.bench.shapes import Shape
from acmoe.lab.bench.weights import Weights
from acmoe.ops.dispatch import grouped_mm_obstacle

Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One implementation of the layer."""

    name: str
    available: Callable[[Shape, Tensor], str | None]  # what keeps it from running; None: nothing
    build: Callable[[Shape, Weights], Layer]
    optional: bool = False  # measured only when asked for by name


def _installed(package: str) -> str | None:
    return None if importlib.util.find_spec(package) else f"{package} is not installed"


def _on_cuda(x: Tensor) -> str | None:
    return None if x.device.type == "cuda" else f"it needs a CUDA device, not {x.device.type}"


def _gated(shape: Shape) -> str | None:
    return None if shape.activation == "swiglu" else f"it has swiglu, not {shape.activation}"


def _always(shape: Shape, x: Tensor) -> str | None:
    return None


def _compiles(shape: Shape, x: Tensor) -> str | None:
    return _on_cuda(x)


def _grouped(shape: Shape, x: Tensor) -> str | None:
    return grouped_mm_obstacle(x, shape.width, shape.dim, shape.hidden)


def _scattermoe_available(shape: Shape, x: Tensor) -> str | None:
    return _installed("scattermoe") or _on_cuda(x)


def _transformers_available(shape: Shape, x: Tensor) -> str | None:
    return _installed("transformers") or _gated(shape) or _grouped(shape, x)


def _liger_available(shape: Shape, x: Tensor) -> str | None:
    return _installed("liger_kernel") or _on_cuda(x) or _gated(shape)


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

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *places: Tensor, **how: object):  # type: ignore[no-untyped-def]
        if bias is not None:
            how["expert_biases"] = bias
        return parallel_linear(x, weight.mT, how.pop("k"), *places, **how)

    def layer(x_TD: Tensor) -> Tensor:
        expert_ids_TK, gate_TK = route(x_TD, weights.embedding, shape.top_k)
        places = flatten_sort_count(expert_ids_TK, shape.num_experts)
        h_NW = linear(x_TD, weights.up, weights.up_bias, *places, k=shape.top_k, grouped_out=True)
        a_NF = activate(h_NW, shape.activation)
        gates = gate_TK.to(x_TD.dtype)
        y_TD: Tensor = linear(
            a_NF, weights.down, weights.down_bias, *places, k=1, grouped_in=True, gates=gates
        )
        return y_TD

    return layer


def _transformers(shape: Shape, weights: Weights) -> Layer:
    from transformers import Qwen3MoeConfig  # type: ignore[import-not-found]
    from transformers.models.qwen3_moe.modeling_qwen3_moe import (  # type: ignore[import-not-found]
        Qwen3MoeExperts,
    )

    config = Qwen3MoeConfig(
        hidden_size=shape.dim,
        moe_intermediate_size=shape.hidden,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        hidden_act="silu",
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)
    experts.gate_up_proj, experts.down_proj = weights.up, weights.down

    def layer(x_TD: Tensor) -> Tensor:
        expert_ids_TK, gate_TK = route(x_TD, weights.embedding, shape.top_k)
        y_TD: Tensor = experts(x_TD, expert_ids_TK, gate_TK.to(x_TD.dtype))
        return y_TD

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


CONTESTANTS = (
    Contestant(name="acmoe", available=_always, build=_ours("auto")),
    Contestant(name="acmoe+compile", available=_compiles, build=_compiled_ours),
    Contestant(name="triton", available=triton_missing, build=_ours("triton"), optional=True),
    Contestant(name="torch", available=_always, build=_ours("torch"), optional=True),
    Contestant(name="grouped_mm", available=_grouped, build=_ours("grouped_mm")),
    Contestant(name="grouped_mm+compile", available=_grouped, build=_compiled_grouped),
    Contestant(name="scattermoe", available=_scattermoe_available, build=_scattermoe),
    Contestant(name="sonicmoe", available=sonicmoe_missing, build=_ours("sonicmoe")),
    Contestant(name="transformers", available=_transformers_available, build=_transformers),
    Contestant(name="liger", available=_liger_available, build=_liger),
)


def find_contestants(names: Sequence[str]) -> list[Contestant]:
    """The named ones, or all that are not optional; acmoe is always among them."""
    known = {contestant.name: contestant for contestant in CONTESTANTS}
    for name in names:
        if name not in known:
            raise UserError(f"rival {name!r} is unknown; choose among {', '.join(known)}")
    wanted = {"acmoe", *names} if names else {c.name for c in CONTESTANTS if not c.optional}
    return [contestant for contestant in CONTESTANTS if contestant.name in wanted]
