"""Parts added up: each sum apart, parts and columns no multiples of a block."""

import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("sums", "parts", "numbers"), [(1, 1, 1), (2, 0, 5), (1, 48, 70), (2, 300, 17), (1, 2050, 9)]
)
def test_every_part_counts_once(
    sums: int, parts: int, numbers: int, generator: torch.Generator, device: str
) -> None:
    from acmoe.ops.device.reduce_partials import reduce_partials

    partial = torch.randn(sums, parts, numbers, generator=generator).to(device)
    found = reduce_partials(partial)
    assert len({total.data_ptr() for total in found}) == sums
    for total, wanted in zip(found, partial.double().sum(1), strict=True):
        # Float32 additions of numbers of about one.
        assert (total - wanted).abs().max() < 1e-4 * max(1, parts / 300)
        assert total.shape == (numbers,)


def test_equal_parts_give_equal_bits(generator: torch.Generator, device: str) -> None:
    from acmoe.ops.device.reduce_partials import reduce_partials

    partial = torch.randn(1, 200, 40, generator=generator).to(device)
    assert torch.equal(reduce_partials(partial)[0], reduce_partials(partial)[0])
