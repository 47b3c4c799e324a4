"""The rules for layers that no table names: what they choose, that it fits, and where they agree
with what was measured."""

import pytest
import torch

from acmoe.ops import device_support
from acmoe.ops.device.block_sizes import Blocks
from acmoe.ops.experts.settings import lookup, rules
from acmoe.ops.experts.settings.gemms import GEMMS, WEIGHT_GEMMS, PipelineConfig
from acmoe.ops.experts.settings.rules import Layer

SHARED = 227 * 1024  # bytes of a program on H100, H200 and B200
# Features, hidden units, experts, rows of an expert: published models, and sizes nobody would take.
LAYERS = [
    (2048, 1408, 64, 2048),
    (2880, 2880, 32, 2048),
    (2048, 512, 512, 512),
    (1536, 512, 40, 4096),
    (7168, 2048, 32, 4096),
    (5120, 8192, 16, 1024),
    (4096, 6400, 16, 2048),
    (6144, 16384, 8, 4096),
    (1000, 40, 3, 128),
    (48, 4096, 1, 65536),
    (2048, 1024, 64, 1),
    (33, 50, 7, 16),
]


def layer(dim, hidden, experts, rows, *, gated=True):
    return Layer(dim, hidden, experts, (1 + gated) * hidden, rows)


@pytest.mark.parametrize("sizes", LAYERS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("copied", [True, False])
def test_the_blocks_of_every_layer_fit_into_a_multiprocessor(sizes, gated, copied):
    """In shared memory the stages, in 255 registers of each thread the accumulators."""
    for kernel in GEMMS:
        one = rules.blocks(kernel, layer(*sizes, gated=gated), copied=copied)
        columns = one.n * 2 if kernel == "up" and gated else one.n
        programs = max(one.persistent, 1)
        assert programs * one.num_stages * (one.m + columns) * one.k * 2 <= SHARED
        sums = one.m * columns / (32 * one.num_warps)
        assert sums <= 128  # of 255 registers; the rest is addresses
        assert programs * 32 * one.num_warps * (sums + 127) <= 65536  # of a multiprocessor


@pytest.mark.parametrize("sizes", LAYERS)
def test_the_pipelines_of_every_layer_fit_into_a_multiprocessor(sizes):
    for kernel in ("hidden", "down", "input", *WEIGHT_GEMMS):
        one = rules.pipeline(kernel, layer(*sizes), copied=True)
        if one is None:
            continue
        stages = one.stages * (128 + one.columns) * 64 * 2
        out = 2 * 64 * 128 * 2
        if kernel == "hidden":  # gate and up of so many panels, and one of the results
            own = 2 if one.form == "cooperative" else 1
            out = own * (2 * one.buffers + 1) * 64 * 64 * 2
        assert stages + out <= SHARED


def test_the_rules_agree_with_what_was_measured():
    """At the four gated shapes of the table, but for buffers; exceptions are named."""
    missed = []
    for sizes in ((2048, 1024, 64), (2048, 768, 128), (1536, 256, 128), (4096, 14336, 8)):
        one = layer(*sizes, rows=4096)
        for backward in (False, True):
            measured = lookup.copies_rows(one, backward=backward)
            assert rules.copies(one, backward=backward) == measured
        copied = rules.copies(one, backward=True)
        for kernel in GEMMS:
            if rules.blocks(kernel, one, copied=copied)[:2] != lookup.blocks_for(kernel, one)[:2]:
                missed.append((kernel, sizes[1]))
            if kernel != "up":
                pipeline = lookup.pipeline_for(kernel, one)
                rule = rules.pipeline(kernel, one, copied=copied)
                if rule != pipeline and (rule and rule[:2]) != (pipeline and pipeline[:2]):
                    missed.append((f"pipeline_{kernel}", sizes[1]))
    assert missed == [
        ("pipeline_down", 14336),  # level
        ("down_weight", 14336),
        ("pipeline_input", 14336),  # level
    ]


@pytest.mark.parametrize(
    ("sizes", "kernel", "expected"),
    [
        # 2880 columns are 12 tiles of 256, 6.7% too many.
        ((2880, 2880, 32, 2048), "down", PipelineConfig("cooperative", 4)),
        ((2080, 2880, 32, 2048), "down", PipelineConfig("ping-pong", 6)),  # 9 tiles, 10.8% too many
        ((2048, 1408, 64, 2048), "down", PipelineConfig("cooperative", 4)),
        ((2880, 2880, 32, 2048), "hidden", PipelineConfig("ping-pong", 4, 4)),
        ((2880, 2880, 32, 256), "hidden", PipelineConfig("ping-pong", 5, 2)),
        ((2048, 1408, 64, 2048), "hidden", PipelineConfig("ping-pong", 5, 2)),
        ((2048, 1408, 64, 2048), "input", PipelineConfig("cooperative", 4)),
        ((4096, 6400, 16, 2048), "input", PipelineConfig("cooperative", 4)),
        ((4096, 6400, 16, 512), "input", None),  # 12,800 are many to sum over with so few rows
        ((6144, 16384, 8, 512), "hidden", PipelineConfig("cooperative", 3, 2)),
        ((6144, 16384, 8, 4096), "hidden", PipelineConfig("ping-pong", 4, 4)),
        ((4096, 6400, 16, 256), "hidden", PipelineConfig("ping-pong", 5, 2)),
        ((2048, 512, 512, 512), "down", PipelineConfig("cooperative", 4)),
        ((2048, 512, 512, 512), "up_weight", PipelineConfig("cooperative", 4, gathers=True)),
        # 2,048 rows are many: 3 stages. 5,760 columns are many: the copy pays.
        ((2048, 1408, 64, 2048), "up_weight", PipelineConfig("cooperative", 3, gathers=True)),
        ((2880, 2880, 32, 2048), "up_weight", PipelineConfig("cooperative", 4)),
        ((6144, 16384, 8, 4096), "input", PipelineConfig("cooperative", 4)),
        ((6144, 16384, 8, 512), "input", None),
        ((2048, 1408, 64, 64), "down", PipelineConfig("cooperative", 4)),
        ((2048, 1408, 64, 128), "down", PipelineConfig("columns", 4)),
        ((6144, 16384, 8, 128), "down", PipelineConfig("columns", 4)),
        ((4096, 14336, 8, 128), "down", PipelineConfig("columns", 4)),  # not the table's
        ((4096, 14336, 8, 256), "down", None),  # the table's
        (
            (1536, 256, 128, 128),
            "down",
            PipelineConfig("cooperative", 4),
        ),  # 256 are few to sum over
        ((640, 8192, 16, 128), "down", None),  # 3 tiles of 256 columns would be 20% too many
        ((6144, 16384, 8, 64), "hidden", PipelineConfig("ping-pong", 5, 2)),  # half a tile of rows
        (
            (6144, 320, 8, 512),
            "hidden",
            PipelineConfig("ping-pong", 5, 2),
        ),  # half a tile of columns
        ((2048, 1408, 64, 256), "down", PipelineConfig("cooperative", 4)),
        ((2048, 1408, 64, 32), "down", None),  # a tile of 128 rows would be padding
    ],
)
def test_which_pipeline_a_layer_gets(sizes, kernel, expected):
    assert lookup.pipeline_for(kernel, layer(*sizes)) == expected


@pytest.mark.parametrize(
    ("sizes", "kernel", "expected"),
    [
        ((2048, 1408, 64, 2048), "up", Blocks(128, 128, 64, 8, 4, True, 0, 1)),
        ((2048, 1408, 64, 2048), "input", Blocks(128, 256, 64, 8, 4, True, 0, 1)),
        ((2048, 1408, 64, 2048), "hidden", Blocks(128, 128, 64, 4, 3, True, 0, 2)),  # 9% padding
        ((2048, 1408, 64, 2048), "down_weight", Blocks(256, 128, 32, 8, 4, True, 1, 1)),
        ((2048, 1024, 64, 64), "up", Blocks(64, 64, 64, 4, 4, True, 0, 2)),  # not the table's
        ((32, 1024, 64, 2048), "up", Blocks(16, 32, 32, 4, 2)),
    ],
)
def test_which_blocks_a_layer_gets(sizes, kernel, expected):
    assert lookup.blocks_for(kernel, layer(*sizes)) == expected


def test_wide_numbers_and_smaller_cards_get_small_tiles_without_tma(monkeypatch):
    one = layer(2048, 1408, 64, 2048)
    single = one._replace(dtype=torch.float32)
    assert lookup.blocks_for("up", single) == Blocks(64, 64, 32, 4, 2)
    monkeypatch.setattr(device_support, "has_large_shared_memory", lambda: False)
    assert lookup.blocks_for("up", one) == Blocks(128, 128, 64, 8, 3)


@pytest.mark.parametrize("kernel", ["up", "down", "hidden", "input"])
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64])
def test_tiles_of_few_rows_hold_an_average_expert_and_fit_on_every_card(kernel, rows, monkeypatch):
    """99 KiB of shared memory a program are the least that a card has (L40, RTX 40 and 50)."""
    few = layer(2048, 1024, 64, rows)
    assert rows <= lookup.blocks_for(kernel, few).m <= max(16, 2 * rows)
    assert rules.copies(few._replace(width=8192), backward=False) == (rows == 64)
    monkeypatch.setattr(device_support, "has_large_shared_memory", lambda: False)
    one = lookup.blocks_for(kernel, few)
    columns = one.n * (2 if kernel == "up" else 1)
    assert one.num_stages * (one.m + columns) * one.k * 2 <= 99 * 1024
    assert (one.tma, one.persistent) == (False, 0)


@pytest.mark.parametrize(
    ("tokens", "rows"), [(1, 1), (8, 1), (9, 2), (64, 8), (65, 16), (32768, 4096)]
)
def test_batches_of_nearly_one_size_share_their_settings(tokens, rows):
    """8 of 64 experts a token: tokens / 8 rows, rounded up, then to a power of two."""
    from acmoe.ops.experts.triton.sizes import Sizes

    size = Sizes(tokens, 2048, 1024, 64, 8, "swiglu")
    assert size.layer(torch.bfloat16) == Layer(2048, 1024, 64, 2048, rows)
