"""Experts of odd widths, padded with zeros to widths that the kernels load in 16 bytes at a time.

Where a row's length is no multiple of 16 elements, the compiler cannot know that rows begin at
multiples of 16 bytes: it loads single elements, and TMA needs rows of a multiple of 16 bytes. The
copy of the weights costs as much as a GEMM of a few rows, so that it pays with many.

Zeros change no result: a padded hidden unit is act(0) = 0 for all activations, and autograd cuts
the padding off the gradients.

T tokens, D features, F hidden units, W = F (or 2F for swiglu), E experts.
"""

from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.ops.experts.reference import ExpertWeights

MULTIPLE = 16
# Rows of an average expert from which padding pays: copying |w| weights takes |w| * 1e-12 seconds
# (4 TB/s, read and written), and a GEMM of R rows saves |w| * R * 1.6e-14 if it runs at 500 instead
# of 100 TFLOP/s. An estimate, not measured.
FEWEST_ROWS = 64


def worth_padding(weights: ExpertWeights, num_rows: int) -> bool:
    """Return True if experts of these weights should be padded for so many rows."""
    experts, dim, hidden = weights.down.shape
    return bool(dim % MULTIPLE or hidden % MULTIPLE) and num_rows > FEWEST_ROWS * experts


def pad_experts(x_TD: Tensor, weights: ExpertWeights) -> tuple[Tensor, ExpertWeights]:
    """Return tokens and weights with D and F padded to multiples of 16; gate and up each by F."""
    experts, dim, hidden = weights.down.shape
    parts = weights.up.shape[1] // hidden
    more_dim, more_hidden = -dim % MULTIPLE, -hidden % MULTIPLE
    up = weights.up.reshape(experts, parts, hidden, dim)
    up = F.pad(up, (0, more_dim, 0, more_hidden)).flatten(1, 2)
    down = F.pad(weights.down, (0, more_hidden, 0, more_dim))
    up_bias, down_bias = weights.up_bias, weights.down_bias
    if up_bias is not None:
        up_bias = F.pad(up_bias.reshape(experts, parts, hidden), (0, more_hidden)).flatten(1)
    if down_bias is not None:
        down_bias = F.pad(down_bias, (0, more_dim))
    return F.pad(x_TD, (0, more_dim)), ExpertWeights(up, down, up_bias, down_bias)
