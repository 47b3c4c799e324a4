"""Dispersion and scale of many sets of tokens, such as sequences, by the tokens of each list.

A list holds the tokens of one cluster of one set. The results equal those of scale_op.py, whose
kernels read all tokens of a set for every 128 clusters, up to rounding; there is no gradient.

B sets of L tokens, D features, C clusters.
"""

from typing import Any

import torch
from torch import Tensor

from acmoe.ops.dispatch import eager
from acmoe.ops.statistics.dispersion_op import check_kernel_input, summed_term
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

# Up to so many clusters the kernels for unsorted tokens are faster: they read the tokens twice for
# every few clusters.
FEW_CLUSTERS = 32
# Tokens of a list, on average: longer lists leave few programs, which read their tokens twice.
MOST_TOKENS = 128
# Tokens of a set whose clusters each program reads to list its own, where no order is known.
MOST_UNSORTED = 8192
MOST_FEATURES = 16384  # of one program: 32 for each of 512 threads


def lists_pay(num_sets: int, tokens: int, num_clusters: int, dim: int, *, is_sorted: bool) -> bool:
    """Return True if the kernel for lists is faster than the kernels for unsorted tokens.

    tokens: those of each set. is_sorted: an order of all tokens is known, so that finding a list
    takes a search; otherwise every program reads the clusters of its set. One set alone has other
    kernels for sorted tokens, which split large clusters among programs (sorted_op.py).

    Sequences of 512 tokens, captured on an H200, in brackets the kernels for unsorted tokens: 93 us
    (928) at qwen3next, 108 (327) at olmoe, whose sequences of 4,096 tokens take 216 (261). Lists do
    not pay at gptoss, 190 (143), and switch, 55 (25).
    """
    if num_sets < 2 or tokens == 0 or dim > MOST_FEATURES or num_clusters <= FEW_CLUSTERS:
        return False
    return tokens <= MOST_TOKENS * num_clusters and (is_sorted or tokens <= MOST_UNSORTED)


def set_cluster_scale(
    x: Tensor,
    assignment: Tensor,
    num_clusters: int,
    settings: ScaleSettings = DEFAULTS,
    *,
    token_mask: Tensor | None = None,
    order: Tensor | None = None,
    chosen: Tensor | None = None,
    into: tuple[Tensor, Tensor] | None = None,
    with_dispersion: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return scale and dispersion (B, C, D) and count (B, C) of x (B, L, D).

    order: the packed `TokenOrder` of all B L tokens, where masked ones are in no cluster, or None.
    with_dispersion: False returns None for the dispersion, which then is not written. The others
    are those of `fused_cluster_scale`.
    """
    order = _checked(x, assignment, num_clusters, settings.measure, token_mask, order)
    check_normalize(settings.normalize)
    shape = (x.shape[0], num_clusters, x.shape[2])
    if with_dispersion or into is not None:
        spread, count = output_buffers(x, shape, into)
    else:
        spread, count = None, x.new_empty(shape[:2], dtype=torch.float32)
    tensors = (x.detach(), assignment, token_mask, order, chosen, spread, count)
    if eager(x, assignment, token_mask, order, spread):
        return taped_into(launched_scale, tensors, settings)[0], spread, count
    return set_scale_op(*tensors, *settings), spread, count


def set_dispersion(
    x: Tensor,
    assignment: Tensor,
    num_clusters: int,
    *,
    measure: str = "mad",
    token_mask: Tensor | None = None,
    order: Tensor | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return dispersion and count as `set_cluster_scale` does, in eager calls only."""
    order = _checked(x, assignment, num_clusters, measure, token_mask, order)
    spread, count = output_buffers(x, (x.shape[0], num_clusters, x.shape[2]), into)
    tensors = (x.detach(), assignment, token_mask, order, spread, count)
    taped_into(launched_dispersion, tensors, (measure,))
    return spread, count


def _checked(
    x: Tensor,
    assignment: Tensor,
    num_clusters: int,
    measure: str,
    token_mask: Tensor | None,
    order: Tensor | None,
) -> Tensor | None:
    """Return the order, or None if it is empty; raise a UserError for what has no kernel."""
    check_kernel_input(x, assignment, num_clusters, measure, token_mask, SCALE_MEASURES)
    return None if order is None or order.numel() == 0 else order


@torch.library.custom_op("acmoe::set_scale", mutates_args=("spread", "count"))
def set_scale_op(
    x: Tensor,
    assignment: Tensor,
    token_mask: Tensor | None,
    order: Tensor | None,
    chosen: Tensor | None,
    spread: Tensor | None,
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
    """Return the scale (B, C, D) of x (B, L, D); fill count (B, C) and spread, if it is given."""
    settings = (measure, normalize, floor, eps, clamp, min_tokens, mean_before_clamp, mean_over)
    tensors = (x, assignment, token_mask, order, chosen, spread, count)
    return launched_scale(*tensors, *settings)[0]


@set_scale_op.register_fake
def _(x, assignment, token_mask, order, chosen, spread, count, *rest):  # type: ignore[no-untyped-def]
    return count.new_empty(*count.shape, x.shape[2])


def launched_scale(
    x: Tensor,
    assignment: Tensor,
    token_mask: Tensor | None,
    order: Tensor | None,
    chosen: Tensor | None,
    spread: Tensor | None,
    count: Tensor,
    *constants: Any,
) -> tuple[Tensor]:
    """Launch the kernels of `set_scale_op`. constants: the fields of `ScaleSettings`."""
    from acmoe.ops.statistics.triton.set_dispersion import SetTokens

    settings = ScaleSettings(*constants)
    term = summed_term(settings.measure)
    sets = SetTokens.of(x, assignment, token_mask, order, count.shape[1], term)
    return written_scale(sets, chosen, spread, count, settings, None)


def launched_dispersion(
    x: Tensor,
    assignment: Tensor,
    token_mask: Tensor | None,
    order: Tensor | None,
    spread: Tensor,
    count: Tensor,
    measure: str,
) -> tuple[Tensor, ...]:
    """Fill spread (B, C, D) and count (B, C)."""
    from acmoe.ops.statistics.triton.set_dispersion import SetTokens

    term = summed_term(measure)
    sets = SetTokens.of(x, assignment, token_mask, order, count.shape[1], term)
    return write_dispersion(sets, None, spread, count, measure, None)
