"""Causal statistics as ops: the dispersion of each token's prefix, and the scale computed from it.

B sequences of L tokens, D features, C clusters, J clusters per token.
"""

from torch import Tensor

from acmoe.ops.device_support import triton_unsupported
from acmoe.ops.dispatch import op
from acmoe.ops.grad_mode import records_gradient
from acmoe.ops.statistics.op import NOT_SEPARABLE
from acmoe.ops.statistics.prefix import native
from acmoe.ops.statistics.prefix.launched import fused_prefix_dispersion, fused_prefix_scale
from acmoe.ops.statistics.prefix.reference import PREFIX_MEASURES, PrefixMoments, prefix_dispersion
from acmoe.ops.statistics.prefix.shrinking import Prior, shrunk
from acmoe.ops.statistics.scale import ScaleOptions, scale_of


@op
def measure_prefix(
    x_BLD: Tensor,
    assignment_BLJ: Tensor,
    before: PrefixMoments,
    *,
    measure: str,
    token_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, PrefixMoments]:
    """Compute `prefix_dispersion` for the J clusters of each token, its own cluster first."""
    return prefix_dispersion(
        x_BLD,
        assignment_BLJ[..., 0],
        assignment_BLJ,
        before,
        measure=measure,
        token_mask=token_mask,
    )


def _prefix_unsupported(x_BLD: Tensor, assignment_BLJ: Tensor) -> str | None:
    if x_BLD.numel() == 0:
        return "there are no tokens"
    if assignment_BLJ.shape[-1] > 1:
        return "its kernel reads one cluster per token"
    return triton_unsupported(x_BLD)


measure_prefix.register("triton", unsupported=_prefix_unsupported)(fused_prefix_dispersion)


@op
def measure_prefix_scale(
    x_BLD: Tensor,
    assignment_BLJ: Tensor,
    before: PrefixMoments,
    prior: Prior,
    options: ScaleOptions,
    *,
    measure: str,
    token_mask: Tensor | None = None,
) -> tuple[Tensor, PrefixMoments]:
    """Return the scale (B, L, J, D) of each token's clusters, shrunk towards a running average.

    The scale of a token that is masked, not finite or in no cluster is any finite number. The other
    arguments and the moments are those of `measure_prefix`.
    """
    spread_BLJD, count_BLJ, after = measure_prefix(
        x_BLD, assignment_BLJ, before, measure=measure, token_mask=token_mask
    )
    mixed = shrunk(spread_BLJD, count_BLJ, assignment_BLJ, prior, options.min_tokens)
    return scale_of(*mixed, options), after


def _options_unsupported(options: ScaleOptions) -> str | None:
    """Return the reason why kernels cannot compute a scale with these options, or None."""
    if not options.is_separable() or options.mean_over != "all":
        return NOT_SEPARABLE
    if options.floor == 0 and options.eps == 0:
        return "its kernel divides by zero where floor and eps are zero"
    return None


def _prefix_scale_unsupported(
    x_BLD: Tensor,
    assignment_BLJ: Tensor,
    before: PrefixMoments,
    prior: Prior,
    options: ScaleOptions,
    measure: str,
) -> str | None:
    if reason := _options_unsupported(options):
        return reason
    if measure not in PREFIX_MEASURES:
        return f"measure={measure!r} has no kernel"
    if records_gradient(x_BLD, *before, prior.dispersion):
        return "its kernel has no gradient"
    return _prefix_unsupported(x_BLD, assignment_BLJ)


def _prefix_scale_not_native(
    x_BLD: Tensor,
    assignment_BLJ: Tensor,
    before: PrefixMoments,
    prior: Prior,
    options: ScaleOptions,
    measure: str,
    token_mask: Tensor | None,
) -> str | None:
    reason = native.unsupported(x_BLD, assignment_BLJ, before, prior, measure, token_mask)
    return reason or _options_unsupported(options)


measure_prefix_scale.register("triton", unsupported=_prefix_scale_unsupported, by_triton=True)(
    fused_prefix_scale
)
measure_prefix_scale.register("native", unsupported=_prefix_scale_not_native)(native.scale_in_c)
