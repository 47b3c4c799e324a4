"""Powers and parts of the scale: the options `power` and `part` of `VariantConfig`."""

import torch
from torch import Tensor

from acmoe.ops.statistics.log_scale import split_log_scale
from acmoe.ops.statistics.scale import mean_one


def reshape_scale(
    scale: Tensor,
    occupied: Tensor,
    *,
    power: float | Tensor = 1.0,
    part: str = "both",
    normalize: str = "cluster",
) -> Tensor:
    """Return M^power, or one part of it, normalised to mean one; by default the scale itself.

    scale      (X, C, D) positive diagonals of M
    occupied   (X, C) True for clusters whose scale comes from their tokens
    power      a number, or a scalar on the device

    The normalisation cancels common factors, so M^p is s^-p normalised, and the product of the two
    parts of M is M up to such factors. With "common" all clusters have the same scale, also those
    that are not occupied; otherwise clusters that are not occupied keep a scale of one. A power of
    exactly 0 gives ones.
    """
    # A power in a tensor is not compared with 1: the host would have to wait for the device.
    if not isinstance(power, Tensor) and power == 1 and part == "both":
        return scale
    occupied_XC1 = occupied[..., None]
    # float64: the rounding of two logarithms is then far below that of the float32 result.
    scale_XCD = scale.double()
    if part == "both":
        log_XCD = scale_XCD.log()
    else:
        common_XD, log_XCD = split_log_scale(scale_XCD, occupied)
        if part == "common":
            log_XCD = common_XD[..., None, :].expand_as(scale_XCD)
            occupied_XC1 = torch.ones_like(occupied_XC1)
    return mean_one((power * log_XCD).exp(), occupied_XC1, normalize).to(scale.dtype)
