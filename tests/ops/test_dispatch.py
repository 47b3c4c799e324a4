"""An op runs the first kernel that can serve a call, and says which."""

import logging

import pytest
import torch
from torch import Tensor

import acmoe
from acmoe.ops import dispatch
from acmoe.ops.dispatch import Op, record_choices, requested, use_backend
from acmoe.ops.native.library import missing


def double(x: Tensor, *, times: int = 2) -> Tensor:
    """The definition."""
    return x * times


def build(**reasons: str | None) -> Op:
    """An op with three kernels; those that are named in `reasons` cannot serve."""
    op = Op(double)

    def add(name: str) -> None:
        op.register(name, unsupported=lambda x: reasons.get(name))(
            lambda x, *, times=2: f"{name} {times}"
        )

    add("triton")
    add("grouped_mm")
    op.register("sonicmoe", unsupported=lambda: None, automatic=False)(lambda x, **_: "sonicmoe")
    return op


X = torch.ones(1)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(dispatch, "_logged", set())
    monkeypatch.delenv("ACMOE_BACKEND", raising=False)


def test_the_first_kernel_that_can_serves_and_the_definition_where_none_can(caplog):
    with caplog.at_level(logging.INFO, logger="acmoe"):
        assert build()(X, times=3) == "triton 3"
        assert build(triton="no GPU")(X) == "grouped_mm 2"
        assert build(triton="no GPU", grouped_mm="no bf16")(X, times=3) == 3.0
    assert caplog.messages == [
        f"double runs on {name}" for name in ("triton", "grouped_mm", "torch")
    ]


def test_a_call_on_a_cpu_asks_no_kernel_of_triton_unless_it_interprets(monkeypatch):
    asked = []
    op = Op(double)
    op.register("triton", unsupported=lambda x: asked.append(x), by_triton=True)(lambda x: "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert op(X) == 2.0 and not asked
    assert op(x=X) == "triton"  # by keyword: it is asked, and would refuse
    with record_choices() as choices:
        op(X)
    assert choices[0].reasons == {"triton": None, "torch": None}  # whoever looks sees every kernel
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert op(X) == "triton"


def test_every_kernel_that_a_cpu_call_does_not_ask_would_refuse_it(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.randn(8, 4)
    skipped = [op for op in dispatch.OPS.values() if len(op.on_cpu) < len(op.kernels)]
    assert {"route", "sort_rows", "measure_scale", "expert_mlp"} <= {op.name for op in skipped}
    with record_choices() as choices:
        moe = acmoe.MoE(dim=4, hidden=4, num_experts=2, top_k=1, router="adaptive")
        moe(x, moe(x)[1])
        acmoe.fold_statistics(moe)
    asked = [choice for choice in choices if dispatch.OPS[choice.op] in skipped]
    assert {"route", "sort_rows", "expert_mlp"} <= {choice.op for choice in asked}
    for choice in asked:
        assert choice.reasons["triton"] is not None, choice


def test_a_kernel_that_is_asked_for_goes_first():
    with use_backend("torch"):
        assert build()(X) == 2.0
    with use_backend("sonicmoe"):
        assert build()(X) == "sonicmoe"  # never chosen unasked


def test_a_kernel_that_cannot_serve_is_named_with_its_reason_once(caplog):
    op = build(triton="no GPU")
    with use_backend("triton"), caplog.at_level(logging.INFO, logger="acmoe"):
        assert op(X) == op(X) == "grouped_mm 2"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "double: triton cannot serve, no GPU; running on grouped_mm"


def test_a_reason_sees_the_arguments_it_names_by_position_by_keyword_and_by_default():
    seen = []
    op = Op(double)
    op.register("triton", unsupported=lambda times: seen.append(times))(lambda x, **_: None)
    op(X)
    op(x=X, times=5)
    assert seen == [2, 5]
    with pytest.raises(AssertionError):
        op.register("triton", unsupported=lambda unknown: None)


def test_choices_are_recorded_with_the_reasons_of_the_others():
    op = build(triton="no GPU")
    with record_choices() as choices:
        op(X)
    (choice,) = choices
    assert (choice.op, choice.kernel) == ("double", "grouped_mm")
    assert choice.reasons == {
        "triton": "no GPU",
        "grouped_mm": None,
        "sonicmoe": None,
        "torch": None,
    }
    assert op.reasons(X) == choice.reasons
    with record_choices() as choices:
        pass
    assert choices == []


def test_the_environment_asks_for_the_whole_process(monkeypatch):
    monkeypatch.setenv("ACMOE_BACKEND", "torch")
    assert requested() == "torch"
    with use_backend("triton"):
        assert requested() == "triton"
    assert requested() == "torch"
    assert build()(X) == 2.0  # a call sees the variable, and sees that it is gone
    monkeypatch.delenv("ACMOE_BACKEND")
    assert build()(X) == "triton 2"


def test_an_unknown_backend_is_refused(monkeypatch):
    monkeypatch.setenv("ACMOE_BACKEND", "cuda")
    with pytest.raises(acmoe.UserError, match="ACMOE_BACKEND='cuda' is unknown; choose"):
        requested()


def test_a_cpu_layer_runs_on_kernels_of_a_cpu_and_says_so(caplog):
    moe = acmoe.MoE(dim=8, hidden=8, num_experts=2, top_k=1)
    state = acmoe.RoutingState.identity(num_tokens=3, num_clusters=2, dim=8)
    with caplog.at_level(logging.INFO, logger="acmoe"), record_choices() as choices:
        moe(torch.randn(3, 8), state)
    kernel = "cpu" if missing() else "native"
    assert f"expert_mlp runs on {kernel}" in caplog.messages
    assert {choice.op for choice in choices} == {"route", "sort_rows", "expert_mlp"}
    assert all("CUDA device" in choice.reasons["triton"] for choice in choices)
