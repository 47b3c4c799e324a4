"""Which implementation runs, and how it is said."""

import logging

import pytest
import torch

import acmoe
from acmoe.ops import dispatch as backend
from acmoe.ops.dispatch import Option, choose, requested, use_backend

OPTIONS = (Option("triton", "no GPU"), Option("grouped_mm", None), Option("torch", None))


@pytest.fixture(autouse=True)
def said(monkeypatch):
    monkeypatch.setattr(backend, "_said", set())
    monkeypatch.delenv("ACMOE_BACKEND", raising=False)


def test_auto_takes_the_first_that_can(caplog):
    with caplog.at_level(logging.INFO, logger="acmoe"):
        assert choose("experts", OPTIONS) == "grouped_mm"
    assert caplog.messages == ["experts runs on grouped_mm"]


def test_what_was_asked_for_goes_first():
    with use_backend("torch"):
        assert choose("experts", OPTIONS) == "torch"


def test_a_backend_that_cannot_is_named_with_its_obstacle_once(caplog):
    with use_backend("triton"), caplog.at_level(logging.INFO, logger="acmoe"):
        assert choose("experts", OPTIONS) == "grouped_mm"
        assert choose("experts", OPTIONS) == "grouped_mm"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "experts: triton cannot, no GPU; running on grouped_mm"


def test_the_environment_asks_for_the_whole_process(monkeypatch):
    monkeypatch.setenv("ACMOE_BACKEND", "torch")
    assert requested() == "torch"
    with use_backend("triton"):
        assert requested() == "triton"
    assert requested() == "torch"


def test_an_unknown_backend_is_refused(monkeypatch):
    monkeypatch.setenv("ACMOE_BACKEND", "cuda")
    with pytest.raises(acmoe.UserError, match="ACMOE_BACKEND='cuda' is unknown; choose"):
        requested()


def test_a_cpu_layer_runs_on_torch_and_says_so(caplog):
    moe = acmoe.MoE(dim=8, hidden=8, num_experts=2, top_k=1)
    state = acmoe.RoutingState.identity(num_tokens=3, num_clusters=2, dim=8)
    with caplog.at_level(logging.INFO, logger="acmoe"):
        moe(torch.randn(3, 8), state)
    assert "experts runs on torch" in caplog.messages
