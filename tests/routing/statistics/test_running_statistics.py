"""The running average: updated once per step, weighted by tokens.

T tokens, D features, C clusters.
"""

import copy

import pytest
import torch
from filled_layers import assert_same_buffers, filled_layer, see, taker
from router_loops import dispersion, matrix, rows, scales

import acmoe
from acmoe import AdaptiveConfig, RoutingState, build_router, fold_statistics, override_statistics
from acmoe.errors import UserError


@pytest.mark.parametrize("measure", ["mad", "variance", "gini"])
def test_ten_random_steps_equal_a_float64_loop_of_token_weighted_averages(measure):
    statistics = taker(measure=measure, momentum=0.8)
    average = [[0.0] * 4 for _ in range(3)]
    weight = [0.0] * 3
    for step in range(10):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(12, 4, generator=generator)
        cluster = torch.randint(3, (12,), generator=generator)
        see(statistics, x, cluster)
        fold_statistics(statistics)
        spreads = dispersion(rows(x.double()), cluster.tolist(), 3, measure)
        for c in range(3):
            if spreads[c] is None:
                continue
            count = (cluster == c).sum().item()
            old, weight[c] = 0.8 * weight[c], 0.8 * weight[c] + count
            for q in range(4):
                average[c][q] = (old * average[c][q] + count * spreads[c][q].item()) / weight[c]
    torch.testing.assert_close(statistics.dispersion.double(), torch.tensor(average).double())
    torch.testing.assert_close(statistics.weight.double(), torch.tensor(weight).double())
    wanted = matrix(scales(rows(statistics.dispersion.double()), 4))
    found = see(statistics, torch.randn(12, 4), torch.zeros(12, dtype=torch.int64))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


def test_a_rare_expert_keeps_its_history_exactly():
    statistics = taker()
    see(statistics, torch.randn(9, 4), torch.tensor([0, 1, 2] * 3))
    fold_statistics(statistics)
    kept = statistics.dispersion[2].clone(), statistics.weight[2].clone()
    for _ in range(200):
        # No token of cluster 2 in most steps; now and then one, which has no dispersion.
        see(statistics, torch.randn(9, 4), torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 2]))
        fold_statistics(statistics)
    assert torch.equal(statistics.dispersion[2], kept[0])
    assert torch.equal(statistics.weight[2], kept[1])
    assert statistics.weight[0] > kept[1]


def test_the_scale_is_a_copy_except_in_a_captured_evaluation(monkeypatch):
    """A state must not change with the buffer; the graph would copy it again in every replay."""
    statistics = taker().eval()
    x, cluster = torch.randn(9, 4), torch.tensor([0, 1, 2] * 3)
    buffer = statistics.running_scale

    def is_buffer():
        return see(statistics, x, cluster).data_ptr() == buffer.data_ptr()

    assert not is_buffer()
    monkeypatch.setattr("acmoe.ops.statistics.pending.capturing", lambda tensor: True)
    statistics.eval()  # forgets the copy that evaluations on a CPU share
    assert is_buffer()
    statistics.train()
    assert not is_buffer()


def test_an_evaluation_follows_every_change_of_the_average():
    statistics = taker()
    x, cluster = torch.randn(9, 4), torch.tensor([0, 1, 2] * 3)
    see(statistics, x, cluster)
    fold_statistics(statistics)
    statistics.eval()

    def check(of=statistics):
        wanted = matrix(scales(rows(of.dispersion.double()), 4)).float()
        for mode in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
            with mode:
                found = see(of, x, cluster)
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
                found.zero_()  # a state is its owner's, who may write to it

    check()
    other = copy.deepcopy(statistics)
    statistics.dispersion[0, 0] *= 2
    check()
    statistics.dispersion.data.mul_(torch.tensor([1.0, 2.0, 3.0, 4.0]))  # changes no version
    statistics.eval()
    check()
    check(other)
    statistics.train()
    see(statistics, 5 * x, cluster)
    fold_statistics(statistics)
    statistics.eval()
    check()
    assert see(statistics, x.double(), cluster).dtype == torch.float64


def test_folding_twice_counts_a_batch_once():
    statistics = taker()
    see(statistics, torch.randn(9, 4), torch.tensor([0, 1, 2] * 3))
    fold_statistics(statistics)
    before = copy.deepcopy(statistics)
    fold_statistics(statistics)
    assert torch.equal(statistics.dispersion, before.dispersion)
    assert torch.equal(statistics.weight, before.weight)


def test_forwards_add_up_for_the_next_update_and_leave_the_average_alone():
    statistics = taker()
    x, cluster = torch.randn(9, 4), torch.tensor([0, 1, 2] * 3)
    for _ in range(3):
        see(statistics, x, cluster)
    assert statistics.last_count.tolist() == [9, 9, 9]
    assert statistics.weight.tolist() == [0, 0, 0]
    fold_statistics(statistics)
    assert statistics.weight.tolist() == [9, 9, 9]
    assert statistics.last_count.tolist() == [0, 0, 0]


def test_before_the_first_fold_running_statistics_are_the_plain_router():
    scale = see(taker(), torch.randn(9, 4), torch.tensor([0, 1, 2] * 3))
    assert torch.equal(scale, torch.ones(3, 4))


def test_evaluation_changes_no_buffer():
    moe = filled_layer().eval()
    before = copy.deepcopy(moe)
    for statistics in ("running", "batch"):
        with override_statistics(moe, eval_statistics=statistics):
            moe(torch.randn(30, 4), RoutingState.identity(num_tokens=30, num_clusters=3, dim=4))
    assert_same_buffers(moe, before)


def test_running_statistics_in_evaluation_do_not_look_at_the_tokens():
    # Tokens on the meta device have no numbers to look at.
    statistics = taker()
    see(statistics, torch.randn(9, 4), torch.tensor([0, 1, 2] * 3))
    fold_statistics(statistics)
    wanted = see(statistics, torch.randn(9, 4), torch.tensor([0, 1, 2] * 3))
    tokens = torch.empty(9, 4, device="meta")
    cluster = torch.empty(9, device="meta", dtype=torch.int64)
    assert torch.equal(see(statistics.eval(), tokens, cluster), wanted)


def test_a_batch_with_nan_is_not_folded_into_its_cluster():
    statistics = taker()
    see(statistics, torch.randn(9, 4), torch.tensor([0, 1, 2] * 3))
    fold_statistics(statistics)
    before = copy.deepcopy(statistics)
    x = torch.randn(9, 4)
    x[0, 0] = torch.nan
    see(statistics, x, torch.tensor([0, 1, 2] * 3))
    fold_statistics(statistics)
    assert statistics.dispersion.isfinite().all()
    assert torch.equal(statistics.dispersion[0], before.dispersion[0])
    assert torch.equal(statistics.weight[0], before.weight[0])
    assert statistics.weight[1] > before.weight[1]


def test_padding_counts_for_nothing():
    x, cluster = torch.randn(10, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 1, 2])
    mask = torch.arange(10) < 7
    x[7:] = torch.inf
    padded, alone = taker(), taker()
    see(padded, x, cluster, mask[None])
    see(alone, x[:7], cluster[:7])
    torch.testing.assert_close(padded.last_dispersion, alone.last_dispersion)
    assert torch.equal(padded.last_count, alone.last_count)


def test_a_single_token_reads_the_scale_that_training_left():
    router = build_router(
        AdaptiveConfig(statistics_of="current"), dim=2, num_experts=2, top_k=1
    ).eval()
    # s = (1, 3): 1/s = (1, 1/3), mean 2/3, M = (1.5, 0.5).
    router.statistics.dispersion.copy_(torch.tensor([[1.0, 3.0], [1.0, 1.0]]))
    router.statistics.weight.fill_(10.0)
    state = RoutingState.identity(num_tokens=1, num_clusters=2, dim=2)
    state = state._replace(assignment=torch.tensor([[0]]))
    assert router.rescale(torch.tensor([[2.0, 2.0]]), state).dense().tolist() == [[3.0, 1.0]]


def test_a_group_that_is_none_of_torch_s_is_named() -> None:
    moe = acmoe.MoE(dim=4, hidden=4, num_experts=2, top_k=1, router="adaptive")
    with pytest.raises(UserError, match="group='data'; pass a process group of torch"):
        acmoe.set_statistics_group(moe, "data")


def test_an_evaluation_inside_a_transform_keeps_the_scale_constant():
    moe = filled_layer().eval()
    state = RoutingState.identity(num_tokens=5, num_clusters=3, dim=4)
    name, x = "next_state.statistics.dispersion", torch.randn(5, 4)

    def size(dispersion):
        after = torch.func.functional_call(moe, {name: dispersion}, (x, state))[1]
        return after.scale.square().sum()

    begin = moe.get_buffer(name).clone()
    assert size(begin) != size(begin * torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert not torch.func.grad(size)(begin).any()  # detach=True, the default
