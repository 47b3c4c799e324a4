"""The order in which programs take the row and column tiles of a grouped GEMM.

D features, F hidden units, N rows, E experts.
"""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from pipeline_cases import assert_near, drawn, each_expert, plan_of

from acmoe.ops.experts.triton.sizes import RowOperand, Sizes
from slow_cases import mostly_slow

INTERPRETED = 2**-7  # Triton's interpreter truncates to bf16, which loses up to 2^-8


def test_tiles_cover_every_row_once(device):
    from acmoe.ops.experts.triton.tiles import HEIGHTS, Plan

    # Experts of 0, 5, 0, 32 and 3 rows; 7 rows for no expert.
    end = torch.tensor([0, 5, 5, 37, 40], device=device)
    plan = Plan(torch.arange(47, device=device), end, 1)
    expert, start = (table.tolist() for table in plan[16])
    tiles = list(zip(expert, start, strict=True))
    assert tiles[:4] == [(1, 0), (3, 5), (3, 21), (4, 37)]
    assert tiles[4:] == [(-1, 40), (-1, 56), (-1, 72), (-1, 88)]  # of 47 / 16, up, and 5
    for height in HEIGHTS:
        expert, start = plan[height]
        of_experts = [e for e in expert.tolist() if e >= 0]
        assert of_experts == ([1, 3, 3, 4] if height == 16 else [1, 3, 4])
        assert start[expert < 0].min() == 40


def test_every_row_finds_its_token(device):
    from acmoe.ops.experts.triton.tiles import Plan

    order = torch.tensor([5, 0, 3, 1, 4, 2], device=device)  # row 3 t + k of token t
    plan = Plan(order, torch.tensor([6], device=device), 3)
    assert plan.token.tolist() == [1, 0, 1, 0, 1, 0]


def listing_kernel(
    out_ptr, expert_ptr, start_ptr, offsets_ptr, num_tiles, num_n, BY_EXPERT: tl.constexpr
):
    """List the tiles of 128 rows in groups of two."""
    tile_id = tl.program_id(0)
    expert, row, end, n_tile = row_tile(  # noqa: F821, which the test sets
        tile_id, expert_ptr, start_ptr, offsets_ptr, num_tiles, num_n, 2, BY_EXPERT, 128
    )
    tl.store(out_ptr + 4 * tile_id, expert)
    tl.store(out_ptr + 4 * tile_id + 1, row)
    tl.store(out_ptr + 4 * tile_id + 2, end)
    tl.store(out_ptr + 4 * tile_id + 3, n_tile)


def listed(by_expert, device, monkeypatch, counts=(300, 0, 100)):
    """The tiles of experts with so many rows, used and unused ones, of two column tiles."""
    from acmoe.ops.experts.triton.tiles import row_tile

    monkeypatch.setitem(globals(), "row_tile", row_tile)
    plan = plan_of(counts, 0, device)
    expert, start = plan[128]
    out = torch.zeros(2 * expert.numel(), 4, dtype=torch.int32, device=device)
    kernel = triton.jit(listing_kernel)
    kernel[(len(out),)](out, expert, start, plan.offsets, expert.numel(), 2, BY_EXPERT=by_expert)
    return out.tolist()


def test_groups_of_row_tiles_end_with_their_expert(device, monkeypatch):
    """Three row tiles of the first expert are groups of two and one; the second has no rows."""
    tiles = listed(True, device, monkeypatch)
    first = [[0, 0, 300, 0], [0, 128, 300, 0], [0, 0, 300, 1], [0, 128, 300, 1]]
    first += [[0, 256, 300, 0], [0, 256, 300, 1]]
    assert tiles[:8] == [*first, [2, 300, 400, 0], [2, 300, 400, 1]]
    assert [tile[0] for tile in tiles[8:]] == [-1] * (len(tiles) - 8)


def test_tiles_without_an_expert_are_unused_wherever_they_begin(device, monkeypatch):
    """The second unused row tile begins at row 133, in the second tile of 128 rows."""
    tiles = listed(True, device, monkeypatch, (3, 0, 2))
    used = [[0, 0, 3, 0], [0, 0, 3, 1], [2, 3, 5, 0], [2, 3, 5, 1]]
    assert tiles[:4] == used
    assert [tile[0] for tile in tiles[4:]] == [-1] * 4


def test_groups_of_row_tiles_may_have_two_experts(device, monkeypatch):
    tiles = listed(False, device, monkeypatch)
    first = [[0, 0, 300, 0], [0, 128, 300, 0], [0, 0, 300, 1], [0, 128, 300, 1]]
    second = [[0, 256, 300, 0], [2, 300, 400, 0], [0, 256, 300, 1], [2, 300, 400, 1]]
    assert tiles[:8] == first + second
    assert [tile[0] for tile in tiles[8:]] == [-1] * (len(tiles) - 8)


@pytest.mark.parametrize("rows", [1, 6 * 128, 6 * 128 + 1])
@pytest.mark.parametrize("inner", [12 * 2**10, 12 * 2**10 - 1])
def test_few_rows_of_large_experts_are_groups_of_one_expert(rows, inner, device):
    """Up to six tiles an average expert, whatever the loads are, and weights of 12 MiB on."""
    plan = plan_of((2 * rows, 0), 0, device)
    weight_EOI = torch.empty(2, 512, inner, dtype=torch.bfloat16, device=device)
    large = inner == 12 * 2**10
    assert plan.by_expert(128, weight_EOI) == (large and rows <= 6 * 128)
    assert plan.by_expert(256, weight_EOI) == large
    assert plan.by_expert(64, weight_EOI) == (large and rows == 1)


# Rows around the multiples of half a tile of 128 rows, more than one group of tiles, and none.
COUNTS, NOBODY = (1, 63, 0, 64, 65, 127, 128, 129, 300), 20


def group(monkeypatch, *, by_expert):
    """Set which tiles are a group, of two at most in Triton."""
    from acmoe.ops.experts.triton import launch, tiles

    monkeypatch.setattr(launch, "GROUP_M", 2)
    monkeypatch.setattr(tiles, "BY_EXPERT_UP_TO", 8 if by_expert else 0)
    monkeypatch.setattr(tiles, "BY_EXPERT_WEIGHTS", 0)


@mostly_slow(
    ("by_expert", "gather", "persistent"),
    list(itertools.product([False, True], [False, True], [0, 1])),
    keep={0, 3, 7},  # none of the three, two of them, all
    gpu=range(8),
)
def test_gemms_of_rows_are_their_products(persistent, gather, by_expert, device, monkeypatch):
    from acmoe.ops.device.block_sizes import Blocks
    from acmoe.ops.experts.settings import lookup
    from acmoe.ops.experts.triton import launch

    group(monkeypatch, by_expert=by_expert)
    blocks = Blocks(128, 32, 16, 8, 2, True, 0, persistent)
    names = ("up", "down", "input")
    monkeypatch.setattr(lookup, "OVERRIDE", dict.fromkeys(names, blocks))
    plan, D, F, E = plan_of(COUNTS, NOBODY, device), 32, 48, len(COUNTS)
    x_ND, up_EWD = drawn(plan.num_rows, D, device=device), drawn(E, 2 * F, D, device=device)
    down_EDF, size = drawn(E, D, F, device=device), Sizes(plan.num_rows, D, F, E, 1, "swiglu")
    seed = plan.offsets
    h_NW, a_NF = launch.run_up(RowOperand(x_ND, gather), up_EWD, None, plan, size, 0.0, seed)
    y_ND = launch.run_rows("down", a_NF, down_EDF, None, plan, size)
    dx_ND = launch.run_rows("input", h_NW, up_EWD, None, plan, size, across=True)
    for expert, rows in each_expert(plan):
        if COUNTS[expert] == 0:
            continue
        x = x_ND[plan.token[rows].long()] if gather else x_ND[rows]
        up, down = up_EWD[expert].double(), down_EDF[expert].double()
        assert_near(h_NW[rows], x.double() @ up.T, INTERPRETED)
        gate, linear = h_NW[rows].double().split(F, dim=1)
        assert_near(a_NF[rows], torch.nn.functional.silu(gate) * linear, INTERPRETED)
        assert_near(y_ND[rows], a_NF[rows].double() @ down.T, INTERPRETED)
        assert_near(dx_ND[rows], h_NW[rows].double() @ up, INTERPRETED)


@pytest.mark.parametrize("settings", [("ping-pong", 3), ("cooperative", 3)])
def test_hopper_gemms_of_groups_by_expert_are_their_products(
    settings, device, hopper_launch, monkeypatch
):
    from acmoe.ops.experts.settings.gemms import PipelineConfig

    group(monkeypatch, by_expert=True)
    counts, inner, outer = (130, 0, 64, 200, 1), 192, 256
    plan = plan_of(counts, NOBODY, device)
    a_NI = drawn(plan.num_rows, inner, device=device)
    weight_EOI = drawn(5, outer, inner, device=device)
    y_NO = hopper_launch.launch_rows(
        a_NI, weight_EOI, plan, PipelineConfig(*settings), across=False
    )
    for expert, rows in each_expert(plan):
        if counts[expert]:
            assert_near(y_NO[rows], a_NI[rows].double() @ weight_EOI[expert].double().T)


def test_hopper_s_up_and_hidden_take_groups_by_expert(device, hopper_launch, monkeypatch):
    """The sum over gate * a * (grad @ down): by h it is dh, by the gate its gradient."""
    from acmoe.ops.experts.settings.gemms import PipelineConfig

    group(monkeypatch, by_expert=True)
    counts, D, F = (130, 0, 64, 200, 1), 128, 192
    plan, routed = plan_of(counts, NOBODY, device), sum(counts)
    grad_ND, h_NW = (drawn(plan.num_rows, width, device=device) for width in (D, 2 * F))
    down_EDF, gate_N = drawn(5, D, F, device=device), torch.rand(plan.num_rows, device=device)
    up_EWD = drawn(5, 2 * F, D, device=device) / D**0.5
    act_NF = hopper_launch.launch_up(grad_ND, up_EWD, plan, F)
    dh_NW = torch.zeros_like(h_NW)
    settings = PipelineConfig("ping-pong", 3, 2)
    a_NF, share_BN = hopper_launch.launch_hidden(
        grad_ND, down_EDF, h_NW, dh_NW, gate_N, plan, settings
    )
    leaf_NW = h_NW.double().requires_grad_()
    gate_N1 = gate_N[plan.permutation].double()[:, None].requires_grad_()
    right_NF = torch.nn.functional.silu(leaf_NW[:, :F]) * leaf_NW[:, F:]
    total = sum(
        (gate_N1[rows] * right_NF[rows] * (grad_ND[rows].double() @ down_EDF[e].double())).sum()
        for e, rows in each_expert(plan)
    )
    right_NW, right_gate_N1 = torch.autograd.grad(total, (leaf_NW, gate_N1))
    assert_near(dh_NW[:routed], right_NW[:routed])
    assert_near(a_NF[:routed], (right_NF * gate_N1).detach()[:routed])
    assert_near(share_BN.sum(0)[:routed], right_gate_N1[:routed, 0], 1e-4)
    for e, rows in each_expert(plan):
        if counts[e]:
            token_N = plan.token[rows].long()
            gate, linear = (grad_ND[token_N].double() @ up_EWD[e].double().T).split(F, dim=1)
            assert_near(act_NF[rows], torch.nn.functional.silu(gate) * linear)
