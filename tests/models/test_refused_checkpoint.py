"""A model that is damaged, or could not be loaded again, is refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_models import TOKENS, small, weights_of
from torch import nn

from acmoe.errors import UserError
from acmoe.models.checkpoint import load, save
from acmoe.models.text.decoder import LanguageModel
from acmoe.storage.atomic import sha256_of
from acmoe.storage.sealed import write_sealed


def reseal(folder: Path, file: Path) -> None:
    """Make config.json agree with changed weights, so that a later check is the one that speaks."""
    edit_config(folder, weights=file.name, sha256=sha256_of(file))


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
