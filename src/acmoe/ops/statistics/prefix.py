"""Causal dispersion: what each token's cluster looked like up to and including that token.

For token t of a sequence, with the tokens i <= t of the same sequence and cluster and their means
m_i so far:
    mad       mean of |x_i - m_i|                    (the online form: x_i is compared with the mean
                                                      known when it arrived, so no future is needed)
    variance  mean of (x_i - m_{i-1}) (x_i - m_i)    (Welford: exactly the variance of the prefix)
    std       its square root
Memory is O(T D): tokens are sorted by cluster and scanned, and no (T, C, D) tensor ever exists.
What must outlive a call (decoding) is a count, a mean and a sum per sequence and cluster.

B sequences, L tokens in each, D features, C clusters, J clusters read by each token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.errors import check
from acmoe.ops.checks import check_range, check_tokens
from acmoe.ops.statistics.dispersion import exclude

PREFIX_MEASURES = ("mad", "variance", "std")


class PrefixMoments(NamedTuple):
    """What the tokens seen so far amount to, per sequence and cluster."""

    tokens: Tensor  # (B, C) how many
    mean: Tensor  # (B, C, D) of x; anything finite where there are none
    spread: Tensor  # (B, C, D) sum of the increments of the measure

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
        tokens = torch.zeros(num_sequences, num_clusters, device=device, dtype=dtype)
        mean = torch.zeros(num_sequences, num_clusters, dim, device=device, dtype=dtype)
        return cls(tokens, mean, torch.zeros_like(mean))


def check_prefix_measure(measure: str) -> None:
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
    """Dispersion (B, L, J, D) and count (B, L, J) of clusters `read_BLJ`, as seen at each token.

    assignment_BL   the cluster each token belongs to, -1 for none
    read_BLJ        the clusters whose statistics the token wants: its own (J = 1), or several; -1
                    for none, which reads a count and a dispersion of 0
    before          what earlier calls saw of these sequences
    Returns also the moments after the last token.
    """
    check_prefix_measure(measure)
    _check_prefix(x_BLD, read_BLJ, before)
    check_tokens(x_BLD, assignment_BL, token_mask)
    num_clusters = before.tokens.shape[1]
    check_range(assignment_BL, -1, num_clusters, "assignment")
    check_range(read_BLJ, -1, num_clusters, "read")
    x_BLD, cluster_BL = exclude(x_BLD, assignment_BL, num_clusters, token_mask)

    count_BL, mean_BLD, spread_BLD = _after_each_token(x_BLD, cluster_BL, before, measure)
    # In the order of time "the last token of cluster c so far" is a running maximum.
    last_BLC = _last_position(cluster_BL, num_clusters)
    after = _at_the_end(last_BLC, count_BL, mean_BLD, spread_BLD, before)
    read_count_BLJ, read_spread_BLJD = _as_seen(read_BLJ, last_BLC, count_BL, spread_BLD, before)
    mean_BLJD = read_spread_BLJD / read_count_BLJ.clamp(min=1)[..., None]
    if measure == "std":
        constant = mean_BLJD <= 0
        mean_BLJD = torch.where(constant, 1.0, mean_BLJD).sqrt().masked_fill(constant, 0.0)
    return mean_BLJD, read_count_BLJ, after


def _after_each_token(
    x_BLD: Tensor, cluster_BL: Tensor, before: PrefixMoments, measure: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Count (B, L), mean (B, L, D) and summed increments (B, L, D) of each token's own cluster."""
    order_BL = cluster_BL.argsort(dim=1, stable=True)
    back_BL = order_BL.argsort(dim=1)
    sorted_BLD = _take(x_BLD, order_BL)
    cluster_BL = cluster_BL.gather(1, order_BL)
    own_BL = cluster_BL.clamp(max=before.tokens.shape[1] - 1)  # tokens in no cluster read garbage
    start_BL = torch.diff(cluster_BL, dim=1, prepend=cluster_BL[:, :1] - 1) != 0

    # Means run relative to the mean so far, or else to the cluster's first token: equal tokens then
    # deviate by exactly 0, and a large common offset costs no precision.
    known_BL1 = before.tokens.gather(1, own_BL)[..., None]
    first_BLD = _take(sorted_BLD.detach(), _segment_start(start_BL))
    anchor_BLD = torch.where(known_BL1 > 0, _take(before.mean, own_BL), first_BLD)
    moved_BLD = sorted_BLD - anchor_BLD
    count_BL1 = known_BL1 + segmented_sum(torch.ones_like(moved_BLD[..., :1]), start_BL)
    moved_mean_BLD = segmented_sum(moved_BLD, start_BL) / count_BL1
    away_BLD = moved_BLD - moved_mean_BLD
    if measure == "mad":
        step_BLD = away_BLD.abs()
    else:
        # x_i - m_{i-1} is n / (n-1) times x_i - m_i; as a square the product is never negative.
        step_BLD = away_BLD.square() * (count_BL1 / (count_BL1 - 1).clamp(min=1))
    spread_BLD = _take(before.spread, own_BL) + segmented_sum(step_BLD, start_BL)
    mean_BLD = anchor_BLD + moved_mean_BLD
    count_BL = count_BL1[..., 0]
    return count_BL.gather(1, back_BL), _take(mean_BLD, back_BL), _take(spread_BLD, back_BL)


def _check_prefix(x_BLD: Tensor, read_BLJ: Tensor, before: PrefixMoments) -> None:
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


def _take(value_BXD: Tensor, index_BL: Tensor) -> Tensor:
    return value_BXD.gather(1, index_BL[..., None].expand(-1, -1, value_BXD.shape[-1]))


def _last_position(cluster_BL: Tensor, num_clusters: int) -> Tensor:
    """(B, L, C) int32 position of the latest token of each cluster up to each token, -1 if none."""
    position_L1 = torch.arange(cluster_BL.shape[1], device=cluster_BL.device, dtype=torch.int32)
    here_BLC = cluster_BL[..., None] == torch.arange(num_clusters, device=cluster_BL.device)
    seen_BLC = torch.where(here_BLC, position_L1[:, None], -1)
    return seen_BLC.cummax(dim=1).values if cluster_BL.shape[1] else seen_BLC


def _as_seen(
    read_BLJ: Tensor,
    last_BLC: Tensor,
    count_BL: Tensor,
    spread_BLD: Tensor,
    before: PrefixMoments,
) -> tuple[Tensor, Tensor]:
    """Count and summed spread of each wanted cluster at each token."""
    (B, L, J), D = read_BLJ.shape, spread_BLD.shape[-1]
    want_BLJ = read_BLJ.clamp(min=0)
    at_BLJ = last_BLC.gather(2, want_BLJ).long()
    seen_BLJ = at_BLJ >= 0
    flat_BN, want_BN = at_BLJ.clamp(min=0).view(B, L * J), want_BLJ.view(B, L * J)
    count_BLJ = torch.where(
        seen_BLJ,
        count_BL.gather(1, flat_BN).view(B, L, J),
        before.tokens.gather(1, want_BN).view(B, L, J),
    )
    spread_BLJD = torch.where(
        seen_BLJ[..., None],
        _take(spread_BLD, flat_BN).view(B, L, J, D),
        _take(before.spread, want_BN).view(B, L, J, D),
    )
    nothing_BLJ = read_BLJ < 0
    return (
        count_BLJ.masked_fill(nothing_BLJ, 0.0),
        spread_BLJD.masked_fill(nothing_BLJ[..., None], 0.0),
    )


def _at_the_end(
    last_BLC: Tensor,
    count_BL: Tensor,
    mean_BLD: Tensor,
    spread_BLD: Tensor,
    before: PrefixMoments,
) -> PrefixMoments:
    if last_BLC.shape[1] == 0:
        return before
    last_BC = last_BLC[:, -1].long()
    seen_BC, at_BC = last_BC >= 0, last_BC.clamp(min=0)
    return PrefixMoments(
        torch.where(seen_BC, count_BL.gather(1, at_BC), before.tokens),
        torch.where(seen_BC[..., None], _take(mean_BLD, at_BC), before.mean),
        torch.where(seen_BC[..., None], _take(spread_BLD, at_BC), before.spread),
    )


def segmented_sum(value_BLD: Tensor, start_BL: Tensor) -> Tensor:
    """Inclusive running sum along L that begins anew at every True of `start_BL`.

    The order of additions depends only on a token's distance from its segment's start, so what
    follows, and what stands in other segments, cannot change a bit of it. (A global cumulative sum
    minus its value at the start would let earlier segments round into later ones.)
    """
    total: Tensor = _SegmentedSum.apply(value_BLD, start_BL)  # type: ignore[no-untyped-call]
    return total


class _SegmentedSum(torch.autograd.Function):
    @staticmethod
    def forward(value_BLD: Tensor, start_BL: Tensor) -> Tensor:
        return _scan(value_BLD, start_BL)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        # The transpose of a running sum is the running sum from the other end: a segment's last
        # token, just before the next start, becomes its first.
        (start_BL,) = ctx.saved_tensors
        end_BL = torch.nn.functional.pad(start_BL[:, 1:], (0, 1), value=True)
        return segmented_sum(grad.flip(1), end_BL.flip(1)).flip(1), None


def _segment_start(start_BL: Tensor) -> Tensor:
    """(B, L) position of the latest True of `start_BL` up to each place."""
    position_L = torch.arange(start_BL.shape[1], device=start_BL.device)
    first_BL = torch.where(start_BL, position_L, 0)
    return first_BL.cummax(dim=1).values if start_BL.shape[1] else first_BL


def _scan(value_BLD: Tensor, start_BL: Tensor) -> Tensor:
    """log2(L) rounds of adding the value 2^k places to the left, as far as the segment reaches."""
    L = value_BLD.shape[1]
    offset_BL = torch.arange(L, device=value_BLD.device) - _segment_start(start_BL)
    reach = 1
    while reach < L:
        left_BLD = torch.nn.functional.pad(value_BLD[:, :-reach], (0, 0, reach, 0))
        inside_BL1 = (offset_BL >= reach)[..., None]
        value_BLD = value_BLD + left_BLD.masked_fill(~inside_BL1, 0.0)
        reach *= 2
    return value_BLD
