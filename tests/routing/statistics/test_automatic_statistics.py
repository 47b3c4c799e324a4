"""Running statistics move at every optimizer step, by all of its micro-batches, each counted once.

T tokens, D features, C clusters.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from router_loops import dispersion, rows
from stepped_layers import (
    MOMENTUM,
    START,
    C,
    D,
    T,
    assert_same,
    averages,
    layer,
    loss_of,
    moved,
    statistics_of,
    tokens,
    train,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from acmoe import (
    AdaptiveConfig,
    MetricConfig,
    MoE,
    RoutingState,
    SMoEConfig,
    build_router,
    fold_statistics,
)
from acmoe.ops.statistics.dispersion import dispersion_and_count
from acmoe.ops.statistics.running import update_average
from acmoe.routing.statistics import ClusterStatistics


def flat(moe: MoE, x: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
    """Run the layer on plain tensors, the only arguments that a reentrant checkpoint can handle."""
    y, after = moe(x, RoutingState(*state))
    return (y, *after)


@pytest.mark.parametrize("way", ["plain", "not-reentrant", "reentrant"])
def test_three_steps_of_four_micro_batches_are_three_updates_of_four_batches(way: str) -> None:
    moe = layer()
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.5)
    average = [[0.0] * D for _ in range(C)]
    weight = [0.0] * C
    for number in range(3):
        merged = [[0.0] * D for _ in range(C)]
        seen = [0] * C
        for part in range(4):
            x = tokens(10 * number + part).requires_grad_()
            first = moe.router(x, START).affinity.argmax(-1)
            if way == "plain":
                y, *state = flat(moe, x, *START)
            else:
                again = way == "reentrant"
                y, *state = checkpoint(partial(flat, moe), x, *START, use_reentrant=again)
            (y.square().mean() + state[3]).backward()
            spreads = dispersion(rows(x.detach().double()), first.tolist(), C)
            for c in range(C):
                if spreads[c] is None:
                    continue
                count = (first == c).sum().item()
                seen[c] += count
                for d in range(D):
                    merged[c][d] += count * spreads[c][d].item()
        optimizer.step()
        optimizer.zero_grad()
        for c in range(C):
            old, weight[c] = MOMENTUM * weight[c], MOMENTUM * weight[c] + seen[c]
            for d in range(D):
                average[c][d] = (old * average[c][d] + merged[c][d]) / weight[c]
    found = statistics_of(moe)
    torch.testing.assert_close(found.weight.double(), torch.tensor(weight).double())
    torch.testing.assert_close(found.dispersion.double(), torch.tensor(average).double())


def test_the_loop_of_the_readme_moves_every_layer() -> None:
    page = (Path(__file__).parents[3] / "README.md").read_text()
    code = next(part for part in page.split("```python\n")[1:] if "loss.backward()" in part)
    names: dict[str, Any] = {}
    exec(code.split("```")[0], names)
    layers = nn.ModuleList([names["first"], names["second"]])
    moved = averages(layers)
    assert len(moved) == 2 * len(layers)  # dispersion and weight of each
    assert all(value.any() for value in moved.values())  # they begin at 0


@pytest.mark.usefixtures("no_native")
def test_one_micro_batch_is_bitwise_its_dispersion() -> None:
    moe = layer()
    wanted = [torch.zeros(C, D), torch.zeros(C)]
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.5)
    for seed in range(4):
        first = moe.router(tokens(seed), START).affinity.argmax(-1)
        update_average(*wanted, *dispersion_and_count(tokens(seed), first, C), MOMENTUM)
        train(moe, optimizer, seed)
    assert torch.equal(statistics_of(moe).dispersion, wanted[0])
    assert torch.equal(statistics_of(moe).weight, wanted[1])


def test_a_call_by_hand_after_the_step_changes_nothing() -> None:
    moe = layer()
    train(moe, torch.optim.AdamW(moe.parameters(), fused=True), 0, 1)
    before = averages(moe)
    fold_statistics(moe)
    assert_same(averages(moe), before)
    assert moved(moe) > 0


def test_a_micro_batch_of_nan_leaves_the_others_as_they_are() -> None:
    found, wanted = layer(), layer()
    for moe, seeds in ((found, (0, None, 1)), (wanted, (0, 1))):
        for seed in seeds:
            x = torch.full((T, D), torch.nan) if seed is None else tokens(seed)
            with torch.no_grad():
                moe(x, START)
        torch.optim.SGD(moe.parameters(), lr=0.1).step()
    assert_same(averages(found), averages(wanted))
    assert statistics_of(found).dispersion.isfinite().all()


def test_a_single_token_of_a_micro_batch_has_no_dispersion_to_add() -> None:
    statistics = ClusterStatistics(AdaptiveConfig(), num_clusters=1, dim=1)
    for values in ([0.0, 2.0], [7.0]):  # the mean absolute deviation of 0 and 2 is 1
        x = torch.tensor(values)[None, :, None]
        statistics.cluster_scale(x, torch.zeros(1, len(values), dtype=torch.int64))
    fold_statistics(statistics)
    assert statistics.dispersion.tolist() == [[1.0]]
    assert statistics.weight.tolist() == [2.0]


def test_evaluation_counts_nothing_and_training_without_gradients_does() -> None:
    moe = layer()
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.1)
    moe.eval()
    with torch.no_grad():
        moe(tokens(0), START)
        optimizer.step()
        assert moved(moe) == 0
        moe.train()
        moe(tokens(0), START)
        optimizer.step()
    assert moved(moe) == pytest.approx(T, abs=2)  # an expert with one token has no dispersion


# Unusual steps


def test_the_forwards_of_a_closure_count_once_each() -> None:
    moe = layer()
    calls = 0
    optimizer = torch.optim.LBFGS(moe.parameters(), max_iter=3, lr=0.01)

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = loss_of(moe, tokens(0))
        loss.backward()
        return loss

    optimizer.step(closure)
    assert calls > 1
    alone = layer()
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.0), 0)
    assert moved(moe) == calls * moved(alone)


def test_the_batches_of_a_skipped_step_count_in_the_next() -> None:
    moe, alone = layer(), layer()
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for seed in range(2):
        optimizer.zero_grad()
        scaler.scale(loss_of(moe, tokens(seed))).backward()
        if seed == 0:
            moe.experts.up.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        assert (moved(moe) > 0) == (seed == 1)
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.0), 0, 1)
    assert_same(averages(moe), averages(alone))


def test_a_fused_optimizer_counts_the_batches_of_a_skipped_step_at_once() -> None:
    """GradScaler calls its step even then; the flag that skips it is read on the device."""
    moe, alone = layer(), layer()
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    before = moe.experts.up.detach().clone()
    scaler.scale(loss_of(moe, tokens(0))).backward()
    moe.experts.up.grad.fill_(torch.inf)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(moe.experts.up, before)
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.0), 0)
    assert_same(averages(moe), averages(alone))


@pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo's own, about the profiler
def test_a_compiled_optimizer_step_moves_them() -> None:
    moe, plain = layer(), layer()
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.1)
    compiled = torch.compile(optimizer.step, backend="eager")
    for seed in range(2):
        loss_of(moe, tokens(seed)).backward()
        compiled()
        optimizer.zero_grad()
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for seed in range(2):
        train(plain, other, seed)
    assert_same(averages(moe), averages(plain))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("again", [None, False, True])
def test_compiled_layers_count_every_micro_batch_once(again: bool | None) -> None:
    """In an eager checkpoint the compiled code runs again in the backward."""
    moe, plain = layer(), layer()
    torch._dynamo.reset()
    compiled = torch.compile(partial(flat, moe), backend="inductor", fullgraph=True)
    for model, call in ((plain, partial(flat, plain)), (moe, compiled)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(4):
            x = tokens(seed).requires_grad_()
            if again is None or model is plain:
                y, *state = call(x, *START)
            else:
                y, *state = checkpoint(call, x, *START, use_reentrant=again)
            (y.square().mean() + state[3]).backward()
            if seed % 2:
                optimizer.step()
                optimizer.zero_grad()
    found, wanted = averages(moe), averages(plain)
    for key, value in found.items():
        torch.testing.assert_close(value, wanted[key], msg=key)
    torch._dynamo.reset()


def test_loading_weights_drops_the_batches_that_waited() -> None:
    moe, other = layer(), layer()
    loss_of(moe, tokens(0)).backward()
    moe.load_state_dict(other.state_dict())
    torch.optim.SGD(moe.parameters(), lr=0.1).step()
    assert moved(moe) == 0


# Other statistics of a step


def test_the_balancing_bias_counts_all_micro_batches() -> None:
    router = build_router(SMoEConfig(bias_balancing=0.5), dim=D, num_experts=C, top_k=1)
    optimizer = torch.optim.SGD(router.parameters(), lr=0.0)
    load = torch.zeros(C)
    for seed in range(3):
        routing = checkpoint(lambda x: router(x, START)[:3], tokens(seed), use_reentrant=False)
        load += torch.bincount(routing[0].flatten(), minlength=C)
        routing[2].sum().backward()
    optimizer.step()
    assert load.sum() == 3 * T
    assert router.selection.bias.tolist() == (0.5 * (load.mean() - load).sign()).tolist()


def test_the_metric_router_counts_all_micro_batches() -> None:
    router = build_router(MetricConfig(), dim=D, num_experts=C, top_k=1)
    weights = []
    for seed in range(3):
        routing = router(tokens(seed), START)
        weights.append(torch.bincount(routing.affinity.argmax(-1), minlength=C))
    torch.optim.SGD(router.parameters(), lr=0.0).step()
    total = torch.stack(weights).sum(0)
    assert router.statistics.weight.tolist() == torch.where(total >= 2, total, 0).tolist()
