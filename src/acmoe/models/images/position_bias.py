"""Relative position bias of window attention: a term per head and offset between query and key.

Shapes: W tokens a side of a full window, O = (2W - 1)^2 offsets, H heads, N tokens of a window.
"""

import math
from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from acmoe.models.images.init import trunc_normal_
from acmoe.ops.embedding.op import embedding


class PositionBias(nn.Module):
    """One number per head and offset; smaller windows use the offsets that occur in them."""

    index: Tensor  # (W^2, W^2) constants

    def __init__(self, *, window: int, heads: int) -> None:
        super().__init__()
        self.window = window
        self.heads = heads
        self.register_buffer("index", offset_index(window), persistent=False)

    def reset_parameters(self) -> None:
        """Draw parameters anew, and compute the constants again."""
        self.reset_constants()

    def constants(self) -> dict[str, Tensor]:
        """Return the values of the buffers, by name; they are not part of a checkpoint."""
        with torch.device("cpu"):
            return {"index": offset_index(self.window)}

    def reset_constants(self) -> None:
        """Write the constants into the buffers."""
        for name, value in self.constants().items():
            self.get_buffer(name).copy_(value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the module, and compute the constants of each new buffer.

        A cast would round them for good, and `to_empty` leaves them undefined.
        """
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in self.constants().items():
            after = self.get_buffer(name)
            if after is not before[name]:
                setattr(self, name, value.to(after.device, after.dtype))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load the parameters; `assign=True` leaves constants of a meta model to be computed."""
        super()._load_from_state_dict(state_dict, prefix, *rest)
        device = next((v.device for key, v in state_dict.items() if key.startswith(prefix)), None)
        if self.index.is_meta and device is not None:
            for name, buffer in list(self.named_buffers(recurse=False)):
                setattr(self, name, torch.empty_like(buffer, device=device))
            self.reset_constants()

    def by_offset(self) -> Tensor:
        """Return the (O, H) biases; row offsets vary slowest; both run from -(W - 1) to W - 1."""
        raise NotImplementedError(f"{type(self).__name__} must define by_offset")

    def forward(self, rows: int, columns: int) -> Tensor:
        """Return the (H, N, N) bias of a window of rows x columns tokens."""
        side, tokens = self.window, rows * columns
        index_NN = self.index.view(side, side, side, side)[:rows, :columns, :rows, :columns]
        return embedding(index_NN.reshape(tokens, tokens), self.by_offset()).permute(2, 0, 1)


class TableBias(PositionBias):
    """Swin's bias: a learned number for every offset and head."""

    def __init__(self, *, window: int, heads: int) -> None:
        super().__init__(window=window, heads=heads)
        self.table = nn.Parameter(torch.empty((2 * window - 1) ** 2, heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        trunc_normal_(self.table, std=0.02)

    def by_offset(self) -> Tensor:
        return self.table


class NetworkBias(PositionBias):
    """Swin-MoE's bias: a small network of the offset, so that near offsets start out similar."""

    hidden = 512
    offsets: Tensor  # (O, 2) constants

    def __init__(self, *, window: int, heads: int) -> None:
        super().__init__(window=window, heads=heads)
        self.register_buffer("offsets", log_offsets(window), persistent=False)
        self.up = nn.Linear(2, self.hidden)
        self.down = nn.Linear(self.hidden, heads, bias=False)

    def constants(self) -> dict[str, Tensor]:
        with torch.device("cpu"):
            return super().constants() | {"offsets": log_offsets(self.window)}

    def by_offset(self) -> Tensor:
        offsets_O2 = self.offsets.to(self.up.weight.dtype)
        return cast(Tensor, self.down(nn.functional.relu(self.up(offsets_O2))))


POSITIONS: dict[str, type[PositionBias]] = {"mlp": NetworkBias, "table": TableBias}


def offset_index(window: int) -> Tensor:
    """Return (W^2, W^2): index of offset (query - key) among O, for tokens in row-major order."""
    y_N = torch.arange(window).repeat_interleave(window)
    x_N = torch.arange(window).repeat(window)
    down_NN = y_N[:, None] - y_N + window - 1
    right_NN = x_N[:, None] - x_N + window - 1
    return down_NN * (2 * window - 1) + right_NN


def log_offsets(window: int) -> Tensor:
    """Return (O, 2): offsets scaled to [-8, 8], as sign * log2(1 + |offset|) / 3; finest near 0."""
    reach = max(window - 1, 1)
    far_W = torch.arange(-(window - 1), window, dtype=torch.float32) * 8 / reach
    log_W = far_W.sign() * far_W.abs().log1p() / math.log(8)
    return torch.cartesian_prod(log_W, log_W)
