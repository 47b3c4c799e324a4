"""Copies, casts, checkpoints and devices: the averages survive them all, in float32.

T tokens, D features, C clusters.
"""

import copy
import pickle

import pytest
import torch
from filled_layers import assert_same_buffers, filled_layer, see, step_buffers, taker
from router_loops import matrix, rows, scales
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from acmoe import AdaptiveConfig, MoE, MoEStack, RoutingState, SMoEConfig, fold_statistics
from acmoe.routing.statistics import step


@pytest.mark.parametrize(
    "move",
    [
        copy.deepcopy,
        lambda moe: moe.to(torch.bfloat16),
        lambda moe: moe.half(),
        lambda moe: moe.double(),
        lambda moe: moe.bfloat16().float(),
        lambda moe: nn.Sequential(moe).half()[0],
        lambda moe: moe.to("cpu", torch.float16),
    ],
    ids=["deepcopy", "to", "half", "double", "there-and-back", "inside", "device-and-dtype"],
)
def test_copies_and_casts_keep_step_statistics_in_float32_with_their_values(move):
    moe = filled_layer()
    before = copy.deepcopy(moe)
    assert_same_buffers(move(moe), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_cast_model_runs_on_its_float32_averages(dtype):
    moe = filled_layer().to(dtype).eval()
    state = RoutingState.identity(num_tokens=30, num_clusters=3, dim=4)
    y, state = moe(torch.randn(30, 4, dtype=dtype), state)
    assert y.dtype == dtype
    statistics = moe.next_state.statistics
    wanted = matrix(scales(rows(statistics.dispersion.double()), 4))
    assert state.scale.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(state.scale.double(), wanted, rtol=1e-6, atol=1e-6)


def test_a_checkpoint_holds_the_averages_and_not_the_last_batch(tmp_path):
    moe = filled_layer()
    names = {name.rsplit(".", 1)[-1] for name in moe.state_dict()}
    assert {"dispersion", "weight"} <= names
    assert not {"last_dispersion", "last_count", "last_load"} & names
    save_file(moe.state_dict(), tmp_path / "layer.safetensors")
    config = AdaptiveConfig(base=SMoEConfig(bias_balancing=0.01), momentum=0.9)
    other = MoE(dim=4, hidden=8, num_experts=3, top_k=2, router=config)
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    fold_statistics(other)  # it has seen nothing yet, so nothing changes
    assert torch.equal(other.next_state.statistics.dispersion, moe.next_state.statistics.dispersion)
    assert torch.equal(other.next_state.statistics.weight, moe.next_state.statistics.weight)
    assert torch.equal(other.router.base.selection.bias, moe.router.base.selection.bias)
    x = torch.randn(30, 4)
    state = RoutingState.identity(num_tokens=30, num_clusters=3, dim=4)
    told = [layer.eval()(x, state)[1][:4] for layer in (moe, other)]
    for a, b in zip(*told, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("assign", [False, True])
def test_the_scale_follows_every_change_of_the_averages(assign):
    statistics = taker(clusters=1, dim=2).eval()
    x, cluster = torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)
    assert see(statistics, x, cluster).tolist() == [[1.0, 1.0]]
    # s = (1, 3): 1/s = (1, 1/3), mean 2/3, M = (1.5, 0.5); s = (1, 1/3) gives (0.5, 1.5).
    loaded = {"dispersion": torch.tensor([[1.0, 3.0]]), "weight": torch.tensor([9.0])}
    statistics.load_state_dict(loaded, assign=assign)
    torch.testing.assert_close(see(statistics, x, cluster), torch.tensor([[1.5, 0.5]]))
    statistics.dispersion.copy_(torch.tensor([[3.0, 1.0]]))
    torch.testing.assert_close(see(statistics, x, cluster), torch.tensor([[0.5, 1.5]]))
    statistics.weight.zero_()
    assert see(statistics, x, cluster).tolist() == [[1.0, 1.0]]
    other = torch.tensor([9.0])
    while other._version < statistics.weight._version:  # as often written as the buffer
        other.add_(0.0)
    statistics.weight = other
    torch.testing.assert_close(see(statistics, x, cluster), torch.tensor([[0.5, 1.5]]))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_reads_what_is_loaded_into_it_however_often(copied):
    """The tensors of a copy count their versions anew, and come to those of the original."""
    statistics = taker(clusters=1, dim=2).eval()
    x, cluster = torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)
    for _ in range(4):
        statistics.dispersion.fill_(1.0)
        statistics.weight.fill_(9.0)
    assert see(statistics, x, cluster).tolist() == [[1.0, 1.0]]
    # s = (1, 3): 1/s = (1, 1/3), mean 2/3, M = (1.5, 0.5).
    loaded = {"dispersion": torch.tensor([[1.0, 3.0]]), "weight": torch.tensor([9.0])}
    for times in range(1, 6):
        other = copied(statistics)
        for _ in range(times):
            other.load_state_dict(loaded)
        torch.testing.assert_close(see(other, x, cluster), torch.tensor([[1.5, 0.5]]))


def test_a_pickle_holds_nothing_that_is_computed_from_the_config():
    """A later version may move classes of the library that no user sees."""
    moe = filled_layer()
    moe(torch.randn(30, 4))
    assert b"ScaleOptions" not in pickle.dumps(moe)


def test_a_pickle_of_an_earlier_version_goes_on_training():
    """Earlier versions kept forwards = None after the first update, and `has_pending` as `waiting`.

    In the copy a batch is pending, as in the original, and a forward is counted from zero.
    """
    moe = filled_layer()
    for one in moe.modules():
        if isinstance(one, step.StepStatistics):
            one.forwards = None
            one.__dict__.pop("has_pending", None)
            one.waiting = True
    other = pickle.loads(pickle.dumps(moe)).train()
    found = [one for one in other.modules() if isinstance(one, step.StepStatistics)]
    assert all(one.has_pending and "waiting" not in one.__dict__ for one in found)
    other(torch.randn(30, 4), RoutingState.identity(num_tokens=30, num_clusters=3, dim=4))
    assert max(one.forwards for one in found) == 1


def test_a_scale_that_was_handed_on_does_not_change_when_statistics_are_folded():
    moe = filled_layer()
    tokens = RoutingState.identity(num_tokens=30, num_clusters=3, dim=4)
    _, state = moe(torch.randn(30, 4), tokens)
    kept = state.scale.clone()
    fold_statistics(moe)
    _, later = moe(torch.randn(30, 4), tokens)
    assert torch.equal(state.scale, kept)
    assert not torch.equal(later.scale, kept)


def test_a_model_made_in_inference_mode_runs():
    with torch.inference_mode():
        moe = MoE(dim=4, hidden=8, num_experts=3, top_k=2, router="adaptive").eval()
        moe.load_state_dict(
            {k: v for k, v in filled_layer().state_dict().items() if "selection" not in k}
        )
        tokens = RoutingState.identity(num_tokens=5, num_clusters=3, dim=4)
        _, state = moe(torch.randn(5, 4), tokens)
    wanted = filled_layer().eval()(torch.randn(5, 4), tokens)[1].scale
    assert torch.equal(state.scale, wanted)


def test_a_layer_built_on_the_meta_device_begins_with_empty_statistics():
    with torch.device("meta"):
        moe = MoE(dim=4, hidden=8, num_experts=3, top_k=2, router="adaptive")
    moe.to_empty(device="cpu")
    for value in step_buffers(moe).values():
        assert value.dtype == torch.float32
        assert (value == 0).all()
    loaded = filled_layer()
    moe.load_state_dict({k: v for k, v in loaded.state_dict().items() if "selection" not in k})
    y, _ = moe(torch.randn(5, 4), RoutingState.identity(num_tokens=5, num_clusters=3, dim=4))
    assert y.isfinite().all()


def test_a_meta_layer_cast_before_it_is_emptied_keeps_float32_statistics():
    with torch.device("meta"):
        moe = MoE(dim=4, hidden=8, num_experts=3, top_k=2, router="adaptive")
    moe = moe.bfloat16().to_empty(device="cpu")
    assert moe.experts.up.dtype == torch.bfloat16
    for value in step_buffers(moe).values():
        assert value.dtype == torch.float32
        assert (value == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_statistics_are_float32_under_any_default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        config = AdaptiveConfig(base=SMoEConfig(bias_balancing=0.01))
        moe = MoE(dim=4, hidden=8, num_experts=3, top_k=2, router=config)
        metric = MoE(dim=4, hidden=8, num_experts=3, top_k=2, router="metric")
        y, state = moe(torch.randn(6, 4, dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in moe.parameters()} == {dtype}
    assert {b.dtype for b in (*moe.buffers(), *metric.buffers())} == {torch.float32}
    assert {t.dtype for t in (y, state.scale, state.aux_loss)} == {torch.float32}


def test_what_is_written_through_data_of_a_state_dict_is_read():
    """An average of models may write `.data`, which leaves a tensor's version as it is."""
    statistics = taker(clusters=1, dim=2).eval()
    x, cluster = torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)
    assert see(statistics, x, cluster).tolist() == [[1.0, 1.0]]
    # s = (1, 3): 1/s = (1, 1/3), mean 2/3, M = (1.5, 0.5).
    for name, value in statistics.state_dict().items():
        value.data.copy_(torch.tensor([[1.0, 3.0]] if name == "dispersion" else [9.0]))
    torch.testing.assert_close(see(statistics, x, cluster), torch.tensor([[1.5, 0.5]]))


def test_what_is_written_through_data_of_buffers_is_read_after_eval():
    """An average of models that goes over `model.buffers()` asks for no state_dict."""
    statistics = taker(clusters=1, dim=2).eval()
    x, cluster = torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)
    assert see(statistics, x, cluster).tolist() == [[1.0, 1.0]]
    named = dict(statistics.named_buffers())
    named["dispersion"].data.copy_(torch.tensor([[1.0, 3.0]]))
    named["weight"].data.fill_(9.0)
    # s = (1, 3): 1/s = (1, 1/3), mean 2/3, M = (1.5, 0.5).
    found = see(statistics.eval(), x, cluster)
    torch.testing.assert_close(found, torch.tensor([[1.5, 0.5]]))


def lerp_data(average: nn.Module, model: nn.Module) -> None:
    """Move an average as many training loops do: through `.data`, then eval()."""
    for mean, value in zip(tensors_of(average), tensors_of(model), strict=True):
        mean.data.lerp_(value.data, 0.1)
    average.eval()


def lerp_tensors(average: nn.Module, model: nn.Module) -> None:
    """Move an average without `.data`, which no eval() has to follow."""
    with torch.no_grad():
        for mean, value in zip(tensors_of(average), tensors_of(model), strict=True):
            mean.lerp_(value, 0.1)


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


@pytest.mark.parametrize("kind", ["averaged model", "of parameters", "lerp .data", "lerp"])
def test_an_average_of_models_in_evaluation_mode_reads_its_own_statistics(kind):
    """A copy computes its scale from its buffers anew, and must give what the average gives."""
    torch.manual_seed(0)
    router = AdaptiveConfig(statistics="running")
    layers = [MoE(dim=4, hidden=4, num_experts=2, top_k=1, router=router) for _ in range(2)]
    model, x = MoEStack(layers), torch.randn(32, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind in ("averaged model", "of parameters"):
        buffers = kind == "averaged model"
        averaged = AveragedModel(
            model, use_buffers=buffers, multi_avg_fn=get_ema_multi_avg_fn(0.9)
        ).eval()
        average, move = averaged.module, lambda _, model: averaged.update_parameters(model)
    else:
        average = copy.deepcopy(model).eval()
        move = lerp_data if kind == "lerp .data" else lerp_tensors
    for _ in range(4):
        y, state = model(torch.randn(32, 4) * torch.tensor([0.1, 1.0, 2.0, 5.0]))
        (y.square().mean() + state.aux_loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        move(average, model)
        with torch.no_grad():
            expected, _ = copy.deepcopy(average)(x)
            assert torch.equal(average(x)[0], expected)


def test_a_copy_that_was_only_evaluated_does_not_wait_for_other_processes(monkeypatch):
    """An average of the weights on one process of two: a step of the others must not pool it."""
    monkeypatch.setattr(step, "world_size", lambda: 2)
    moe = MoE(dim=4, hidden=4, num_experts=2, top_k=1, router="adaptive")
    statistics = moe.next_state.statistics
    moe.eval().train()
    assert not statistics.seen
    statistics.pending_buffer("last_count")  # as a training forward does
    assert statistics.seen


def test_averages_of_another_measure_are_not_loaded(tmp_path):
    # The variance of a feature is no mean absolute deviation: M would be that of other spreads.
    sizes = {"dim": 4, "hidden": 8, "num_experts": 3, "top_k": 2}
    router = AdaptiveConfig(base=SMoEConfig(bias_balancing=0.01), measure="variance")
    filled, other = filled_layer(), MoE(**sizes, router=router)
    torch.save(filled.state_dict(), tmp_path / "layer.pt")
    saved = torch.load(tmp_path / "layer.pt")
    with pytest.raises(RuntimeError, match=r"averages of measure='mad'.*has measure='variance'"):
        other.load_state_dict(saved)
    assert not other.next_state.statistics.weight.any()
    for name in [name for name in saved if "statistics" in name]:
        del saved[name]
    other.load_state_dict(saved, strict=False)  # as the message says
    # Two conditions that begin with the same weights: empty averages have no measure.
    other.load_state_dict(MoE(**sizes, router=filled.router.config).state_dict())
