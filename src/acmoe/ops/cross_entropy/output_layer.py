"""The GEMMs of an output layer and its bias, with operands of any dtype.

The bias is part of the GEMMs, as columns that multiply ones: x' = [x, 1, 1, 0...] and
W' = [W, high, low, 0...], where high + low is the bias to twice the precision of the GEMM's dtype.
Its gradient is then a column of the weight's gradient, and neither costs a pass over the logits.

Shapes: T tokens, D features, A = D + 8 features with the bias, V words (padded on a GPU), N tokens
of one chunk.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.ops.device_support import on_nvidia
from acmoe.ops.statistics.dispersion import accumulation_dtype

_BIAS_COLUMNS = 8  # two hold the bias; eight keep rows aligned for tensor cores
_WORDS_MULTIPLE = 64  # rows of logits begin on 128 bytes; with 267,735 words they would not


def with_bias(weight_VD: Tensor, bias_V: Tensor | None, gemm_dtype: torch.dtype) -> Tensor:
    """Return (V, A) weight and bias; padding words get bias -inf, so probability 0."""
    words, features = weight_VD.shape
    filled = words + (-words % _WORDS_MULTIPLE if weight_VD.is_cuda else 0)
    joined_VA = weight_VD.new_zeros(filled, features + _BIAS_COLUMNS, dtype=gemm_dtype)
    joined_VA[:words, :features] = weight_VD
    joined_VA[words:, features] = -math.inf
    if bias_V is not None:
        high_V = bias_V.to(gemm_dtype)
        joined_VA[:words, features] = high_V
        joined_VA[:words, features + 1] = bias_V - high_V.to(bias_V.dtype)
    return joined_VA


def with_ones(x_TD: Tensor, gemm_dtype: torch.dtype) -> Tensor:
    """Return (T, A): hidden states, and the ones that multiply the bias."""
    joined_TA = F.pad(x_TD.to(gemm_dtype), (0, _BIAS_COLUMNS))
    joined_TA[:, x_TD.shape[1] : x_TD.shape[1] + 2] = 1.0
    return joined_TA


def logits_of(x_NA: Tensor, weight_VA: Tensor) -> Tensor:
    """Return (N, V) logits; on a GPU float32 even for 16-bit operands, as the GEMM accumulates."""
    wide = accumulation_dtype(x_NA.dtype)
    if x_NA.dtype != wide and on_nvidia(x_NA.device):
        return torch.mm(x_NA, weight_VA.T, out_dtype=wide)
    return x_NA @ weight_VA.T


def log_probabilities(x_NA: Tensor, weight_VA: Tensor) -> Tensor:
    """Return (N, V) log probabilities in the accumulation dtype."""
    return logits_of(x_NA, weight_VA).log_softmax(1, dtype=accumulation_dtype(x_NA.dtype))


def add_gemm(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, accumulated in total's dtype, whatever the factors' dtype."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif on_nvidia(total.device):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
