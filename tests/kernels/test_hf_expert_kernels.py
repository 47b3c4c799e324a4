"""Experts of transformers on the Triton kernels, against transformers' own loop."""

import pytest

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
