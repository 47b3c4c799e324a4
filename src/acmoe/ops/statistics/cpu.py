"""Cluster statistics on a CPU, in few calls.

At the sizes of small models a call costs more than its arithmetic: 8 to 15 us for one of torch
between others (Neoverse-N1), 1 to 3 us for one of numpy. So tensors of all tokens are torch's,
which uses every core, and those of clusters alone numpy's.

T tokens, D features, C clusters, X statistics of each cluster.
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from acmoe.ops.checks import host_may_read
from acmoe.ops.statistics.dispersion import dispersion_and_count

if TYPE_CHECKING:
    from acmoe.ops.statistics.op import ScaleOptions

MEASURES = ("mad", "variance", "std")
_MIN_DISPERSION = 1e-290  # as in scale.py: sums of reciprocals do not overflow
# float32's normal range
_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def unsupported(*tensors: Tensor) -> str | None:
    """Return the reason why these functions cannot read the tensors, or None."""
    if any(one.device.type != "cpu" for one in tensors):
        return "it is for CPUs"
    if any(one.dtype not in (torch.float32, torch.float64) for one in tensors):
        return "it takes float32 and float64"
    if not all(host_may_read(one) for one in tensors):
        return "it is traced, or there are no tokens"
    return "under autocast its GEMMs would be narrow" if torch.is_autocast_enabled("cpu") else None


@torch.no_grad()
def measured_dispersion(
    x_TD: Tensor,
    cluster_T: Tensor,
    num_clusters: int,
    *,
    measure: str,
    out: tuple[Tensor, Tensor] | None = None,
    **_unused: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the op `measure_dispersion` of tokens without a mask."""
    found = _dispersion(x_TD, cluster_T, num_clusters, measure)
    if found is None:
        found = dispersion_and_count(x_TD, cluster_T, num_clusters, measure=measure)
    for buffer, value in zip(out or (), found, strict=False):
        buffer.copy_(value)
    return found


@torch.no_grad()
def measured_scale(
    x_TD: Tensor,
    cluster_T: Tensor,
    num_clusters: int,
    options: "ScaleOptions",
    *,
    measure: str,
    out: tuple[Tensor, Tensor] | None = None,
    **_unused: Any,
) -> Tensor:
    """Compute the op `measure_scale` of tokens without a mask, each cluster by itself."""
    found = measured_dispersion(x_TD, cluster_T, num_clusters, measure=measure, out=out)
    floor, eps, least = options.floor, options.eps, options.min_tokens
    return _scale(*found, floor=floor, eps=eps, min_tokens=least)


def _dispersion(
    x_TD: Tensor, cluster_T: Tensor, num_clusters: int, measure: str
) -> tuple[Tensor, Tensor] | None:
    """Return dispersion (C, D) and float32 count (C,), as `reference` computes them.

    Return None where the definition has to serve: a token has no cluster, or holds NaN or inf.
    """
    least, most = torch.aminmax(cluster_T)
    if least.item() < 0 or most.item() >= num_clusters:
        return None
    one_hot_CT = (torch.arange(num_clusters).unsqueeze(1) == cluster_T).to(x_TD.dtype)
    count_C1 = one_hot_CT.sum(1, keepdim=True)
    number_C1 = count_C1.clamp(min=1)
    anchor_CD = x_TD.index_select(0, one_hot_CT.max(1).indices)  # see `reference.deviation`
    away_TD = x_TD - anchor_CD.index_select(0, cluster_T)
    mean_CD = torch.mm(one_hot_CT, away_TD).div_(number_C1)
    away_TD.sub_(mean_CD.index_select(0, cluster_T))
    away_TD = away_TD.abs_() if measure == "mad" else away_TD.square_()
    spread_CD = torch.mm(one_hot_CT, away_TD).div_(number_C1)
    if not math.isfinite(spread_CD.sum().item()):  # 0 * NaN is NaN: a bad token is in every sum
        return None
    return spread_CD.sqrt_() if measure == "std" else spread_CD, count_C1.view(-1).float()


def _scale(
    spread_CD: Tensor, count_C: Tensor, *, floor: float, eps: float, min_tokens: int
) -> Tensor:
    """Return the scale (C, D) of each cluster by itself, as `scale_from_dispersion` computes it."""
    D = spread_CD.shape[1]
    with np.errstate(all="ignore"):  # rows of uninformative clusters, overwritten below
        given_CD = spread_CD.numpy()
        s_CD = given_CD.astype(np.float64)
        # Ufuncs: numpy's `mean`, `clip` and `all` take 5 to 10 us before they begin.
        mean_C1 = np.add.reduce(s_CD, -1, keepdims=True) / D
        informative_C1 = (count_C.numpy()[:, None] >= min_tokens) & (mean_C1 < math.inf)
        if eps == 0:
            informative_C1 &= mean_C1 > 0
        np.maximum(s_CD, floor * mean_C1, out=s_CD)
        weight_CD = 1 / np.maximum(s_CD + eps, _MIN_DISPERSION)
        weight_CD /= np.add.reduce(weight_CD, -1, keepdims=True) / D
        np.minimum(np.maximum(weight_CD, _LEAST), _MOST, out=weight_CD)
        weight_CD = np.where(informative_C1, weight_CD, 1.0)
    return torch.from_numpy(weight_CD.astype(given_CD.dtype))


@torch.no_grad()
def add_batch(mean_CX: Tensor, count_C: Tensor, new_CX: Tensor, new_C: Tensor, least: int) -> None:
    """Compute `pending.add_batch`."""
    new, number = new_CX.numpy(), new_C.numpy()
    used_C = (number >= least) & np.logical_and.reduce(np.isfinite(new), -1)
    added_C = np.where(used_C, number, np.float32(0))
    total_C = count_C.numpy() + added_C
    share_C1 = (added_C / np.maximum(total_C, 1))[:, None]
    value_CX = new_CX
    if not used_C.all():
        value_CX = torch.from_numpy(np.where(used_C[:, None], new, mean_CX.numpy()))
    # torch writes, so that autograd sees that the buffers have changed.
    count_C.add_(torch.from_numpy(added_C))
    mean_CX.lerp_(value_CX, torch.from_numpy(share_C1))
