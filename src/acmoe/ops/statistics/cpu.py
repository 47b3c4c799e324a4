"""Cluster statistics on a CPU, in few calls.

At the sizes of small models a call costs more than its arithmetic: 8 to 15 us in torch, 1 to 3 us
in numpy (Neoverse-N1). So torch, which uses every core, computes with the tensors of all tokens,
and numpy with the small arrays of clusters.

T tokens, D features, C clusters, X statistics of each cluster.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from acmoe.ops.checks import host_may_read
from acmoe.ops.statistics.dispersion import dispersion_and_count
from acmoe.ops.statistics.scale import ScaleOptions

MEASURES = ("mad", "variance", "std")
_MIN_DISPERSION = 1e-290  # as in scale.py: sums of reciprocals do not overflow
# float32's normal range
_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}

Array = np.ndarray[Any, np.dtype[Any]]


class Measured(NamedTuple):
    """The statistics of the clusters of a call."""

    spread: Array  # (C, D) dispersion, in the dtype of the tokens
    wide: Array  # (C, D) the same in float64
    mean: Array  # (C, 1) float64 mean of the dispersion over features; NaN or inf if one of them is
    means: list[float]  # the same C numbers
    tokens: list[int]  # C numbers of tokens

    @classmethod
    def of(cls, spread_CD: Array, count: list[int]) -> "Measured":
        """Return the statistics with this dispersion and these numbers of tokens."""
        wide_CD = spread_CD.astype(np.float64)
        # Ufuncs: numpy's `mean`, `clip` and `all` take 5 to 10 us before they begin.
        if wide_CD.dtype != spread_CD.dtype:
            total_C1 = np.add.reduce(wide_CD, 1, keepdims=True)
        else:
            with np.errstate(over="ignore"):
                total_C1 = np.add.reduce(wide_CD, 1, keepdims=True)
        total_C1 /= spread_CD.shape[1]
        return cls(spread_CD, wide_CD, total_C1, total_C1.reshape(-1).tolist(), count)

    def known(self, least: int, *, positive: bool = False) -> list[bool]:
        """Return for each cluster True if it has `least` tokens and a finite dispersion.

        positive: the dispersion must not be 0 in all features. The result is a list, because a call
        of numpy takes as long as a loop over 30 clusters.
        """
        bound = 0.0 if positive else -1.0
        return [
            number >= least and bound < mean < math.inf
            for number, mean in zip(self.tokens, self.means, strict=True)
        ]


def unsupported(*tensors: Tensor) -> str | None:
    """Return the reason why these functions cannot read the tensors, or None."""
    for one in tensors:
        if one.device.type != "cpu":
            return "it is for CPUs"
        if one.dtype not in (torch.float32, torch.float64):
            return "it takes float32 and float64"
        if not host_may_read(one):
            return "it is traced, or there are no tokens"
    return "under autocast its GEMMs would be narrow" if torch.is_autocast_enabled("cpu") else None


def measured_dispersion(
    x_TD: Tensor,
    cluster_T: Tensor,
    num_clusters: int,
    *,
    measure: str,
    token_mask: None = None,
    order: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    add_to: tuple[Tensor, Tensor, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the op `measure_dispersion` of tokens without a mask and without a gradient.

    order: not read. add_to: arguments `mean_CX`, `count_C` and `least` of `pending.add_batch`,
    which is called with the result.
    """
    found = _measured(x_TD, cluster_T, num_clusters, measure)
    return _written(found, out, add_to)


def measured_scale(
    x_TD: Tensor,
    cluster_T: Tensor,
    num_clusters: int,
    options: ScaleOptions,
    *,
    measure: str,
    token_mask: None = None,
    order: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    add_to: tuple[Tensor, Tensor, int] | None = None,
) -> Tensor:
    """Compute the op `measure_scale` of tokens without mask and gradient, each cluster by itself.

    order, add_to: those of `measured_dispersion`.
    """
    found = _measured(x_TD, cluster_T, num_clusters, measure)
    if out is not None:
        _written(found, out, add_to)
    elif add_to is not None:
        _add_measured(found, *add_to)
    return _scale(found, floor=options.floor, eps=options.eps, min_tokens=options.min_tokens)


def _written(
    found: Measured,
    out: tuple[Tensor, Tensor] | None,
    add_to: tuple[Tensor, Tensor, int] | None,
) -> tuple[Tensor, Tensor]:
    """Return dispersion (C, D) and float32 count (C,) as tensors; copy them to `out`, if any.

    add_to: see `measured_dispersion`.
    """
    spread_CD = torch.from_numpy(found.spread)
    count_C = torch.from_numpy(np.array(found.tokens, np.float32))
    for buffer, value in zip(out or (), (spread_CD, count_C), strict=False):
        buffer.copy_(value)
    if add_to is not None:
        _add_measured(found, *add_to)
    return spread_CD, count_C


def _add_measured(found: Measured, mean_CD: Tensor, total_C: Tensor, least: int) -> None:
    """Add the clusters with `least` tokens and a finite dispersion to the pending means."""
    number_C, spread_CD, used = np.array(found.tokens, np.float32), found.spread, found.known(least)
    if spread_CD.dtype != np.float32:  # float64: a number may be too large for the means
        with np.errstate(over="ignore"):
            spread_CD = spread_CD.astype(np.float32)
        finite: list[bool] = np.isfinite(spread_CD).all(axis=1).tolist()  # type: ignore[assignment]
        used = [one and fits for one, fits in zip(used, finite, strict=True)]
    _add(mean_CD, total_C, spread_CD, number_C, used)


def _measured(x_TD: Tensor, cluster_T: Tensor, num_clusters: int, measure: str) -> Measured:
    found = _dispersion(x_TD, cluster_T, num_clusters, measure)
    if found is not None:
        return found
    spread_CD, count_C = dispersion_and_count(x_TD, cluster_T, num_clusters, measure=measure)
    return Measured.of(spread_CD.numpy(), [int(number) for number in count_C.tolist()])


def _dispersion(
    x_TD: Tensor, cluster_T: Tensor, num_clusters: int, measure: str
) -> Measured | None:
    """Return the dispersion with the same bits as the definition in `reference`.

    Traced calls run the definition; tests hold that both give equal bits. Return None if the caller
    must run the definition: a token has no cluster, or holds NaN or inf.
    """
    cluster, dtype = cluster_T.numpy(), _NUMPY[x_TD.dtype]
    try:
        count = np.bincount(cluster, minlength=num_clusters)
    except (ValueError, MemoryError):  # a negative cluster, or a huge one
        return None
    if len(count) > num_clusters:
        return None
    # All ids are valid: "clip" spares numpy its check, which takes as long as the rest.
    one_hot = _identity(num_clusters, dtype).take(cluster, 1, mode="clip")
    one_hot_CT = torch.from_numpy(one_hot)
    number_C1 = np.maximum(count, 1).astype(dtype)[:, None]
    # The anchor of a cluster is its first token, see `reference.deviation`.
    anchor_CD = x_TD.index_select(0, torch.from_numpy(one_hot.argmax(1)))
    away_TD = anchor_CD.index_select(0, cluster_T)
    torch.sub(x_TD, away_TD, out=away_TD)
    mean_CD = torch.mm(one_hot_CT, away_TD)
    mean = mean_CD.numpy()
    mean /= number_C1
    # Each token minus the mean of its cluster, in one call: the product with a one-hot matrix is
    # exact, so that the bits are those of gathering means and subtracting them. Where torch may
    # round factors (`set_float32_matmul_precision`) the means are rounded as every product is. The
    # anchor is gathered, so that equal tokens have dispersion 0 there, too.
    away_TD.addmm_(one_hot_CT.T, mean_CD, alpha=-1)
    away_TD = away_TD.abs_() if measure == "mad" else away_TD.square_()
    spread = torch.mm(one_hot_CT, away_TD).numpy()
    spread /= number_C1
    if measure == "std":
        np.sqrt(spread, out=spread)
    found = Measured.of(spread, count.tolist())
    return found if all(found.known(0)) else None  # 0 * NaN is NaN: a bad token is in every sum


@functools.lru_cache(maxsize=8)
def _identity(size: int, dtype: type[np.floating[Any]]) -> Array:
    return np.eye(size, dtype=dtype)


def _scale(found: Measured, *, floor: float, eps: float, min_tokens: int) -> Tensor:
    """Return the scale (C, D) of each cluster by itself, as `scale_from_dispersion` computes it."""
    D = found.spread.shape[1]
    weight_CD = np.maximum(found.wide, np.maximum(found.mean * floor, _MIN_DISPERSION))
    if eps:
        weight_CD += eps
    informative = found.known(min_tokens, positive=eps == 0)
    if not all(informative):
        weight_CD[~np.array(informative)] = 1  # its weights become exactly 1
    np.reciprocal(weight_CD, out=weight_CD)
    total_C1 = np.add.reduce(weight_CD, 1, keepdims=True)
    total_C1 /= D
    weight_CD /= total_C1
    if floor < D * 1e-30:  # otherwise weights lie between floor / D and D
        np.minimum(np.maximum(weight_CD, _LEAST), _MOST, out=weight_CD)
    return torch.from_numpy(weight_CD.astype(found.spread.dtype))


@torch.no_grad()
def add_batch(mean_CX: Tensor, count_C: Tensor, new_CX: Tensor, new_C: Tensor, least: int) -> None:
    """Compute `pending.add_batch`."""
    new, number = new_CX.numpy(), new_C.numpy()
    used_C = (number >= least) & np.logical_and.reduce(np.isfinite(new), -1)
    _add(mean_CX, count_C, new, number, used_C.tolist())


def _add(
    mean_CX: Tensor, count_C: Tensor, new_CX: Array, number_C: Array, used: list[bool]
) -> None:
    """Merge the means `new_CX` of `number_C` tokens into `mean_CX`, for the clusters in use."""
    if not all(used):
        used_C = np.array(used)
        number_C = np.where(used_C, number_C, np.float32(0))
        new_CX = np.where(used_C[:, None], new_CX, mean_CX.numpy())
    total_C = count_C.numpy()  # the memory of the buffer
    total_C += number_C
    share_C = number_C / np.maximum(total_C, 1)
    if not count_C.is_inference():  # autograd does not see what numpy writes
        torch.autograd.graph.increment_version(count_C)
    new = torch.from_numpy(new_CX)
    new = new if new.dtype == mean_CX.dtype else new.to(mean_CX.dtype)
    mean_CX.lerp_(new, torch.from_numpy(share_C[:, None]))
