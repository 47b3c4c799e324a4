"""The tuner on a CPU: its GEMMs by blocks interpreted, by pipelines emulated. Times mean nothing
there; that every candidate computes the GEMM, and the winner is written, does."""

import json

import pytest
import torch

from slow_cases import mostly_slow

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels of a CPU's tensors are interpreted and emulated"
)
CPU = torch.device("cpu")
PIPELINES = (
    "pipeline_hidden",
    "pipeline_down",
    "pipeline_input",
    "pipeline_down_weight",
    "pipeline_up_weight",
)


@pytest.fixture
def tuner(hopper_launch, fresh_choice, monkeypatch):
    """With a tile for each GEMM, and pipelines as if this were a Hopper card."""
    from acmoe.lab.bench.tune import candidates as tune_candidates
    from acmoe.lab.bench.tune import search as tune

    monkeypatch.setattr(fresh_choice, "gluon_unsupported", lambda device: None)
    monkeypatch.setattr(tune_candidates, "_LARGE", ())
    monkeypatch.setattr(tune_candidates, "_FEW", ())
    monkeypatch.setattr(tune_candidates, "_SMALL", ((32, 64, 64, 4, 2),))
    return tune


def copied(monkeypatch, rows, experts=4):
    from acmoe.ops.experts.settings import tables

    table = {f"copy/256/256/{experts}": [False, rows]}
    monkeypatch.setattr(tables, "user_table", lambda: table)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [True, False], ids=["copied", "gathered"])
def test_every_pipeline_computes_the_gemm(rows, tuner, monkeypatch):
    from acmoe.lab.bench.shapes import find_shape
    from acmoe.lab.bench.tune.calls import kernel_calls
    from acmoe.lab.bench.tune.candidates import candidates

    copied(monkeypatch, rows)
    shape = find_shape("37x256x256x4x2")
    calls = kernel_calls(shape, CPU, seed=0)
    counted = {}
    for kernel in PIPELINES:
        tried = candidates(kernel, shape, CPU)
        found = tuner.rank(kernel, calls[kernel], tried, CPU, repeat=2)
        assert sorted(map(str, tried)) == sorted(str(one.candidate) for one in found), kernel
        counted[kernel] = len(tried) - 1
    # Rows: 3 ping-pong, cooperative of 3 and 4 stages, and for "down" one in columns. Weights: of 4
    # forms those that gather, or those that do not; x may be gathered though the gradient is
    # copied. A gathered gradient has no pipeline for the hidden units.
    hidden, second, first = (6, 2, 4) if rows else (0, 2, 2)
    assert counted == dict(zip(PIPELINES, (hidden, 6, 5, second, first), strict=True))


def test_winners_are_written_one_by_one(tuner, tmp_path, monkeypatch):
    from acmoe.lab.bench.shapes import find_shape
    from acmoe.lab.bench.tune import candidates as tune_candidates
    from acmoe.ops.experts.settings import lookup

    copied(monkeypatch, True, experts=2)
    for name, few in (("_PING_PONG", (3,)), ("_COOPERATIVE", ())):
        monkeypatch.setattr(tune_candidates, name, few)
    said, table = [], tmp_path / "tuned.json"
    kernels = ("down", "pipeline_down")
    shape = find_shape("9x256x256x2x1")
    rows = []
    for row in tuner.tune_shape(shape, kernels, table, CPU, 2, 0, said.append):
        rows.append(row)
        assert json.loads(table.read_text())[f"{row['kernel']}/256/256/2"] == row["blocks"]
        assert row["candidates"][0]["ms"] == row["ms"] <= row["second_ms"]
    assert [row["kernel"] for row in rows] == list(kernels)
    assert len(said) == 2 and said[1] == "9x256x256x2x1: pipeline_down, 3 candidates"
    assert lookup.OVERRIDE == {} and lookup.PIPELINE_OVERRIDE == {}


@mostly_slow("name", ["9x24x32x4x2-relu", "9x200x328x2x2"])
def test_a_shape_without_a_pipeline_has_its_blocks_alone(name, tuner, tmp_path):
    """Biases, or no whole tiles."""
    from acmoe.lab.bench.shapes import find_shape

    said, table = [], tmp_path / "tuned.json"
    kernels = ("input", *PIPELINES)
    shape = find_shape(name)
    (row,) = tuner.tune_shape(shape, kernels, table, CPU, 2, 0, said.append)
    assert row["kernel"] == "input" and len(json.loads(table.read_text())) == 1
    assert [line.split(", ")[0] for line in said[1:]] == [
        f"{name}: {pipeline} has no candidate" for pipeline in PIPELINES
    ]
    assert "multiples of" in said[-1] or "multiples of" in said[-2]
