"""A sum of losses on the host, which seldom waits for the device."""

import math

import torch
from torch import Tensor

_PENDING = 256  # values that stay on the device before one copy to the host


class HostSum:
    """A sum of weighted scalars of a device in Python's float64; the device may lack that type.

    The host waits for the device once in a few hundred values. `first_bad` is the number, from 1,
    of the first value that is NaN or infinite; it is known after `total`.
    """

    def __init__(self) -> None:
        self._total = 0.0
        self._read_values = 0
        self.first_bad: int | None = None
        self._pending: list[Tensor] = []
        self._weights: list[int] = []

    def add(self, value: Tensor, weight: int = 1) -> None:
        """Add weight times a () value."""
        self._pending.append(value.detach())
        self._weights.append(weight)
        if len(self._pending) == _PENDING:
            self._read()

    def total(self) -> float:
        self._read()
        return self._total

    def _read(self) -> None:
        values = torch.stack(self._pending).tolist() if self._pending else []
        for value, weight in zip(values, self._weights, strict=True):
            self._total += value * weight
            self._read_values += 1
            if self.first_bad is None and not math.isfinite(value):
                self.first_bad = self._read_values
        self._pending, self._weights = [], []
