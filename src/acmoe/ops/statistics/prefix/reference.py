"""Causal dispersion: statistics of a token's cluster over tokens up to and including that token.

For token t of a sequence, with the tokens i <= t of the same sequence and cluster and their running
means m_i:
    mad       mean of |x_i - m_i|                   (online form: x_i is compared with the mean when
                                                     it arrived, so no future token is needed)
    variance  mean of (x_i - m_{i-1}) (x_i - m_i)   (Welford: exactly the variance of the prefix)
    std       its square root
Memory is O(T D): tokens are sorted by cluster and scanned, and no (T, C, D) tensor exists. Only a
count, a mean and a sum per sequence and cluster outlive a call (for decoding).

B sequences, L tokens in each, D features, C clusters, J clusters read by each token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.errors import check
from acmoe.ops.checks import check_range, check_tokens
from acmoe.ops.dispatch import transforming
from acmoe.ops.statistics.dispersion import exclude, finite_tokens

PREFIX_MEASURES = ("mad", "variance", "std")


class PrefixMoments(NamedTuple):
    """Moments of the tokens seen so far, per sequence and cluster."""

    tokens: Tensor  # (B, C) their number
    mean: Tensor  # (B, C, D) mean of x; any finite value where there are none
    spread: Tensor  # (B, C, D) sum of the measure's increments

    @classmethod
    def empty(
        cls,
        num_sequences: int,
        num_clusters: int,
        dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "PrefixMoments":
        """Return the moments of no tokens."""
        tokens = torch.zeros(num_sequences, num_clusters, device=device, dtype=dtype)
        mean = torch.zeros(num_sequences, num_clusters, dim, device=device, dtype=dtype)
        return cls(tokens, mean, torch.zeros_like(mean))


def check_prefix_measure(measure: str) -> None:
    """Raise a UserError unless the measure has a causal form."""
    check(
        measure in PREFIX_MEASURES,
        f"measure={measure!r} has no causal form of bounded memory; "
        f"statistics='prefix' takes one of {', '.join(PREFIX_MEASURES)}",
    )


def prefix_dispersion(
    x_BLD: Tensor,
    assignment_BL: Tensor,
    read_BLJ: Tensor,
    before: PrefixMoments,
    *,
    measure: str = "mad",
    token_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, PrefixMoments]:
    """Return dispersion (B, L, J, D) and count (B, L, J) of clusters `read_BLJ` as of each token.

    assignment_BL   the cluster each token belongs to, -1 for none
    read_BLJ        the clusters whose statistics each token reads: its own (J = 1), or several; -1
                    for none, which reads a count and a dispersion of 0
    before          moments of these sequences from earlier calls
    A token with NaN or inf is left out of the statistics, as a masked one is, and reads zeros. The
    third result holds the moments after the last token.
    """
    check_prefix_measure(measure)
    _check_prefix(x_BLD, read_BLJ, before)
    check_tokens(x_BLD, assignment_BL, token_mask)
    num_clusters = before.tokens.shape[1]
    check_range(assignment_BL, -1, num_clusters, "assignment")
    check_range(read_BLJ, -1, num_clusters, "read")
    # A token with NaN or inf must not spoil its cluster for the rest of the sequence.
    finite_BL = finite_tokens(x_BLD)
    kept_BL = finite_BL if token_mask is None else finite_BL & token_mask
    x_BLD, cluster_BL = exclude(x_BLD, assignment_BL, num_clusters, kept_BL)
    # The content of padding changes nothing, not even what padding reads.
    reads_BL = finite_BL if token_mask is None else finite_BL | ~token_mask
    read_BLJ = read_BLJ.masked_fill(~reads_BL[..., None], -1)

    count_BL, mean_BLD, spread_BLD = _own_cluster_moments(x_BLD, cluster_BL, before, measure)
    # In time order the position of a cluster's latest token is a running maximum.
    last_BLC = _last_position(cluster_BL, num_clusters)
    after = _moments_after(last_BLC, count_BL, mean_BLD, spread_BLD, before)
    read_count_BLJ, read_spread_BLJD = _read_clusters(
        read_BLJ, last_BLC, count_BL, spread_BLD, before
    )
    mean_BLJD = read_spread_BLJD / read_count_BLJ.clamp(min=1)[..., None]
    if measure == "std":
        constant = mean_BLJD <= 0
        mean_BLJD = torch.where(constant, 1.0, mean_BLJD).sqrt().masked_fill(constant, 0.0)
    return mean_BLJD, read_count_BLJ, after


def _own_cluster_moments(
    x_BLD: Tensor, cluster_BL: Tensor, before: PrefixMoments, measure: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return count (B, L), mean and increment sum (B, L, D) of each token's cluster, as of it."""
    permutation_BL = cluster_BL.argsort(dim=1, stable=True)
    inverse_BL = permutation_BL.argsort(dim=1)
    sorted_BLD = _gather_rows(x_BLD, permutation_BL)
    cluster_BL = cluster_BL.gather(1, permutation_BL)
    own_BL = cluster_BL.clamp(
        max=before.tokens.shape[1] - 1
    )  # tokens in no cluster gather unused values
    start_BL = torch.diff(cluster_BL, dim=1, prepend=cluster_BL[:, :1] - 1) != 0

    # Means are relative to the mean so far or, without one, to the cluster's first token: equal
    # tokens then deviate by exactly 0, and a large common offset costs no precision.
    count_before_BL1 = before.tokens.gather(1, own_BL)[..., None]
    first_BLD = _gather_rows(sorted_BLD.detach(), _segment_start(start_BL))
    anchor_BLD = torch.where(count_before_BL1 > 0, _gather_rows(before.mean, own_BL), first_BLD)
    shifted_BLD = sorted_BLD - anchor_BLD
    count_BL1 = count_before_BL1 + segmented_sum(torch.ones_like(shifted_BLD[..., :1]), start_BL)
    shifted_mean_BLD = segmented_sum(shifted_BLD, start_BL) / count_BL1
    deviation_BLD = shifted_BLD - shifted_mean_BLD
    if measure == "mad":
        increment_BLD = deviation_BLD.abs()
    else:
        # x_i - m_{i-1} = n / (n-1) * (x_i - m_i), so the product is a square: never negative.
        increment_BLD = deviation_BLD.square() * (count_BL1 / (count_BL1 - 1).clamp(min=1))
    spread_BLD = _gather_rows(before.spread, own_BL) + segmented_sum(increment_BLD, start_BL)
    mean_BLD = anchor_BLD + shifted_mean_BLD
    count_BL = count_BL1[..., 0]
    return (
        count_BL.gather(1, inverse_BL),
        _gather_rows(mean_BLD, inverse_BL),
        _gather_rows(spread_BLD, inverse_BL),
    )


def _check_prefix(x_BLD: Tensor, read_BLJ: Tensor, before: PrefixMoments) -> None:
    """Raise a UserError unless the shapes agree."""
    check(x_BLD.dim() == 3, f"x has shape {tuple(x_BLD.shape)}; pass (sequences, length, features)")
    check(
        read_BLJ.dim() == 3 and read_BLJ.shape[:2] == x_BLD.shape[:2],
        f"read has shape {tuple(read_BLJ.shape)}; clusters to read at each token of x need "
        f"{(*x_BLD.shape[:2], 'clusters')}",
    )
    B, C, D = before.mean.shape
    check(
        x_BLD.shape[0] == B and x_BLD.shape[2] == D,
        f"before holds moments of {B} sequences and {D} features; x of shape {tuple(x_BLD.shape)} "
        f"needs PrefixMoments.empty({x_BLD.shape[0]}, {C}, {x_BLD.shape[2]})",
    )


def _gather_rows(value_BXD: Tensor, index_BL: Tensor) -> Tensor:
    """Gather rows (B, L, D) of (B, X, D) by index (B, L)."""
    return value_BXD.gather(1, index_BL[..., None].expand(-1, -1, value_BXD.shape[-1]))


def _last_position(cluster_BL: Tensor, num_clusters: int) -> Tensor:
    """Return (B, L, C) int32: position of each cluster's latest token so far, -1 if none."""
    position_L1 = torch.arange(cluster_BL.shape[1], device=cluster_BL.device, dtype=torch.int32)
    here_BLC = cluster_BL[..., None] == torch.arange(num_clusters, device=cluster_BL.device)
    seen_BLC = torch.where(here_BLC, position_L1[:, None], -1)
    return seen_BLC.cummax(dim=1).values if cluster_BL.shape[1] else seen_BLC


def _read_clusters(
    read_BLJ: Tensor,
    last_BLC: Tensor,
    count_BL: Tensor,
    spread_BLD: Tensor,
    before: PrefixMoments,
) -> tuple[Tensor, Tensor]:
    """Return count and summed increments of the clusters to read, as of each token."""
    (B, L, J), D = read_BLJ.shape, spread_BLD.shape[-1]
    safe_BLJ = read_BLJ.clamp(min=0)
    position_BLJ = last_BLC.gather(2, safe_BLJ).long()
    seen_BLJ = position_BLJ >= 0
    position_BN, safe_BN = position_BLJ.clamp(min=0).view(B, L * J), safe_BLJ.view(B, L * J)
    count_BLJ = torch.where(
        seen_BLJ,
        count_BL.gather(1, position_BN).view(B, L, J),
        before.tokens.gather(1, safe_BN).view(B, L, J),
    )
    spread_BLJD = torch.where(
        seen_BLJ[..., None],
        _gather_rows(spread_BLD, position_BN).view(B, L, J, D),
        _gather_rows(before.spread, safe_BN).view(B, L, J, D),
    )
    none_BLJ = read_BLJ < 0
    return (
        count_BLJ.masked_fill(none_BLJ, 0.0),
        spread_BLJD.masked_fill(none_BLJ[..., None], 0.0),
    )


def _moments_after(
    last_BLC: Tensor,
    count_BL: Tensor,
    mean_BLD: Tensor,
    spread_BLD: Tensor,
    before: PrefixMoments,
) -> PrefixMoments:
    """Return the moments of every cluster after the last token."""
    if last_BLC.shape[1] == 0:
        return before
    last_BC = last_BLC[:, -1].long()
    seen_BC, position_BC = last_BC >= 0, last_BC.clamp(min=0)
    return PrefixMoments(
        torch.where(seen_BC, count_BL.gather(1, position_BC), before.tokens),
        torch.where(seen_BC[..., None], _gather_rows(mean_BLD, position_BC), before.mean),
        torch.where(seen_BC[..., None], _gather_rows(spread_BLD, position_BC), before.spread),
    )


def segmented_sum(value_BLD: Tensor, start_BL: Tensor) -> Tensor:
    """Inclusive running sum along L that restarts at every True of `start_BL`.

    The order of additions depends only on a token's distance from its segment's start, so neither
    later tokens nor other segments can change a bit of a result. (A global cumulative sum minus its
    value at the start would round earlier segments into later ones.)
    """
    if transforming():
        return _scan(value_BLD, start_BL)
    total: Tensor = _SegmentedSum.apply(value_BLD, start_BL)  # type: ignore[no-untyped-call]
    return total


class _SegmentedSum(torch.autograd.Function):
    """Segmented running sum; its gradient is the segmented sum in reverse."""

    @staticmethod
    def forward(value_BLD: Tensor, start_BL: Tensor) -> Tensor:
        return _scan(value_BLD, start_BL)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        # The transpose of a running sum is the running sum in reverse order: a segment's last
        # token, just before the next start, becomes its first.
        (start_BL,) = ctx.saved_tensors
        end_BL = torch.nn.functional.pad(start_BL[:, 1:], (0, 1), value=True)
        return segmented_sum(grad.flip(1), end_BL.flip(1)).flip(1), None


def _segment_start(start_BL: Tensor) -> Tensor:
    """Return (B, L): position of the latest True of `start_BL` up to each token."""
    position_L = torch.arange(start_BL.shape[1], device=start_BL.device)
    first_BL = torch.where(start_BL, position_L, 0)
    return first_BL.cummax(dim=1).values if start_BL.shape[1] else first_BL


def _scan(value_BLD: Tensor, start_BL: Tensor) -> Tensor:
    """Hillis-Steele scan: log2(L) rounds add the value 2^k to the left, within the segment."""
    L = value_BLD.shape[1]
    offset_BL = torch.arange(L, device=value_BLD.device) - _segment_start(start_BL)
    shift = 1
    while shift < L:
        left_BLD = torch.nn.functional.pad(value_BLD[:, :-shift], (0, 0, shift, 0))
        inside_BL1 = (offset_BL >= shift)[..., None]
        value_BLD = value_BLD + left_BLD.masked_fill(~inside_BL1, 0.0)
        shift *= 2
    return value_BLD
