"""The images of the page under attack: pictures inside the radius, changed experts, reasons."""

from pathlib import Path
from typing import Any

import pytest
import torch

from acmoe.analyze.record import LayerRecord
from acmoe.errors import UserError
from acmoe.report import attacked
from acmoe.report.attacked import _layer
from acmoe.report.content import report_data
from acmoe.report.routing import RoutingReader
from png_levels import decoded


def test_every_image_run_has_its_images_under_attack(image_data: dict[str, Any]) -> None:
    assert [run["routing"]["soft"] for run in image_data["runs"]] == [False, False, True]
    clean = [decoded(one["src"]).astype(int) for one in image_data["samples"][0]["images"]]
    for run in image_data["runs"]:
        routing, found = run["routing"], run["routing"]["attacked"]
        assert found["how"] == "FGSM, radius 4/255"
        assert found["count"] == 64
        assert 0 <= found["right_attacked"] <= 64 and 0 <= found["right"] <= 64
        assert len(found["images"]) == len(found["predicted"]) == 12
        away = [
            abs(decoded(src) - one).max() for src, one in zip(found["images"], clean, strict=True)
        ]
        assert max(away) == 4  # levels of 255: one step of FGSM uses the whole radius
        for layer, moved in zip(routing["layers"], found["layers"], strict=True):
            assert len(moved["first"]) == len(moved["gate"]) == len(layer["first"])
            assert 0 <= moved["moved"] <= 100
            assert set(moved["first"]) <= set(range(layer["experts"]))


def layer(first: list[int]) -> LayerRecord:
    """Two experts; the gate of the first choice is 0.7, of the other 0.3."""
    affinity = torch.tensor([[1.0 - one, float(one)] for one in first])
    return LayerRecord(
        input=torch.zeros(0, 4),
        scaled=torch.zeros(0, 4),
        affinity=affinity,
        expert_ids=torch.tensor([[1 - one, one] for one in first]),
        gate=torch.tensor([[0.3, 0.7]] * len(first)),
        cluster=torch.full((len(first),), -1),
        scale=torch.ones(2, 4),
        scale_varies=False,
        adaptive=False,
        grid=(2, 2),
    )


def test_patches_that_change_their_first_expert_are_counted() -> None:
    before, after = [0, 1, 1, 0, 0, 1, 0, 0], [0, 1, 0, 0, 1, 1, 1, 0]
    found = _layer(layer(before), layer(after), 4)
    assert found == {"first": after[:4], "gate": [0.7] * 4, "moved": 37.5}  # 3 of 8


def test_a_model_that_cannot_be_attacked_keeps_its_clean_routing(
    image_runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise UserError("the gradient is not finite")

    monkeypatch.setattr(attacked, "attacked_images", refuse)
    (run,) = report_data(image_runs[:1], RoutingReader(tokens=64, device="cpu"))["runs"]
    reason = "the images could not be attacked: the gradient is not finite"
    assert run["routing"]["attacked"] == reason
    assert run["notes"] == [reason]
    assert len(run["routing"]["layers"][0]["first"]) == 12 * 16


def test_texts_have_no_attack(text_data: dict[str, Any]) -> None:
    assert [run["routing"]["attacked"] for run in text_data["runs"]] == [None, None]
    assert [run["routing"]["soft"] for run in text_data["runs"]] == [False, False]
