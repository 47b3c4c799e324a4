"""Experts of transformers on the Triton kernels, against transformers' own loop."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytest.importorskip("transformers")

import acmoe.hf
from acmoe.ops.dispatch import record_choices
from expert_modules import E, assert_near, experts_of, outcome, routed


@pytest.mark.parametrize(
    ("family", "op"),
    [
        ("qwen3_moe", "expert_mlp"),
        ("gpt_oss", "clamped_swiglu"),
        pytest.param("nemotron_h-relu", "expert_mlp", marks=pytest.mark.slow),
        pytest.param("openai_privacy_filter", "clamped_swiglu", marks=pytest.mark.slow),
    ],
)
def test_output_and_gradients_are_those_of_eager(family: str, op: str, device: str) -> None:
    experts = experts_of(family).to(device)
    x, ids, gate = (one.to(device) for one in routed(9))
    wanted = outcome(experts, "eager", x, ids, gate)
    with record_choices() as choices:
        found = outcome(experts, "acmoe", x, ids, gate)
    assert {choice.op: choice.kernel for choice in choices}[op] == "triton"
    assert (acmoe.hf.experts_reason(experts) is None) == (op == "expert_mlp")
    assert_near(found, wanted, 2e-3 if device == "cuda" else 1e-5)


@pytest.mark.slow
def test_an_id_of_another_device_contributes_nothing(device: str) -> None:
    experts = experts_of("qwen3_moe").to(device)
    experts._is_expert_parallel = True  # type: ignore[assignment]
    x, ids, gate = (one.to(device) for one in routed(5))
    ids[3] = E
    found = outcome(experts, "acmoe", x, ids, gate)
    assert not found["out"][3].any() and not found["gate"][3].any() and not found["x"][3].any()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_frozen_weights_get_no_gradient_and_cost_no_gemm(
    compiled: bool, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    from acmoe.ops.experts.triton import launched

    experts = experts_of("qwen3_moe").to(device)
    call = [one.to(device) for one in routed(9)]
    wanted = outcome(experts, "eager", *call)
    experts.gate_up_proj.requires_grad_(False)
    gemms, run = [], launched.run_weight

    def noted(name: str, *args: Any, **options: Any) -> Tensor:
        gemms.append(name)
        return run(name, *args, **options)

    monkeypatch.setattr(launched, "run_weight", noted)
    if compiled:
        torch.compiler.reset()
        experts.forward = torch.compile(experts.forward, fullgraph=True, backend="aot_eager")
    found = outcome(experts, "acmoe", *call)
    assert gemms == ["down_weight"]
    del wanted["gate_up_proj"]
    assert_near(found, wanted, 2e-3 if device == "cuda" else 1e-5)
