"""T tokens, D features."""

import json
import math
from collections import defaultdict
from dataclasses import replace

import pytest

from acmoe.config.routing import AdaptiveConfig, RandomConfig, SMoEConfig
from acmoe.config.serialize import decode, encode
from acmoe.errors import UserError
from acmoe.lab.study.planned import PlannedMaterials
from acmoe.lab.study.registry import STUDIES
from acmoe.lab.study.size import Size
from acmoe.lab.study.synthetic.grid import synthetic_grid
from acmoe.lab.study.synthetic.run import run_synthetic
from acmoe.lab.study.synthetic.task import SyntheticConfig

TINY = SyntheticConfig(steps=4, batch=32, eval_every=2, held_out=64, hidden=4)
PREVIOUS = AdaptiveConfig(statistics="batch", statistics_of="previous")
CURRENT = AdaptiveConfig(statistics="batch", statistics_of="current")
GRID = synthetic_grid(seeds=(0, 1))


def test_a_run_repeats_itself_to_the_last_bit_and_is_json():
    config = replace(TINY, router=PREVIOUS)
    first = json.dumps(run_synthetic(config))
    assert json.dumps(run_synthetic(config)) == first
    assert "NaN" not in first


def test_a_device_is_refused_because_the_cells_run_on_the_cpu(tmp_path):
    materials = PlannedMaterials(data=tmp_path, work=tmp_path)
    with pytest.raises(UserError, match="study synthetic reads no --device cuda; leave it out"):
        STUDIES["synthetic"].cells(materials, Size(device="cuda"), (0,))
    assert STUDIES["synthetic"].cells(materials, Size(device="cpu"), (0,))
    assert STUDIES["nano"].cells(materials, Size(device="cuda"), (0,))  # which reads it


def test_the_random_scale_repeats_itself_too():
    config = replace(TINY, router=RandomConfig())
    assert run_synthetic(config) == run_synthetic(config)


def test_curves_begin_before_the_first_update_and_end_after_the_last():
    curves = run_synthetic(replace(TINY, steps=5))["curves"]
    assert curves["step"] == [0, 2, 4, 5]
    assert {len(values) for values in curves.values()} == {4}


def test_routers_of_one_seed_begin_with_the_same_first_layer_and_of_another_seed_do_not():
    def begin(**changes):
        return run_synthetic(replace(TINY, **changes))["curves"]["ari_first"][0]

    assert begin(router=PREVIOUS) == begin(router=CURRENT) == begin(router=SMoEConfig())
    assert begin(seed=1) != begin(seed=0)


def test_metrics_are_read_off_the_curves():
    found = run_synthetic(replace(TINY, router=PREVIOUS, threshold=1.0))
    metrics, curves = found["metrics"], found["curves"]
    assert metrics["loss"] == curves["loss"][-1]
    # Trapezoids of the points at 0, 2 and 4.
    a, b, c = curves["ari"]
    assert metrics["ari_area"] == pytest.approx((a + 2 * b + c) / 4)
    assert metrics["ari_best"] == max(curves["ari"][-1], curves["ari_first"][-1])
    # Nothing is perfect after four updates: the run counts with all its steps.
    assert metrics["steps_to_threshold"] == 4
    assert metrics["reached"] == 0


def test_every_figure_that_the_study_shows_is_measured():
    study = STUDIES["synthetic"]
    found = run_synthetic(replace(TINY, router=PREVIOUS))
    assert {metric.key for metric in (*study.compared, *study.descriptive)} <= found[
        "metrics"
    ].keys()
    assert study.curve in found["curves"]


def test_only_routers_with_a_scale_report_one():
    plain = run_synthetic(TINY)["metrics"]
    adaptive = run_synthetic(replace(TINY, router=CURRENT))["metrics"]
    assert adaptive.keys() - plain.keys() == {
        "ari_told",
        "ari_repeated",
        "scale_rms_log",
        "scale_common",
        "scale_truth",
    }
    assert plain["condition"] == plain["condition_plain"]
    assert adaptive["condition"] != adaptive["condition_plain"]
    assert adaptive["scale_rms_log"] > 0


def test_noise_is_measured_at_every_level_asked_for():
    metrics = run_synthetic(replace(TINY, contamination=(0.5, 4.0)))["metrics"]
    levels = {name for name in metrics if "noise" in name}
    assert levels == {f"{what}_noise_{by}" for what in ("loss", "ari", "kept") for by in ("0.5", 4)}
    # The same tokens, moved further: fewer of them keep their expert.
    assert metrics["kept_noise_4"] < metrics["kept_noise_0.5"] < 1


@pytest.mark.slow
def test_a_plain_router_learns_clusters_that_lie_far_apart():
    # Means 6 loose deviations apart: a linear rule errs on about 1 token in 10^4.
    clusters = replace(TINY.clusters, separation=6.0)
    config = SyntheticConfig(layers=1, clusters=clusters, steps=150, eval_every=50)
    found = run_synthetic(config)
    assert found["metrics"]["loss"] < 0.3 * found["curves"]["loss"][0]
    assert found["metrics"]["ari"] > 0.6


def test_told_the_true_clusters_a_router_repeats_them():
    config = SyntheticConfig(layers=1, router=PREVIOUS, oracle="cluster", steps=60, eval_every=60)
    metrics = run_synthetic(config)["metrics"]
    assert metrics["ari_told"] == 1
    assert metrics["ari_repeated"] == metrics["ari"]
    assert metrics["scale_truth"] == pytest.approx(1)


def test_a_router_trained_by_sgd_moves_otherwise_than_by_adam():
    adam, sgd = (
        run_synthetic(replace(TINY, router_optimizer=name))["metrics"]["loss"]
        for name in ("adam", "sgd")
    )
    assert adam != sgd


def test_every_setting_of_the_grid_has_its_baseline_and_differs_in_the_router_alone():
    settings = defaultdict(dict)
    for condition, factors, config in GRID:
        key = json.dumps(factors, sort_keys=True), config.seed
        assert condition not in settings[key], f"{condition} stands twice in {key}"
        settings[key][condition] = config
    for conditions in settings.values():
        assert "smoe" in conditions
        shared = {
            replace(config, router=SMoEConfig(), oracle="none") for config in conditions.values()
        }
        assert len(shared) == 1


def test_the_grid_covers_what_the_theory_speaks_of():
    for layers in (1, 2):
        here = [(name, factors) for name, factors, _ in GRID if factors["layers"] == layers]
        varied = {name for _, factors in here for name in factors}
        assert {"contrast", "dim", "noise"} <= varied
        wanted = {"smoe", "adaptive-current", "oracle-scale", "oracle-cluster", "random"}
        assert wanted <= {name for name, _ in here}
    assert {config.seed for _, _, config in GRID} == {0, 1}


def test_factors_say_what_the_config_holds():
    for _, factors, config in GRID:
        for name, value in factors.items():
            holder = config if hasattr(config, name) else config.clusters
            assert getattr(holder, name) == value


@pytest.mark.slow
def test_every_condition_of_the_grid_runs():
    distinct = {(name, factors["layers"]): config for name, factors, config in GRID}
    for config in distinct.values():
        short = replace(config, steps=1, batch=64, held_out=64, eval_every=1, contamination=(0.5,))
        assert all(map(math.isfinite, run_synthetic(short)["metrics"].values()))


def test_configs_survive_being_stored():
    for _, _, config in GRID[::7]:
        stored = json.loads(json.dumps(encode(config)))
        assert decode(stored, SyntheticConfig, "stored") == config
