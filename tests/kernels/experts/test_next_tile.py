"""The dynamic order of tiles: programs count tiles in global memory and take the next one.

D features, F hidden units, N rows.
"""

import pytest
import torch
from pipeline_cases import drawn, each_expert, plan_of

gl = pytest.importorskip("triton.experimental.gluon.language")
gluon = pytest.importorskip("triton.experimental.gluon")

NAMES = ("dispatch_tiles", "make_mailbox", "next_tile", "want_tile")


def _reader(mailbox, seen_ptr, num_tiles, LATE: gl.constexpr):
    """Count each tile that the program gets."""
    tile_id, local_tile = gl.program_id(0), 0
    while tile_id < num_tiles:
        if not LATE:
            want_tile(mailbox)  # noqa: F821, which the test sets
        gl.atomic_add(seen_ptr + tile_id, 1)
        if LATE:
            want_tile(mailbox, local_tile >= 0)  # noqa: F821
        tile_id = next_tile(mailbox, local_tile)  # noqa: F821
        local_tile += 1


def listing_kernel(seen_ptr, again_ptr, num_used_ptr, counter_ptr, num_n):
    """Add one to `seen` and `again` of each tile: two readers, and the dispatcher."""
    num_tiles = gl.load(num_used_ptr) * num_n
    mailbox = make_mailbox(2)  # noqa: F821
    gl.warp_specialize(
        [
            (_reader, (mailbox, seen_ptr, num_tiles, False)),
            (_reader, (mailbox, again_ptr, num_tiles, True)),
            (dispatch_tiles, (mailbox, num_used_ptr, num_n, counter_ptr)),  # noqa: F821
        ],
        [2, 1],
        [64, 64],
    )


@pytest.fixture
def listing(monkeypatch):
    """The kernel above for a seed; without a GPU it is emulated."""
    from acmoe.ops.experts.hopper import next_tile as module

    for name in NAMES:
        monkeypatch.setitem(globals(), name, getattr(module, name))
    monkeypatch.setitem(globals(), "_reader", gluon.jit(_reader))
    kernel = gluon.jit(listing_kernel)
    if torch.cuda.is_available():
        return lambda seed: kernel
    from gluon_emulator import emulate

    return lambda seed: emulate(kernel, seed=seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tiles", [0, 1, 2, 3, 4, 11])
def test_every_tile_is_given_out_once_and_the_counter_is_zero_again(tiles, seed, device, listing):
    """Three programs and two columns: without tiles, with fewer than programs, and with more."""
    seen, again = (torch.zeros(2 * tiles + 1, dtype=torch.int32, device=device) for _ in range(2))
    used = torch.tensor([tiles], dtype=torch.int32, device=device)
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    for launch in (1, 2):
        listing(seed)[(3,)](seen, again, used, counter, 2, num_warps=4)
        assert seen.tolist() == again.tolist() == [launch] * (2 * tiles) + [0]
        assert counter.item() == 0


@pytest.mark.usefixtures("poisoned_empty")
def test_the_plan_s_counter_is_zero_and_its_own(device):
    plans = [plan_of((130, 0, 64), 20, device) for _ in range(2)]
    assert [plan.counter.tolist() for plan in plans] == [[0], [0]]
    assert [plan.num_used(128).tolist() for plan in plans] == [[3], [3]]
    plans[0].counter.add_(1)
    assert plans[1].counter.item() == 0


@pytest.mark.parametrize("counts", [(0, 0), (1, 0, 129, 64, 65, 128)])
def test_a_second_up_projection_by_the_same_plan_has_equal_bits(counts, device, hopper_launch):
    """Of 6 row tiles and two columns, and of none at all."""
    plan, D, F = plan_of(counts, 20, device), 192, 256
    tokens, up = drawn(plan.num_rows, D, device=device), drawn(len(counts), 2 * F, D, device=device)
    first, second = (hopper_launch.launch_up(tokens, up / D**0.5, plan, F) for _ in range(2))
    rows = sum(counts)
    assert torch.equal(first[:rows], second[:rows])
    assert plan.counter.item() == 0


@pytest.mark.parametrize("ahead", [0, 1, 100])
def test_when_a_program_takes_its_next_tile_changes_no_bit(
    ahead, device, hopper_launch, monkeypatch
):
    """With the last block of a tile, one block earlier, and with the first."""
    counts, D, F = (130, 0, 64, 1), 192, 128
    plan = plan_of(counts, 20, device)
    tokens, up = drawn(plan.num_rows, D, device=device), drawn(4, 2 * F, D, device=device) / D**0.5
    right = hopper_launch.launch_up(tokens, up, plan, F)
    monkeypatch.setattr(hopper_launch, "UP_AHEAD", ahead)
    found = hopper_launch.launch_up(tokens, up, plan, F)
    for _expert, rows in each_expert(plan):
        assert torch.equal(found[rows], right[rows])


@pytest.mark.gpu
def test_up_projections_of_two_streams_and_of_a_graph_have_equal_bits():
    from acmoe.ops.experts.hopper import launch as hopper_launch

    counts, D, F = (130, 0, 64, 1, 300, 77) * 20, 512, 512
    plans = [plan_of(counts, 20, "cuda") for _ in range(2)]
    tokens = drawn(plans[0].num_rows, D, device="cuda")
    up, rows = drawn(len(counts), 2 * F, D, device="cuda") / D**0.5, sum(counts)

    def results():
        return [hopper_launch.launch_up(tokens, up, plan, F)[:rows] for plan in plans]

    right = results()[0]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in plans]
    found = []
    for _ in range(8):
        for stream, plan in zip(streams, plans, strict=True):
            with torch.cuda.stream(stream):
                found.append(hopper_launch.launch_up(tokens, up, plan, F)[:rows])
    torch.cuda.synchronize()
    assert all(torch.equal(one, right) for one in found)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results()
    for _ in range(3):
        graph.replay()
    assert all(torch.equal(one, right) for one in found)
