"""A loaded model is the saved one, or one line says why it cannot be loaded."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from acmoe.config.routing import AdaptiveConfig, CosineConfig, RouterConfig, StableConfig
from acmoe.errors import UserError
from acmoe.models.checkpoint import load, save
from acmoe.models.registry import create_model
from acmoe.models.text.decoder import LanguageModel
from acmoe.routing.baselines.stable import StableRouter
from acmoe.routing.statistics.step import fold_statistics
from acmoe.storage.atomic import sha256_of
from acmoe.storage.sealed import write_sealed

TOKENS = torch.arange(24).view(2, 12)


def small(router: str | RouterConfig = "adaptive", **changes: Any) -> LanguageModel:
    torch.manual_seed(0)
    sizes = {"dim": 16, "hidden": 16, "repeats": 2, "num_experts": 4, "span": 8, "block": 8}
    model = create_model("glam-nano", router=router, **{**sizes, **changes})
    assert isinstance(model, LanguageModel)
    model(TOKENS)
    fold_statistics(model)
    return model.eval()


def weights_of(folder: Path) -> Path:
    (file,) = folder.glob("weights-*.safetensors")
    return file


def reseal(folder: Path, file: Path) -> None:
    """Make config.json agree with changed weights, so that a later check is the one that speaks."""
    edit_config(folder, weights=file.name, sha256=sha256_of(file))


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


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields and renew the seal: a forgery, which other checks must catch."""
    document = json.loads((folder / "config.json").read_text())
    del document["seal"]
    for key, value in changes.items():
        if value is None:
            del document[key]
        else:
            document[key] = value
    write_sealed(folder / "config.json", document)
    if "format" in changes:
        text = (folder / "config.json").read_text()
        (folder / "config.json").write_text(text.replace('"format": 2', '"format": 9'))


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    file = weights_of(folder)
    tensors = load_file(file)
    for key, value in changes.items():
        tensors.pop(key.replace("__", "."), None)
        if value is not None:
            tensors[key.replace("__", ".")] = value
    save_file(tensors, file)
    reseal(folder, file)


def edit_model(folder: Path, **changes: Any) -> None:
    document = json.loads((folder / "config.json").read_text())
    edit_config(folder, model={**document["model"], **changes})


def swap(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def cut(folder: Path) -> None:
    file = weights_of(folder)
    file.write_bytes(file.read_bytes()[:-100])


def cut_and_reseal(folder: Path) -> None:
    cut(folder)
    reseal(folder, weights_of(folder))


BROKEN = {
    "no such folder": (lambda f: (f / "config.json").unlink(), "holds no model"),
    "no weights": (lambda f: weights_of(f).unlink(), "is missing"),
    "not JSON": (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
    "not an object": (lambda f: (f / "config.json").write_text("[]"), "is no JSON object"),
    "another format": (lambda f: edit_config(f, format=9), "config.json was changed"),
    "a key less": (lambda f: edit_config(f, sha256=None), "lacks 'sha256'"),
    "an unknown family": (lambda f: edit_config(f, family="vision-2"), "family 'vision-2'"),
    "an unknown field": (lambda f: edit_config(f, model={"depth": 3}), "unknown setting depth"),
    "a config that lacks a field": (
        lambda f: edit_config(f, model={"dim": 3}),
        "lacks the setting",
    ),
    "another top_k, same seal": (
        lambda f: swap(f / "config.json", '"top_k": 2', '"top_k": 3'),
        "config.json was changed after it was written",
    ),
    "no seal": (lambda f: swap(f / "config.json", '"seal"', '"sea1"'), "was changed"),
    "terabytes": (lambda f: edit_model(f, dim=10**9, heads=1), "too few for dim=1000000000"),
    "endless": (lambda f: edit_model(f, repeats=10**7), "too few for repeats=10000000"),
    "nested too deeply": (lambda f: (f / "config.json").write_text("[" * 200_000), "not JSON"),
    "NaN": (
        lambda f: edit_weights(f, unembed__bias=torch.full((256,), float("nan"))),
        "unembed.bias holds NaN",
    ),
    "integers": (
        lambda f: edit_weights(f, unembed__bias=torch.zeros(256, dtype=torch.int64)),
        "unembed.bias of torch.int64; the model needs torch.float32",
    ),
    "truncated": (cut, "is damaged"),
    "truncated, checksum forged": (cut_and_reseal, "no safetensors file"),
    "a tensor missing": (lambda f: edit_weights(f, unembed__bias=None), "lacks unembed.bias"),
    "a tensor too many": (
        lambda f: edit_weights(f, spare=torch.zeros(2)),
        "has unknown spare",
    ),
    "a tensor misshaped": (
        lambda f: edit_weights(f, unembed__bias=torch.zeros(3)),
        "unembed.bias of shape \\(3,\\).*needs \\(256,\\)",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN)
def test_a_damaged_model_is_refused_in_one_line(tmp_path: Path, damage: Any, message: str) -> None:
    save(small(), tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", [None, 5, b"model", ["model"]])
def test_what_is_no_path_is_named(path: Any) -> None:
    for use in (load, lambda path: save(small(), path)):
        with pytest.raises(UserError) as mistake:
            use(path)
        assert str(mistake.value).startswith(f"path={path!r} names no folder; pass")


def test_a_foreign_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Linear is not a model of this library"):
        save(nn.Linear(2, 2), tmp_path)


def norm_weights(model: LanguageModel) -> None:
    nn.utils.parametrizations.weight_norm(model.blocks[0].attention.query)


def tie(model: LanguageModel) -> None:
    model.unembed.weight = model.embed.weight


def widen(model: LanguageModel) -> None:
    model.unembed = nn.Linear(16, 300)


def empty(model: LanguageModel) -> None:
    model.to("meta")


def spoil(model: LanguageModel) -> None:
    model.unembed.bias.data[0] = float("nan")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (norm_weights, "LanguageModel lacks blocks.0.attention.query.weight .*it was changed"),
        (tie, "embed.weight and unembed.weight are one tensor"),
        (widen, r"unembed.* of shape \(300.*; its config needs \(256"),
        (spoil, "unembed.bias holds NaN or infinity"),
        (empty, "LanguageModel: .* is on the meta device, without values; load them first"),
    ],
)
def test_what_could_not_be_loaded_replaces_no_model(
    tmp_path: Path, change: Any, message: str
) -> None:
    model = small()
    save(model, tmp_path)
    wanted = model(TOKENS).logits
    change(model)
    with pytest.raises(UserError, match=message):
        save(model, tmp_path)
    assert torch.equal(load(tmp_path)(TOKENS).logits, wanted)
