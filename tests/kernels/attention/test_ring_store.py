"""The kernel that stores a decode step's key and value, by hand.

Shapes: B batch, H heads, N places of a ring, P features of a head, W of a stored head.
"""

import math

import pytest
import torch
from torch import Tensor

from acmoe.ops.attention.ring import store_in_ring
from acmoe.ops.attention.rotary import rotation
from acmoe.ops.dispatch import use_backend

pytest.importorskip("triton")


def stored(
    *, rotate: bool, place: int, device: str, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Query (1, 2, 1, 8), keys and values (1, 2, 4, 8) after one call, for heads of 4 features.

    The features of q, k and v count from 1, 11 and 21 in the first head, 101 and on in the second.
    """
    one_P = torch.arange(1.0, 5.0)
    heads_HP = torch.stack([one_P, one_P + 100])
    new = [
        (heads_HP + offset).reshape(1, 1, 8).to(device, dtype).view(1, 1, 2, 4).transpose(1, 2)
        for offset in (0, 10, 20)
    ]
    keys, values = (torch.zeros(1, 2, 4, 8, dtype=dtype, device=device) for _ in range(2))
    turns = rotation(torch.tensor([3.0], device=device), 4) if rotate else None
    at = torch.tensor([place], device=device)
    with use_backend("triton"):
        found = store_in_ring(*new, keys, values, at, turns, 0.5)
    return found.cpu(), keys.cpu(), values.cpu()


@pytest.mark.parametrize("place", [0, 3])
def test_one_place_of_each_ring_is_written(place: int, device: str) -> None:
    query, keys, values = stored(rotate=False, place=place, device=device)
    nothing = [0.0] * 4
    assert query[0, :, 0].tolist() == [
        [0.5, 1.0, 1.5, 2.0, *nothing],
        [50.5, 51.0, 51.5, 52.0, *nothing],
    ]
    assert keys[0, :, place].tolist() == [
        [11.0, 12.0, 13.0, 14.0, *nothing],
        [111.0, 112.0, 113.0, 114.0, *nothing],
    ]
    assert values[0, :, place].tolist() == [
        [21.0, 22.0, 23.0, 24.0, *nothing],
        [121.0, 122.0, 123.0, 124.0, *nothing],
    ]
    others = [n for n in range(4) if n != place]
    assert not keys[0, :, others].any() and not values[0, :, others].any()


def test_pairs_of_query_and_key_are_turned_and_values_are_not(device: str) -> None:
    """At position 3 features 0 and 2 turn by 3 radians, 1 and 3 by 3 * 10,000^(-1/2) = 0.03."""
    query, keys, values = stored(rotate=True, place=1, device=device)

    def turned(a: float, b: float, angle: float) -> tuple[float, float]:
        cos, sin = math.cos(angle), math.sin(angle)
        return a * cos - b * sin, a * sin + b * cos

    for found, first, factor in ((query[0, 0, 0], 1.0, 0.5), (keys[0, 0, 1], 11.0, 1.0)):
        (p0, p2), (p1, p3) = turned(first, first + 2, 3.0), turned(first + 1, first + 3, 0.03)
        wanted = [factor * p for p in (p0, p1, p2, p3)] + [0.0] * 4
        torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-5, atol=1e-5)
    assert values[0, 0, 1].tolist() == [21.0, 22.0, 23.0, 24.0, 0.0, 0.0, 0.0, 0.0]


def test_a_call_that_records_gradients_gets_the_definition() -> None:
    new = [torch.ones(1, 1, 1, 4, requires_grad=True) for _ in range(3)]
    rings = [torch.zeros(1, 1, 2, 4) for _ in range(2)]
    reasons = store_in_ring.reasons(*new, *rings, torch.tensor([0]), None, 1.0)
    assert reasons["triton"] == "its kernel has no gradient"
    with torch.no_grad():
        reasons = store_in_ring.reasons(*new, *rings, torch.tensor([0]), None, 1.0)
    assert reasons["triton"] != "its kernel has no gradient"
