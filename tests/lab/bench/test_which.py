"""The list of kernels on a CPU: every op answers for itself."""

import pytest
import torch

from acmoe.errors import UserError
from acmoe.lab.bench.implementations.ours import new_moe
from acmoe.lab.bench.shapes import SHAPES, find_shape
from acmoe.lab.bench.which import baselines, which
from acmoe.ops.dispatch import OPS, record_choices, use_backend
from acmoe.ops.experts.settings import tables
from acmoe.ops.native.library import missing

CPU = torch.device("cpu")
OLMOE = SHAPES["olmoe"]
# What a CPU runs in float32: the definitions, but for the statistics of clusters, the sort, the
# experts without gradients, and the router of few tokens.
NATIVE = "cpu" if missing() is not None else "native"
ON_CPU = {
    "route": "cpu",  # OLMoE has too many router weights and experts for the C kernels
    "measure_dispersion": NATIVE,
    "measure_scale": NATIVE,
    "measure_prefix_scale": NATIVE,
    "theorem_weights": NATIVE,
    "sort_rows": NATIVE,
    "add_batch": "cpu",
    "expert_mlp": "cpu",
}
RUNNERS = {"language model's blocks": "fast path", "Swin's window attention": "plain path"}


def running() -> dict[str, str]:
    return {choice.op: choice.backend for choice in which(CPU, torch.float32, OLMOE) if choice.runs}


def test_every_op_and_runner_is_listed_with_one_kernel_that_runs_and_reasons_for_the_others() -> (
    None
):
    choices = which(CPU, torch.bfloat16, OLMOE)
    assert {choice.op for choice in choices} == {*OPS, *RUNNERS}
    for op in OPS:
        kernels = {choice.backend: choice for choice in choices if choice.op == op}
        assert list(kernels) == [kernel.name for kernel in OPS[op].kernels]
        # Tokens are bf16 here, which the statistics' kernel does not take; what it adds is float32,
        # what is sorted are integers, and weights of Theorem 1 are float64.
        runs = ON_CPU[op] if op in ("add_batch", "sort_rows", "theorem_weights") else "torch"
        assert [name for name, choice in kernels.items() if choice.runs] == [runs]
        reason = kernels["triton"].unsupported or ""
        assert "CUDA device" in reason
        assert kernels["torch"].unsupported is None
    assert {op: running()[op] for op in RUNNERS} == RUNNERS


def test_a_request_that_cannot_be_met_still_names_what_runs() -> None:
    with use_backend("grouped_mm"):
        assert running() == {
            **dict.fromkeys(OPS, "torch"),
            **ON_CPU,
            **RUNNERS,
        }


def test_an_interpreter_that_is_asked_for_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with use_backend("triton"):
        found = running()
    gemms = ("up, no gradients", "hidden", "down", "input", "down_weight", "up_weight")
    parts = [f"expert_mlp: {gemm}" for gemm in gemms]
    parts += ["window_attention: forward", "window_attention: backward"]
    runners = dict.fromkeys(RUNNERS, "fast path")
    assert found == {**dict.fromkeys((*OPS, *parts), "triton"), **runners}


def test_the_plain_path_is_named_where_the_environment_asks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACMOE_FAST", "never")
    assert running()["language model's blocks"] == "plain path"


def test_baselines_that_can_take_part_have_no_reason_against_it() -> None:
    found = {choice.backend: choice for choice in baselines(CPU, torch.bfloat16, OLMOE)}
    assert found["acmoe"].runs and found["acmoe"].unsupported is None
    assert not found["sonicmoe"].runs and found["sonicmoe"].unsupported


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("ACMOE_GLUON", "yes", "ACMOE_GLUON='yes' is unknown"),
        ("ACMOE_KEEP_ATTENTION", "yes", "ACMOE_KEEP_ATTENTION='yes' is unknown"),
        ("ACMOE_NATIVE", "yes", "ACMOE_NATIVE='yes' is unknown"),
        ("ACMOE_KEEP_ROUTER", "yes", "ACMOE_KEEP_ROUTER='yes' is unknown"),
        ("ACMOE_TUNED", "nowhere.json", "ACMOE_TUNED=nowhere.json does not exist"),
    ],
)
def test_an_unknown_option_is_named_on_any_machine(
    name: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    tables.clear_cache()
    with pytest.raises(UserError, match=reason):
        which(CPU, torch.bfloat16, OLMOE)
    monkeypatch.undo()
    tables.clear_cache()


@pytest.mark.parametrize("name", ["tiny-relu", "tiny", "nano"])
def test_the_experts_kernel_on_a_cpu_is_the_one_that_a_layer_runs(name: str) -> None:
    shape = find_shape(name)
    layer = new_moe(shape, "smoe")
    with torch.no_grad(), record_choices() as choices:
        layer(torch.randn(2, shape.dim))
    listed = [one for one in which(CPU, torch.float32, shape) if one.op == "expert_mlp"]
    runs = [one.backend for one in listed if one.runs]
    assert runs == [one.kernel for one in choices if one.op == "expert_mlp"] == [NATIVE]


@pytest.mark.skipif(missing() is not None, reason="there is no C compiler")
def test_a_large_layer_s_reason_against_c_is_its_size() -> None:
    listed = which(CPU, torch.float32, find_shape("granite"))
    reason = {one.backend: one.unsupported for one in listed if one.op == "expert_mlp"}["native"]
    assert reason == "it takes up to 524,288 weights, in one thread"
