"""Windows, shifts and position biases, against attention over the whole map.

Shapes: B batch, Y rows and X columns of the map, D features, H heads.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_swin import Bias, merge_patches, pair_bias, table_bias, whole_map_attention
from torch import Tensor

from acmoe.models.images.patches import PatchEmbedding, PatchMerging
from acmoe.models.images.position_bias import NetworkBias, TableBias, log_offsets
from acmoe.models.images.window import WindowAttention
from acmoe.ops.map_attention.reference import (
    Tiling,
    join_windows,
    shift_mask,
    split_windows,
    tiling,
)

CPU = torch.device("cpu")


def attention(window: int, *, shifted: bool, position: str) -> WindowAttention:
    torch.manual_seed(0)
    module = WindowAttention(dim=6, heads=2, window=window, shifted=shifted, position=position)
    return module.double().requires_grad_(False)


def bias_of(module: WindowAttention) -> Bias:
    """The position bias of one offset, from the module's weights alone."""
    window = module.window
    if isinstance(module.position, TableBias):
        return table_bias(module.position.table, window)
    network = module.position
    assert isinstance(network, NetworkBias)

    def read(down: int, right: int) -> Tensor:
        units = [8 * offset / max(window - 1, 1) for offset in (down, right)]
        logs = [math.copysign(math.log2(abs(unit) + 1) / 3, unit) for unit in units]
        at = torch.tensor(logs, dtype=torch.float64)
        hidden = (network.up.weight @ at + network.up.bias).clamp(min=0)
        return network.down.weight @ hidden

    return read


@pytest.mark.parametrize("position", ["mlp", "table"])
@pytest.mark.parametrize(
    ("size", "window", "shifted"),
    [
        ((4, 4), 2, False),
        ((4, 4), 2, True),
        ((6, 9), 3, True),  # an odd side, an odd window: shifted by 1 of 3
        ((4, 8), 4, True),  # one side is a single window: shifted along the other alone
        ((3, 3), 7, True),  # smaller than a window: one window, no shift
        ((2, 10), 5, True),
        ((5, 5), 1, True),
    ],
    ids=str,
)
def test_it_is_attention_over_the_whole_map_restricted_to_pieces(
    size: tuple[int, int], window: int, shifted: bool, position: str, generator: torch.Generator
) -> None:
    module = attention(window, shifted=shifted, position=position)
    x_BYXD = torch.randn(2, *size, 6, generator=generator, dtype=torch.float64)
    shift = window // 2 if shifted else 0
    expected = whole_map_attention(
        x_BYXD,
        (module.qkv.weight, module.qkv.bias),
        (module.output.weight, module.output.bias),
        pair_bias(size, window, shift, 2, bias_of(module)),
    )
    # The offsets that the network reads are float32 numbers.
    tolerance = 1e-6 if position == "mlp" else 1e-12
    torch.testing.assert_close(module(x_BYXD), expected, rtol=tolerance, atol=tolerance)


@given(
    window=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    tiles=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    data=st.data(),
)
def test_joining_puts_every_token_back_where_it_was(
    window: tuple[int, int], tiles: tuple[int, int], data: st.DataObject
) -> None:
    shift = tuple(data.draw(st.integers(0, side - 1)) for side in window)
    cut = Tiling(window, (shift[0], shift[1]))
    size = (window[0] * tiles[0], window[1] * tiles[1])
    x_BYXD = torch.arange(2 * size[0] * size[1] * 3.0).view(2, *size, 3)
    split_BWND = split_windows(x_BYXD, cut)
    assert split_BWND.shape == (2, tiles[0] * tiles[1], window[0] * window[1], 3)
    assert torch.equal(join_windows(split_BWND, cut, size), x_BYXD)


def test_a_shift_is_half_a_window_and_off_where_one_window_holds_the_side() -> None:
    assert tiling(56, 56, 7, shifted=True) == ((7, 7), (3, 3))
    assert tiling(56, 56, 7, shifted=False) == ((7, 7), (0, 0))
    assert tiling(7, 14, 7, shifted=True) == ((7, 7), (0, 3))
    assert tiling(4, 7, 7, shifted=True) == ((4, 7), (0, 0))


def test_tokens_rolled_to_one_window_from_two_ends_do_not_see_each_other() -> None:
    # A row of 4 in windows of 2, rolled by 1: windows (1, 2) and (3, 0); 3 and 0 are strangers.
    mask_WNN = shift_mask(Tiling((1, 2), (0, 1)), (1, 4), CPU)
    assert mask_WNN is not None
    assert mask_WNN.tolist() == [[[True, True], [True, True]], [[True, False], [False, True]]]
    assert shift_mask(Tiling((1, 2), (0, 0)), (1, 4), CPU) is None


def test_offsets_are_log_spaced_and_odd() -> None:
    # Window 3: offsets -2..2 in steps of 4 units; log2(1 + 4) / 3 and log2(1 + 8) / 3.
    near, far = math.log2(5) / 3, math.log2(9) / 3
    line = [-far, -near, 0.0, near, far]
    expected = [[down, right] for down in line for right in line]
    torch.testing.assert_close(log_offsets(3), torch.tensor(expected))
    assert log_offsets(1).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("kind", [TableBias, NetworkBias])
def test_a_smaller_window_reads_the_same_bias_for_the_same_offset(
    kind: type[TableBias] | type[NetworkBias],
) -> None:
    torch.manual_seed(0)
    bias = kind(window=4, heads=3)
    full_HNN, small_HNN = bias(4, 4), bias(2, 3)
    rows = [0, 1, 2, 4, 5, 6]  # the 2 x 3 corner of the 4 x 4 window
    torch.testing.assert_close(full_HNN[:, rows][:, :, rows], small_HNN)


def test_position_parameters_are_counted_as_published() -> None:
    # 2 x 512 + 512 and 512 a head; (2 x 7 - 1)^2 a head.
    network, table = NetworkBias(window=7, heads=3), TableBias(window=7, heads=3)
    assert sum(p.numel() for p in network.parameters()) == 1536 + 512 * 3
    assert sum(p.numel() for p in table.parameters()) == 169 * 3


def test_patches_are_read_square_by_square(generator: torch.Generator) -> None:
    embed = PatchEmbedding(channels=2, dim=5, patch=3, norm=False)
    images = torch.randn(2, 2, 6, 9, generator=generator)
    found_BYXD = embed(images)
    assert found_BYXD.shape == (2, 2, 3, 5)
    square = images[1, :, 3:6, 6:9]
    expected_D = (embed.project.weight * square).sum((1, 2, 3)) + embed.project.bias
    torch.testing.assert_close(found_BYXD[1, 1, 2], expected_D)


def test_merging_reads_each_square_down_its_columns(generator: torch.Generator) -> None:
    merge = PatchMerging(3)
    x_BYXD = torch.randn(2, 4, 6, 3, generator=generator)
    expected = merge.reduction(merge.norm(merge_patches(x_BYXD)))
    assert torch.equal(merge(x_BYXD), expected)
    assert expected.shape == (2, 2, 3, 6)
