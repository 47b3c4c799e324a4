"""A loaded model is the saved one."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from saved_models import TOKENS, small, weights_of

from acmoe.config.routing import AdaptiveConfig, CosineConfig, RouterConfig, StableConfig
from acmoe.errors import UserError
from acmoe.models.checkpoint import load, save
from acmoe.models.text.decoder import LanguageModel
from acmoe.routing.baselines.stable import StableRouter


@pytest.mark.parametrize(
    ("router", "changes"),
    [
        ("smoe", {}),
        ("adaptive", {"placement": "skip-1", "repeats": 3}),
        (AdaptiveConfig(statistics="prefix", base=CosineConfig(proj_dim=3), mix=2), {}),
        ("stable", {"norm": "pre", "position": "rope"}),
        ("hash", {"layers": ("moe",), "placement": (1,)}),
    ],
    ids=["smoe", "adaptive", "nested", "stable-modern", "tuples"],
)
def test_a_round_trip_is_bitwise(
    tmp_path: Path, router: str | RouterConfig, changes: dict[str, Any]
) -> None:
    model = small(router, **changes)
    save(model, tmp_path / "model")
    again = load(tmp_path / "model")
    assert isinstance(again, LanguageModel)
    assert again.config == model.config
    assert not again.training
    for (name, one), (other_name, other) in zip(
        model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert name == other_name
        assert torch.equal(one, other) and one.requires_grad == other.requires_grad
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json",
        weights_of(tmp_path / "model").name,
    ]


def test_dtypes_survive(tmp_path: Path) -> None:
    model = small().bfloat16()
    save(model, tmp_path)
    again = load(tmp_path)
    for (name, one), (_, other) in zip(
        model.state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert one.dtype == other.dtype and torch.equal(one, other), name
    assert again.embed.weight.dtype == torch.bfloat16
    # Running statistics stay float32 whatever the weights are.
    assert {b.dtype for b in again.buffers()} == {torch.float32}


def test_the_stage_of_a_stable_router_survives(tmp_path: Path) -> None:
    model = small(StableConfig())
    for layer in model.moe_layers():
        assert isinstance(layer.router, StableRouter)
        layer.router.freeze()
    save(model, tmp_path)
    again = load(tmp_path)
    assert isinstance(again, LanguageModel)
    assert [layer.router.stage for layer in again.moe_layers()] == [2, 2]


def test_loading_leaves_the_random_stream_alone(tmp_path: Path) -> None:
    save(small(), tmp_path)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load(tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_saving_again_replaces_the_weights(tmp_path: Path) -> None:
    model = small()
    save(model, tmp_path)
    with torch.no_grad():
        model.embed.weight.add_(1.0)
    save(model, tmp_path)
    assert torch.equal(load(tmp_path).embed.weight, model.embed.weight)
    weights_of(tmp_path)  # there is one file, the new one


@pytest.mark.parametrize("call", [1, 2])
def test_a_crash_while_saving_leaves_the_old_model(
    tmp_path: Path, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    save(model, tmp_path)
    before = model.embed.weight.clone()
    with torch.no_grad():
        model.embed.weight.add_(1.0)
    calls = []
    real = os.replace

    def crash(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == call:
            raise OSError("disk full")
        real(source, target)

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(UserError, match=r"cannot write .*disk full; make room"):
        save(model, tmp_path)
    assert torch.equal(load(tmp_path).embed.weight, before)
    assert not list(tmp_path.glob(".*"))


def test_nothing_executable_is_written(tmp_path: Path) -> None:
    save(small(), tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    assert document["format"] == 2
    assert document["family"] == "language"
    assert document["model"]["router"]["name"] == "adaptive"
    assert load_file(weights_of(tmp_path)).keys() == small().state_dict().keys()
