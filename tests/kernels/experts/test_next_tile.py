"""The dynamic order of tiles: programs count tiles in global memory and take the next one.

D features, F hidden units, N rows.
"""

import pytest
import torch
from pipeline_cases import drawn, each_expert, plan_of

from slow_cases import mostly_slow

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


@mostly_slow("seed", range(4), gpu=range(4))
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


@mostly_slow("counts", [(0, 0), (1, 0, 129, 64, 65, 128)], keep=[1], gpu=[0])
def test_a_second_up_projection_by_the_same_plan_has_equal_bits(counts, device, hopper_launch):
    """Of 6 row tiles and two columns, and of none at all."""
    plan, D, F = plan_of(counts, 20, device), 192, 256
    tokens, up = drawn(plan.num_rows, D, device=device), drawn(len(counts), 2 * F, D, device=device)
    first, second = (hopper_launch.launch_up(tokens, up / D**0.5, plan, F) for _ in range(2))
    rows = sum(counts)
    assert torch.equal(first[:rows], second[:rows])
    assert plan.counter.item() == 0


def down_by_tiles_of_a_counter(launch, plan, device):
    """Return a call of the cooperative "down": the results of the rows that have an expert."""
    from acmoe.ops.experts.settings.gemms import PipelineConfig

    D, F, rows = 512, 256, int(plan.offsets[-1])
    torch.manual_seed(1)
    act_NF = drawn(plan.num_rows, F, device=device)
    down = drawn(plan.offsets.shape[0], D, F, device=device) / D**0.5
    settings = PipelineConfig("cooperative", 4)
    return lambda: launch.launch_rows(act_NF, down, plan, settings, across=False)[:rows]


@mostly_slow("counts", [(0, 0), (1,), (1, 0, 129)], keep=[2], gpu=[0, 1])
def test_neither_a_second_down_nor_when_it_takes_tiles_changes_a_bit(
    counts, device, hopper_launch, monkeypatch
):
    """Without tiles, with as many as programs that are emulated, and with more."""
    plan = plan_of(counts, 20, device)
    call = down_by_tiles_of_a_counter(hopper_launch, plan, device)
    right = call()
    for ahead in (0, 100):
        monkeypatch.setattr(hopper_launch, "AHEAD", ahead)
        assert torch.equal(call(), right)
        assert plan.counter.item() == 0


def test_bits_of_the_down_projection_do_not_depend_on_which_program_computes_a_tile(
    device, hopper_launch, monkeypatch
):
    """One program computes all tiles, three share them; each tile sums its K blocks in order."""
    plan = plan_of((1, 0, 129, 65), 20, device)
    call = down_by_tiles_of_a_counter(hopper_launch, plan, device)
    found = []
    for programs in (1, 3):
        monkeypatch.setattr(hopper_launch, "multiprocessors", lambda n=programs: n)
        found.append(call())
    assert torch.equal(*found)


def test_a_ping_pong_gemm_counts_no_tiles(device, hopper_launch):
    from acmoe.ops.experts.settings.gemms import PipelineConfig

    plan = plan_of((1, 129), 20, device)
    plan.counter.fill_(7)
    act_NF, down = drawn(plan.num_rows, 64, device=device), drawn(2, 128, 64, device=device)
    hopper_launch.launch_rows(act_NF, down, plan, PipelineConfig("ping-pong", 2), across=False)
    assert plan.counter.item() == 7


@pytest.mark.parametrize("ahead", [0, 1, 100])
def test_when_a_program_takes_its_next_tile_changes_no_bit(
    ahead, device, hopper_launch, monkeypatch
):
    """With the last block of a tile, one block earlier, and with the first."""
    counts, D, F = (130, 0, 64, 1), 192, 128
    plan = plan_of(counts, 20, device)
    tokens, up = drawn(plan.num_rows, D, device=device), drawn(4, 2 * F, D, device=device) / D**0.5
    right = hopper_launch.launch_up(tokens, up, plan, F)
    monkeypatch.setattr(hopper_launch, "AHEAD", ahead)
    found = hopper_launch.launch_up(tokens, up, plan, F)
    for _expert, rows in each_expert(plan):
        assert torch.equal(found[rows], right[rows])


def up_by_tiles_of_a_counter(launch, plan, device):
    """Return a call of "up": the results of the rows that have an expert."""
    D, F, rows = 512, 512, int(plan.offsets[-1])
    torch.manual_seed(1)
    tokens = drawn(plan.num_rows, D, device=device)
    up = drawn(plan.offsets.shape[0], 2 * F, D, device=device) / D**0.5
    return lambda: launch.launch_up(tokens, up, plan, F)[:rows]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["up", "down"])
def test_gemms_of_two_streams_and_of_a_graph_have_equal_bits(kernel):
    from acmoe.ops.experts.hopper import launch

    plans = [plan_of((130, 0, 64, 1, 300, 77) * 20, 20, "cuda") for _ in range(2)]
    calls = [
        up_by_tiles_of_a_counter(launch, plan, "cuda")
        if kernel == "up"
        else down_by_tiles_of_a_counter(launch, plan, "cuda")
        for plan in plans
    ]
    right = calls[0]()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in plans]
    found = []
    for _ in range(8):
        for stream, call in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                found.append(call())
    torch.cuda.synchronize()
    assert all(torch.equal(one, right) for one in found)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [call() for call in calls]
    for _ in range(3):
        graph.replay()
    assert all(torch.equal(one, right) for one in found)
