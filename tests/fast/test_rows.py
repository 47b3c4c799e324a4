"""Copies of rows, in words or number by number: the same bits."""

import pytest
import torch

from acmoe.fast.rows import copy_rows


@pytest.mark.parametrize("features", [16, 12, 3])  # a word is 8 numbers
@pytest.mark.parametrize("gaps", ["kept", "new", "both", "none"])
def test_rows_are_copied_bit_for_bit_and_nothing_beside_them(features: int, gaps: str) -> None:
    # Among them a NaN of another payload, which no arithmetic would hand on.
    bits = torch.arange(2 * 5 * features, dtype=torch.int16).view(2, 5, features)
    bits[:, 2] = 0x7FC1
    buffer = torch.full((2, 6, features), -1, dtype=torch.int16)
    kept = buffer[:, 1:4] if gaps in ("kept", "both") else torch.empty(2, 3, features).short()
    new = bits[:, 1:4] if gaps in ("new", "both") else bits[:, 1:4].contiguous()
    copy_rows(kept.view(torch.bfloat16), new.view(torch.bfloat16))
    assert torch.equal(kept, bits[:, 1:4])
    assert (buffer[:, 0] == -1).all() and (buffer[:, 4:] == -1).all()


def test_another_precision_is_rounded_on_the_way() -> None:
    buffer = torch.zeros(2, 5, 8, dtype=torch.bfloat16)
    new = torch.full((2, 3, 8), 1 + 2**-10)
    copy_rows(buffer[:, 2:], new)
    assert (buffer[:, 2:] == 1).all() and (buffer[:, :2] == 0).all()
