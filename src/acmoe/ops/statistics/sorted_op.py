"""Dispersion and scale of tokens that are sorted by cluster, without gradient.

The results equal those of scale_op.py and dispersion_op.py up to rounding, and take less time. The
sort of a layer's rows by expert also sorts its tokens by cluster (ops/sort).

T tokens, D features, C clusters.
"""

from typing import Any

import torch
from torch import Tensor

from acmoe.errors import check
from acmoe.ops.dispatch import eager
from acmoe.ops.sort.order import TokenOrder, num_slots
from acmoe.ops.statistics.dispersion_op import check_kernel_dtype, summed_term
from acmoe.ops.statistics.pending import Pending
from acmoe.ops.statistics.scale import check_normalize
from acmoe.ops.statistics.scale_op import (
    DEFAULTS,
    SCALE_MEASURES,
    ScaleSettings,
    output_buffers,
    taped_into,
    write_dispersion,
    written_scale,
)


def sorted_cluster_scale(
    x: Tensor,
    clusters: TokenOrder,
    settings: ScaleSettings = DEFAULTS,
    *,
    chosen: Tensor | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scale and dispersion (C, D) and count (C,) of x (T, D); see `fused_cluster_scale`."""
    check_sorted(x, clusters, settings.measure)
    check_normalize(settings.normalize)
    spread, count = output_buffers(x, _shape(x, clusters), into)
    tensors = (x.detach(), *clusters, chosen, spread, count)
    if not eager(x, clusters.token, spread):
        return sorted_scale_op(*tensors, *settings), spread, count
    return taped_into(launched_scale, tensors, settings)[0], spread, count


def sorted_dispersion(
    x: Tensor,
    clusters: TokenOrder,
    *,
    measure: str = "mad",
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return dispersion (C, D) and count (C,) of x (T, D), written to `into` if given."""
    check_sorted(x, clusters, measure)
    spread, count = output_buffers(x, _shape(x, clusters), into)
    tokens = x.detach(), *clusters
    if eager(x, clusters.token, spread):
        taped_into(launched_dispersion, (*tokens, None, spread, count), (measure,))
    else:
        sorted_dispersion_op(*tokens, spread, count, measure)
    return spread, count


def _shape(x: Tensor, clusters: TokenOrder) -> tuple[int, int]:
    return clusters.begin.shape[0] - 1, x.shape[1]


def check_sorted(x: Tensor, clusters: TokenOrder, measure: str) -> None:
    check(
        measure in SCALE_MEASURES,
        f"measure={measure!r} has no kernel for sorted tokens; choose one of "
        f"{', '.join(SCALE_MEASURES)}, or leave the tokens in their order",
    )
    check_kernel_dtype(x)
    slots = clusters.token.numel()
    wanted = num_slots(x.shape[0], clusters.begin.shape[0] - 1)
    check(
        x.dim() == 2 and slots == wanted,
        f"x has shape {tuple(x.shape)} and the order {slots} slots; pass (tokens, features), the "
        f"tokens that were sorted: {x.shape[0]} of them have {wanted} slots",
    )


@torch.library.custom_op("acmoe::sorted_scale", mutates_args=("spread", "count"))
def sorted_scale_op(
    x: Tensor,
    token: Tensor,
    begin: Tensor,
    end: Tensor,
    chosen: Tensor | None,
    spread: Tensor,
    count: Tensor,
    measure: str,
    normalize: str,
    floor: float,
    eps: float,
    clamp: float | None,
    min_tokens: int,
    mean_before_clamp: bool,
    mean_over: str,
) -> Tensor:
    """Return the scale (C, D) of x (T, D), sorted by cluster; fill spread (C, D), count (C,)."""
    settings = (measure, normalize, floor, eps, clamp, min_tokens, mean_before_clamp, mean_over)
    return launched_scale(x, token, begin, end, chosen, spread, count, *settings)[0]


@sorted_scale_op.register_fake
def _(x, token, begin, end, chosen, spread, *rest):  # type: ignore[no-untyped-def]
    return torch.empty_like(spread)


@torch.library.custom_op("acmoe::sorted_dispersion", mutates_args=("spread", "count"))
def sorted_dispersion_op(
    x: Tensor,
    token: Tensor,
    begin: Tensor,
    end: Tensor,
    spread: Tensor,
    count: Tensor,
    measure: str,
) -> None:
    """Fill spread (C, D) and count (C,) with the dispersion and token count of each cluster."""
    launched_dispersion(x, token, begin, end, None, spread, count, measure)


@sorted_dispersion_op.register_fake
def _(*arguments):  # type: ignore[no-untyped-def]
    return None


def launched_scale(
    x: Tensor,
    token: Tensor,
    begin: Tensor,
    end: Tensor,
    chosen: Tensor | None,
    spread: Tensor,
    count: Tensor,
    *constants: Any,
    pending: Pending | None = None,
) -> tuple[Tensor]:
    """Return the result of `sorted_scale_op`. constants: the fields of `ScaleSettings`."""
    from acmoe.ops.statistics.triton.sorted_dispersion import SortedTokens

    settings = ScaleSettings(*constants)
    tokens = SortedTokens(x, token, begin, end, summed_term(settings.measure))
    return written_scale(tokens, chosen, spread, count, settings, pending)


def launched_dispersion(
    x: Tensor,
    token: Tensor,
    begin: Tensor,
    end: Tensor,
    known: Tensor | None,
    spread: Tensor,
    count: Tensor,
    measure: str,
    *,
    pending: Pending | None = None,
) -> tuple[Tensor, ...]:
    """Do what `sorted_dispersion_op` does; return a copy of `known`, if any."""
    from acmoe.ops.statistics.triton.sorted_dispersion import SortedTokens

    tokens = SortedTokens(x, token, begin, end, summed_term(measure))
    return write_dispersion(tokens, known, spread, count, measure, pending)
