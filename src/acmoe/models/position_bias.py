"""What attention inside a window adds to a score for the offset between query and key.

Shapes: W tokens a side of a full window, O = (2W - 1)^2 offsets, H heads, N tokens of a window.
"""

import math
from typing import cast

import torch
from torch import Tensor, nn


class PositionBias(nn.Module):
    """One number for each head and offset; smaller windows use the offsets that occur in them."""

    def __init__(self, *, window: int, heads: int) -> None:
        super().__init__()
        self.window = window
        self.heads = heads

    def by_offset(self) -> Tensor:
        """(O, H), row offsets slow, column offsets fast, both from -(W - 1) to W - 1."""
        raise NotImplementedError(f"{type(self).__name__} must define by_offset")

    def forward(self, rows: int, columns: int) -> Tensor:
        """(H, N, N) for a window of rows x columns tokens."""
        bias_OH = self.by_offset()
        index_NN = offset_index(rows, columns, self.window, bias_OH.device)
        return bias_OH[index_NN].permute(2, 0, 1)


class TableBias(PositionBias):
    """Swin's: every offset learns its own numbers."""

    def __init__(self, *, window: int, heads: int) -> None:
        super().__init__(window=window, heads=heads)
        self.table = nn.Parameter(torch.empty((2 * window - 1) ** 2, heads))
        nn.init.trunc_normal_(self.table, std=0.02)

    def by_offset(self) -> Tensor:
        return self.table


class NetworkBias(PositionBias):
    """Swin-MoE's: a small network reads the offset, so that near offsets start out alike."""

    hidden = 512

    def __init__(self, *, window: int, heads: int) -> None:
        super().__init__(window=window, heads=heads)
        self.up = nn.Linear(2, self.hidden)
        self.down = nn.Linear(self.hidden, heads, bias=False)

    def by_offset(self) -> Tensor:
        weight = self.up.weight
        offsets_O2 = log_offsets(self.window, weight.device).to(weight.dtype)
        return cast(Tensor, self.down(nn.functional.relu(self.up(offsets_O2))))


POSITIONS: dict[str, type[PositionBias]] = {"mlp": NetworkBias, "table": TableBias}


def offset_index(rows: int, columns: int, window: int, device: torch.device) -> Tensor:
    """(N, N) the place of (query - key) among the O offsets, for tokens counted row by row."""
    y_N = torch.arange(rows, device=device).repeat_interleave(columns)
    x_N = torch.arange(columns, device=device).repeat(rows)
    down_NN = y_N[:, None] - y_N + window - 1
    right_NN = x_N[:, None] - x_N + window - 1
    return down_NN * (2 * window - 1) + right_NN


def log_offsets(window: int, device: torch.device) -> Tensor:
    """(O, 2) offsets in [-8, 8], as sign * log2(1 + |offset|) / 3: near ones are told apart best.

    In float32, whatever the model runs in: they are constants, not activations.
    """
    reach = max(window - 1, 1)
    far_W = torch.arange(-(window - 1), window, device=device, dtype=torch.float32) * 8 / reach
    log_W = far_W.sign() * far_W.abs().log1p() / math.log(8)
    return torch.cartesian_prod(log_W, log_W)
