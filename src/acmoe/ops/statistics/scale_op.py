"""Dispersion and scale of all clusters in three Triton launches.

The launches compute sums of the tokens, sums of their deviations, and the scale; scale.py defines
the results. There is no gradient: where one is needed, `scale_from_dispersion` is applied to
`fused_dispersion`.

B sets of T tokens, D features, C clusters.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from acmoe.errors import check
from acmoe.ops.dispatch import eager
from acmoe.ops.statistics.dispersion_op import as_sets, check_kernel_input, summed_term
from acmoe.ops.statistics.pending import Pending
from acmoe.ops.statistics.scale import ScaleOptions, check_normalize
from acmoe.ops.taped import taped

if TYPE_CHECKING:
    from acmoe.ops.statistics.triton.scale import StatsInput

# The measures that are computed from sums alone.
SCALE_MEASURES = ("mad", "variance", "std")


class ScaleSettings(NamedTuple):
    """The measure and the options of `scale_from_dispersion` that the kernels of a scale have.

    The fields are in the order of the custom ops' last arguments.
    """

    measure: str = "mad"
    normalize: str = "cluster"
    floor: float = 1e-3
    eps: float = 0.0
    clamp: float | None = None
    min_tokens: int = 2
    mean_before_clamp: bool = False
    mean_over: str = "all"

    @classmethod
    def of(cls, measure: str, options: ScaleOptions) -> "ScaleSettings":
        """Return the settings for these options, which have no strength: w = 1/s."""
        return cls(
            *(measure, options.normalize, options.floor),
            *(options.eps, options.clamp, options.min_tokens),
            *(options.mean_before_clamp, options.mean_over),
        )

    def is_separable(self) -> bool:
        """Return True if the scale of a cluster does not depend on other clusters."""
        return self.normalize == "cluster" and self.clamp is None and self.mean_over == "all"


DEFAULTS = ScaleSettings()


def fused_cluster_scale(
    x: Tensor,
    assignment: Tensor,
    num_clusters: int,
    settings: ScaleSettings = DEFAULTS,
    *,
    token_mask: Tensor | None = None,
    chosen: Tensor | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scale and dispersion (C, D) and count (C,), each with a leading B for x of (B, T, D).

    The results are float32 and detached. The other arguments are those of `dispersion`. chosen:
    `ScaleOptions.chosen`. into: buffers for dispersion and count; None allocates them.
    """
    check_kernel_input(x, assignment, num_clusters, settings.measure, token_mask, SCALE_MEASURES)
    check_normalize(settings.normalize)
    spread, count = output_buffers(x, (*x.shape[:-2], num_clusters, x.shape[-1]), into)
    tensors = (*as_sets(x.detach(), assignment, token_mask), chosen, spread, count)
    if not eager(x, assignment, token_mask, spread):
        return scale_op(*tensors, *settings), spread, count
    return taped_into(launched_scale, tensors, settings)[0], spread, count


def constant_dispersion(
    x: Tensor,
    assignment: Tensor,
    num_clusters: int,
    *,
    measure: str = "mad",
    token_mask: Tensor | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return dispersion and count as `fused_cluster_scale` does, in eager calls only.

    There is no custom op for it, so that `torch.compile` cannot trace it.
    """
    check_kernel_input(x, assignment, num_clusters, measure, token_mask, SCALE_MEASURES)
    spread, count = output_buffers(x, (*x.shape[:-2], num_clusters, x.shape[-1]), into)
    tensors = (*as_sets(x.detach(), assignment, token_mask), None, spread, count)
    taped_into(launched_dispersion, tensors, (measure,))
    return spread, count


def taped_into(
    run: Callable[..., Any], tensors: tuple[Tensor | None, ...], settings: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """Return the results of `run` by a tape; it writes the last two tensors.

    Autograd notices writes by their versions, which launches leave alone.
    """
    found = taped(run, tensors, settings)
    for one in tensors[-2:]:
        if one is not None and not one.is_inference():
            torch.autograd.graph.increment_version(one)
    return found


def output_buffers(
    x: Tensor, shape: tuple[int, ...], into: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Return buffers for a dispersion of `shape` and its count: `into` if given, or new ones."""
    if into is None:
        spread = x.new_empty(shape, dtype=torch.float32)
        return spread, spread.new_empty(shape[:-1])
    for buffer, wanted in zip(into, (shape, shape[:-1]), strict=True):
        check(
            buffer.shape == wanted and buffer.dtype == torch.float32 and buffer.is_contiguous(),
            f"into holds a {buffer.dtype} tensor of shape {tuple(buffer.shape)}; pass contiguous "
            f"float32 of shape {wanted}",
        )
    return into


@torch.library.custom_op("acmoe::cluster_scale", mutates_args=("spread", "count"))
def scale_op(
    x: Tensor,
    assignment: Tensor,
    token_mask: Tensor | None,
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
    """Return the scale, shaped as `spread`, of x (B, T, D); fill spread and count.

    For B = 1 spread and count may lack the leading dimension.
    """
    settings = (measure, normalize, floor, eps, clamp, min_tokens, mean_before_clamp, mean_over)
    return launched_scale(x, assignment, token_mask, chosen, spread, count, *settings)[0]


@scale_op.register_fake
def _(x, assignment, token_mask, chosen, spread, *rest):  # type: ignore[no-untyped-def]
    return torch.empty_like(spread)


def launched_scale(
    x: Tensor,
    assignment: Tensor,
    token_mask: Tensor | None,
    chosen: Tensor | None,
    spread: Tensor,
    count: Tensor,
    *constants: Any,
    pending: Pending | None = None,
) -> tuple[Tensor]:
    """Launch the kernels of `scale_op`. constants: the fields of `ScaleSettings`."""
    from acmoe.ops.statistics.triton.dispersion import partial_sums

    settings = ScaleSettings(*constants)
    C, term = spread.shape[-2], summed_term(settings.measure)
    partials = partial_sums(x, assignment, token_mask, C, term)
    return written_scale(partials, chosen, spread, count, settings, pending)


def launched_dispersion(
    x: Tensor,
    assignment: Tensor,
    token_mask: Tensor | None,
    known: Tensor | None,
    spread: Tensor,
    count: Tensor,
    measure: str,
    *,
    pending: Pending | None = None,
) -> tuple[Tensor, ...]:
    """Fill spread and count, as `scale_op` does; return a copy of `known`, if any."""
    from acmoe.ops.statistics.triton.dispersion import partial_sums

    C, term = spread.shape[-2], summed_term(measure)
    partials = partial_sums(x, assignment, token_mask, C, term)
    return write_dispersion(partials, known, spread, count, measure, pending)


def written_scale(
    stats_input: "StatsInput",
    chosen: Tensor | None,
    spread: Tensor | None,
    count: Tensor,
    settings: ScaleSettings,
    pending: Pending | None,
) -> tuple[Tensor]:
    """Return the scale; fill spread and count, and add them to `pending`.

    spread: None where the kernel need not store the dispersion, which leaves `pending` alone.
    """
    from acmoe.ops.statistics.triton.scale import reduce_to_scale

    into = _with_sets(spread, count)
    scale, _, _ = reduce_to_scale(stats_input, settings, into=into, pending=pending, chosen=chosen)
    return (scale.view(*count.shape, scale.shape[-1]),)


def write_dispersion(
    stats_input: "StatsInput",
    known: Tensor | None,
    spread: Tensor,
    count: Tensor,
    measure: str,
    pending: Pending | None,
) -> tuple[Tensor, ...]:
    """Fill spread and count, and add them to `pending`; return a copy of `known`, if any."""
    from acmoe.ops.statistics.triton.scale import reduce_to_dispersion

    spread_BCD, count_BC = _with_sets(spread, count)
    assert spread_BCD is not None
    *_, copied = reduce_to_dispersion(
        stats_input,
        root=measure == "std",
        into=(spread_BCD, count_BC),
        pending=pending,
        known=known,
    )
    return () if copied is None else (copied.view_as(spread),)


def _with_sets(spread: Tensor | None, count: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return views (B, C, D) and (B, C); for B = 1 the leading dimension may be missing."""
    count_BC = count.view(-1, count.shape[-1])
    return (spread if spread is None else spread.view(*count_BC.shape, -1)), count_BC
