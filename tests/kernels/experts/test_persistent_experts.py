"""Expert products by few programs, each of many tiles, against a program for each tile.

Without a GPU a launch has three programs at most, so that each of them takes several tiles.
"""

import pytest
import torch
from expert_cases import KERNELS, Layer, close

from acmoe.ops.device.block_sizes import Blocks
from slow_cases import mostly_slow

ONE_A_TILE = Blocks(16, 32, 32, 4, 2, True, 1)
# Activation, (tokens, features, hidden units, experts, experts per token), whether rows are copied,
# whether all go to one expert; else one expert has none, and two tokens have no expert.
CASES = [
    ("swiglu", (28, 48, 40, 4, 2), False, False),
    ("swiglu", (21, 32, 36, 3, 2), True, False),
    ("relu", (27, 24, 40, 3, 2), False, True),
    pytest.param("gelu", (19, 36, 20, 3, 1), True, True, marks=pytest.mark.slow),
    ("swiglu", (3, 16, 16, 1, 1), False, False),  # fewer tiles than programs
]
# Slices of `Layer.gradients`: tokens and gate; then the first weight and the second.
ROW_GEMMS, WEIGHT_GEMMS = slice(0, 2), slice(2, 4)


def results(layer, blocks, monkeypatch):
    """Output and gradients by all six products with these blocks."""
    from acmoe.ops.experts.settings import lookup

    monkeypatch.setattr(lookup, "OVERRIDE", dict.fromkeys(KERNELS, blocks))
    out = layer.fused()
    return out, layer.gradients(out)


@mostly_slow(("activation", "sizes", "copied", "one_expert"), CASES, keep=(2, 4))
def test_few_programs_compute_what_one_a_tile_does(
    activation, sizes, copied, one_expert, device, monkeypatch
):
    """Products by rows sum in the same order; weights take an expert's odd rows first, not last."""
    from acmoe.ops.experts.settings import lookup

    if copied:
        monkeypatch.setattr(lookup, "COPY_OVERRIDE", [True, True])
    layer = Layer(activation, True, sizes, device, one_expert=one_expert)
    out, right = results(layer, ONE_A_TILE, monkeypatch)
    found, mine = results(layer, ONE_A_TILE._replace(persistent=1), monkeypatch)
    assert torch.equal(found, out)
    for one, other in zip(mine[ROW_GEMMS], right[ROW_GEMMS], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(mine[WEIGHT_GEMMS], right[WEIGHT_GEMMS], strict=True):
        close(one, other)


def test_few_programs_sum_an_expert_s_rows_in_parts(device, monkeypatch):
    """Some of the three parts have no rows, some fewer than a block, some several blocks."""
    layer = Layer("relu", True, (45, 20, 24, 3, 2), device)
    few = ONE_A_TILE._replace(n=16, k=16, splits=3, persistent=2)
    _, found = results(layer, few, monkeypatch)
    right = layer.gradients(layer.reference())
    for mine, wanted in zip(found, right, strict=True):
        close(mine, wanted)


@mostly_slow("gather", ["none", "p", "q"], keep=(1,))
def test_what_an_expert_does_not_own_never_enters_its_sums(gather, device, monkeypatch):
    """Rows for no expert are never written: here they, and a token they alone name, are NaN."""
    from acmoe.ops.experts.settings import lookup
    from acmoe.ops.experts.triton.launch import run_weight
    from acmoe.ops.experts.triton.sizes import Sizes
    from acmoe.ops.experts.triton.tiles import Plan

    blocks = Blocks(16, 16, 16, 4, 2, True, 1, 1)
    monkeypatch.setattr(lookup, "OVERRIDE", {"down_weight": blocks})
    torch.manual_seed(0)
    # Experts of 5 rows (no whole block), none, 16 (one) and 35 (two and an odd one); 4 for nobody.
    end = torch.tensor([5, 5, 21, 56], device=device)
    order = torch.randint(1, 30, (60,), device=device)
    order[56:] = 0
    plan = Plan(order, end, 1)
    p, q = torch.randn(60, 32, device=device), torch.randn(60, 16, device=device)
    p[56:] = q[56:] = torch.nan
    sources = {"p": p, "q": q}
    if gather in sources:
        sources[gather] = torch.randn(30, sources[gather].shape[1], device=device)
        sources[gather][0] = torch.nan
    size = Sizes(60, 32, 16, 4, 1, "relu")
    found = run_weight("down_weight", sources["p"], sources["q"], plan, size, gather=gather)
    by_row = {
        name: (value[order] if name == gather else value).double()
        for name, value in sources.items()
    }
    for expert, (begin, stop) in enumerate([(0, 5), (5, 5), (5, 21), (21, 56)]):
        right = by_row["p"][begin:stop].T @ by_row["q"][begin:stop]
        close(found[expert], right.float())


def test_a_plan_counts_the_tiles_of_experts(device):
    from acmoe.ops.experts.triton.tiles import HEIGHTS, Plan

    # Experts of 0, 5, 0, 32 and 3 rows; 7 rows for no expert.
    end = torch.tensor([0, 5, 5, 37, 40], device=device)
    plan = Plan(torch.arange(47, device=device), end, 1)
    assert [plan.num_used(height).item() for height in HEIGHTS] == [4, 3, 3, 3, 3]


def test_rows_the_copy_engine_cannot_read_have_a_program_a_tile(device, monkeypatch):
    """Rows of 33 float32 numbers are no multiple of 16 bytes."""
    layer = Layer("gelu", True, (12, 33, 24, 3, 1), device)
    _, right = results(layer, ONE_A_TILE, monkeypatch)
    _, found = results(layer, ONE_A_TILE._replace(persistent=1), monkeypatch)
    assert all(torch.equal(mine, wanted) for mine, wanted in zip(found, right, strict=True))


def test_the_copy_engine_reads_views_that_begin_anywhere(device, monkeypatch):
    """It wants multiples of 16 bytes; a view of a flat buffer may begin one number further."""

    def beside(tensor):
        flat = torch.empty(tensor.numel() + 1, device=device)
        return flat[1:].view(tensor.shape).copy_(tensor.detach())

    layer = Layer("swiglu", True, (12, 16, 16, 3, 2), device)
    _, right = results(layer, ONE_A_TILE, monkeypatch)
    layer.x = beside(layer.x).requires_grad_()
    for name, parameter in layer.mlp.named_parameters():
        setattr(layer.mlp, name, torch.nn.Parameter(beside(parameter)))
    assert layer.mlp.up.data_ptr() % 16 == 4
    for blocks in (ONE_A_TILE, ONE_A_TILE._replace(persistent=1)):
        _, found = results(layer, blocks, monkeypatch)
        assert torch.equal(found[0], right[0]) and torch.equal(found[1], right[1])


def test_a_gated_product_has_room_and_warps_for_two_accumulators(monkeypatch):
    """A table of block sizes knows no activation: four warps were measured for GELU."""
    from acmoe.ops.experts.settings import lookup
    from acmoe.ops.experts.triton import launch as experts
    from acmoe.ops.experts.triton.sizes import Sizes

    monkeypatch.setattr(lookup, "OVERRIDE", {"up": Blocks(128, 128, 64, 4, 3, True, 0, 2)})
    sizes = Sizes(64, 384, 1536, 16, 2, "gelu")
    assert experts._blocks("up", sizes, torch.bfloat16)[3:] == (4, 3, True, 0, 2)
    gated = sizes._replace(act="swiglu")
    assert experts._blocks("up", gated, torch.bfloat16)[3:] == (8, 3, True, 0, 1)
    # And no tile of 256 columns: with gate and up its three stages would take 240 KiB.
    monkeypatch.setattr(lookup, "OVERRIDE", {"up": Blocks(128, 256, 64, 8, 3, True)})
    assert experts._blocks("up", sizes, torch.bfloat16).n == 256
    assert experts._blocks("up", gated, torch.bfloat16).n == 128


@pytest.mark.parametrize(("capability", "tuned"), [((9, 0), True), ((8, 0), False)])
def test_block_sizes_that_fill_a_hopper_are_for_those_alone(capability, tuned, monkeypatch):
    from acmoe.ops import device_support
    from acmoe.ops.experts.settings import lookup, tables
    from acmoe.ops.experts.settings.rules import Layer

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(tables, "package_table", lambda: {"up/64/64/2": [16, 16, 16, 4, 2]})
    device_support.has_large_shared_memory.cache_clear()
    try:
        blocks = lookup.blocks_for("up", Layer(64, 64, 2, 128, rows=128))
    finally:
        device_support.has_large_shared_memory.cache_clear()
    assert (blocks == Blocks(16, 16, 16, 4, 2)) == tuned


@pytest.mark.parametrize(
    ("blocks", "result", "fits"),
    [
        (Blocks(128, 256, 32, 8, 4, True, 1, 1), torch.bfloat16, True),
        # 4 stages and a remainder of 24 KiB each, and a tile of 128 KiB, are 248 KiB of 227.
        (Blocks(128, 256, 32, 8, 4, True, 1, 1), torch.float32, False),
        (Blocks(128, 256, 32, 8, 3, True, 1, 1), torch.float32, True),
        (Blocks(128, 256, 64, 8, 3, True, 1, 1), torch.float32, False),
        (Blocks(128, 256, 64, 8, 3, True, 1, 0), torch.float32, True),
    ],
)
def test_a_weight_gradient_in_float32_fits_into_shared_memory(blocks, result, fits):
    from acmoe.ops.experts.triton.launch import _persistent_if_it_fits

    found = _persistent_if_it_fits(blocks, torch.bfloat16, result)
    assert found == (blocks if fits else blocks._replace(k=64, num_stages=3, persistent=0))


@pytest.mark.gpu
@pytest.mark.parametrize("gluon", ["auto", "never"])
@pytest.mark.parametrize("hidden", [512, 1024, 4096])
def test_wide_weights_in_float32_have_gradients_for_tokens_in_bf16(hidden, gluon, monkeypatch):
    """As under autocast, for layers whose rows are copied and that no table has."""
    monkeypatch.setenv("ACMOE_GLUON", gluon)
    monkeypatch.setenv("ACMOE_TUNE", "never")
    layer = Layer("swiglu", False, (900, 512, hidden, 6, 2), "cuda")
    right = layer.gradients(layer.reference())
    layer.x, layer.gate = (
        leaf.detach().bfloat16().requires_grad_() for leaf in (layer.x, layer.gate)
    )
    layer.cotangent = layer.cotangent.bfloat16()
    found = layer.gradients(layer.fused())
    for mine, wanted in zip(found, right, strict=True):
        assert ((mine - wanted).norm() / wanted.norm()).item() < 1.5e-2  # a chain of roundings
    for weight in found[2:]:
        assert weight.dtype == torch.float32 and not torch.equal(weight, weight.bfloat16().float())
