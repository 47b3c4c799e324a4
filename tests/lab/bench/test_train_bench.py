"""Training steps as the benchmark takes them."""

import pytest
import torch

from acmoe.errors import UserError
from acmoe.lab.bench.models.train import Step, TrainBenchConfig, bench_train
from acmoe.models.registry import create_model
from acmoe.models.text.decoder import LanguageModel


def test_both_routers_of_both_families_take_steps_on_a_cpu() -> None:
    config = TrainBenchConfig(device="cpu", repeat=2, batch=1, precision="fp32")
    rows = bench_train(config).rows
    assert [(row["model"], row["router"]) for row in rows] == [
        *(("switch-nano", router) for router in ("smoe", "adaptive")),
        *(("swin-nano", router) for router in ("smoe", "adaptive")),
    ]
    for row in rows:
        assert row["refused"] is None and row["ms"] > 0
        # one stream of 128 bytes, or one image
        assert row["items_per_step"] == (128 if row["items"] == "tokens" else 1)
        assert row["items_per_second"] == pytest.approx(1e3 * row["items_per_step"] / row["ms"])
    first, second = rows[:2]
    assert first["added_percent"] is None
    assert second["added_percent"] == pytest.approx(100 * (second["ms"] / first["ms"] - 1))


def test_a_step_trains_the_model_and_folds_the_statistics() -> None:
    torch.manual_seed(0)
    model = create_model("switch-nano", router="adaptive", repeats=2, block=16, span=32)
    assert isinstance(model, LanguageModel)
    step = Step(model, 2, TrainBenchConfig(device="cpu", precision="fp32"))
    step()
    first = float(step.loss)
    for _ in range(30):
        step()
    assert float(step.loss) < first  # the same batch again and again
    weights = [value for name, value in model.named_buffers() if name.endswith(".weight")]
    assert weights and all(weight.sum() > 0 for weight in weights)


def test_the_memory_is_full_from_the_first_step_and_stays_in_place() -> None:
    model = create_model("switch-nano", repeats=1, block=16, span=40)
    step = Step(model, 2, TrainBenchConfig(device="cpu", precision="fp32"))
    assert step.memory is not None
    (hidden,) = step.memory.hidden
    assert hidden.shape[1] <= 40 and hidden.shape[1] > 16
    before, place = hidden.clone(), hidden.data_ptr()
    step()
    step()
    assert step.memory.hidden[0].data_ptr() == place
    assert not torch.equal(step.memory.hidden[0], before)


def test_variants_that_need_a_gpu_are_refused_one_by_one() -> None:
    config = TrainBenchConfig(
        models=("swin-nano",),
        routers=("smoe",),
        variants=("eager", "graph"),
        device="cpu",
        batch=1,
        repeat=2,
    )
    graph, eager = bench_train(config).rows
    assert "CUDA" in graph["refused"] and graph["ms"] is None
    assert eager["variant"] == "eager" and eager["ms"] > 0


@pytest.mark.slow
def test_a_model_is_measured_with_the_options_asked_for() -> None:
    config = TrainBenchConfig(
        models=("switch-nano",),
        routers=("smoe",),
        options=("block=32", "repeats=1"),
        device="cpu",
        batch=2,
        repeat=2,
    )
    assert config.kind == "train-block-32-repeats-1"
    (row,) = bench_train(config).rows
    assert row["model"] == "switch-nano, block=32, repeats=1"
    assert row["items_per_step"] == 64  # two streams of 32
    with pytest.raises(UserError, match="name the models they fit"):
        TrainBenchConfig(options=("block=32",))
    with pytest.raises(UserError, match="spam"):
        TrainBenchConfig(models=("switch-nano",), options=("spam=1",))
    with pytest.raises(UserError, match="--routers"):
        TrainBenchConfig(models=("switch-nano",), options=("router=adaptive",))


def test_unknown_models_and_variants_are_refused() -> None:
    with pytest.raises(UserError, match="variant 'fast' is unknown"):
        TrainBenchConfig(variants=("fast",))
    with pytest.raises(UserError, match="model 'switch' is unknown"):
        TrainBenchConfig(models=("switch",))
    with pytest.raises(UserError, match="router='nosuch' is unknown; choose one of smoe"):
        TrainBenchConfig(routers=("smoe", "paper", "nosuch"))


def test_reports_of_different_variants_do_not_replace_each_other() -> None:
    assert TrainBenchConfig().kind == "train"
    assert TrainBenchConfig(variants=("compile+graph",)).kind == "train-compile-graph"
    assert TrainBenchConfig(variants=("eager", "graph")).kind == "train-eager-graph"
