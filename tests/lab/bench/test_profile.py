"""Profiles of a training step in the requested variant."""

import pytest

from acmoe.errors import UserError
from acmoe.lab.bench.profile import ProfileConfig, bench_profile


@pytest.mark.slow
def test_a_profile_is_of_the_model_with_its_options() -> None:
    config = ProfileConfig(
        models=("switch-nano",), options=("block=32", "repeats=1"), batch=1, device="cpu", top=3
    )
    rows = bench_profile(config).rows
    assert {row["subject"] for row in rows} == {"switch-nano, block=32, repeats=1, smoe, eager"}
    whole, *parts = rows
    assert whole["kernel"] == "all" and whole["share"] == 1
    assert len(parts) == 4  # three, and the rest as one
    assert sum(row["us"] for row in parts) == pytest.approx(whole["us"])


@pytest.mark.parametrize("option", [{"router": "adaptive"}, {"variant": "graph"}, {"batch": 3}])
def test_options_of_a_step_are_refused_where_layers_alone_are_profiled(option: dict) -> None:
    with pytest.raises(UserError, match="is of a training step; name its models"):
        ProfileConfig(shapes=("tiny",), **option)


def test_options_of_a_layer_are_refused_where_steps_alone_are_profiled() -> None:
    with pytest.raises(UserError, match="statistics=running are of a layer; name its shapes"):
        ProfileConfig(models=("switch-nano",), statistics="running")
    with pytest.raises(UserError, match=r"tokens=\(4,\) are of a layer; name its shapes"):
        ProfileConfig(models=("switch-nano",), tokens=(4,))
    with pytest.raises(UserError, match="forward=True is of a layer; name its shapes"):
        ProfileConfig(models=("switch-nano",), forward=True)
    config = ProfileConfig(models=("switch-nano",), dtype="fp16", device="cpu")
    with pytest.raises(UserError, match="precision='fp16' is unknown; choose bf16 or fp32"):
        bench_profile(config)


def test_options_without_a_model_are_refused() -> None:
    with pytest.raises(UserError, match="name the models they fit"):
        bench_profile(ProfileConfig(options=("block=32",), device="cpu"))


def test_a_forward_profile_has_no_backward() -> None:
    found = {}
    for forward in (False, True):
        config = ProfileConfig(
            shapes=("tiny",), tokens=(8,), forward=forward, dtype="fp32", device="cpu", top=1000
        )
        rows = bench_profile(config).rows
        note = ", forward" if forward else ""
        assert {row["subject"] for row in rows} == {f"tiny@8, plain{note}"}
        found[forward] = [row["kernel"] for row in rows if "Backward" in row["kernel"]]
    assert found[False] and not found[True]
