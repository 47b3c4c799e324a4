"""Calibration by many batches logs nothing: each batch is an update, though no optimizer steps."""

import pytest
from attached import ids
from small_models import build

import acmoe
from acmoe.ops import dispatch
from acmoe.routing.statistics import step


def test_a_long_calibration_is_not_taken_for_training_without_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "_logged", set())
    monkeypatch.setattr(step, "PATIENCE", 3)
    acmoe.calibrate(acmoe.attach(build("mixtral")), [ids(2, 6, seed) for seed in range(4)])
    assert caplog.messages == []
