"""Save and load a model as a folder: weights (safetensors) and config.json. Nothing is executable.

Weights are written first, to a file named by their checksum. Replacing config.json, which names
that file, makes the new model current. A crash at any moment leaves the old model intact.
"""

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import acmoe
from acmoe.config.serialize import decode, encode
from acmoe.errors import UserError, check
from acmoe.experts.moe import current_name
from acmoe.models.registry import FAMILIES

FORMAT = 1  # increment when older readers cannot read the folder any more


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write `model` into the folder `path`, replacing a model that may be there."""
    config = getattr(model, "config", None)
    family = next((n for n, found in FAMILIES.items() if isinstance(config, found.config)), None)
    check(
        family is not None,
        f"{type(model).__name__} is not a model of this library; save its state_dict yourself",
    )
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with _replacing(folder) as draft:
        save_file(_flatten(model.state_dict()), draft)
        _sync(draft)
        digest = _sha256(draft)
        weights = f"weights-{digest[:12]}.safetensors"
        os.replace(draft, folder / weights)
    document = {
        "format": FORMAT,
        "acmoe": acmoe.__version__,
        "weights": weights,
        "sha256": digest,
        "family": family,
        "model": encode(config),
    }
    with _replacing(folder) as draft:
        draft.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        _sync(draft)
        os.replace(draft, folder / "config.json")
    for other in folder.glob("weights-*.safetensors"):
        if other.name != weights:
            other.unlink()


def load(path: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> nn.Module:
    """Load the model that `save` wrote, in evaluation mode and in the dtypes it was saved in."""
    folder = Path(path)
    document = _read_document(folder)
    weights = folder / Path(document["weights"]).name
    check(weights.is_file(), f"{weights} is missing; {folder} holds no whole model, save it again")
    check(
        _sha256(weights) == document["sha256"],
        f"{weights} is damaged: its checksum is not the one in config.json; save the model again",
    )
    try:
        tensors = load_file(weights)
    except SafetensorError as error:
        raise UserError(f"{weights} is no safetensors file ({error}); save it again") from error
    family = FAMILIES[document["family"]]
    config = decode(document["model"], family.config, str(folder / "config.json"))
    # Building draws random weights, which are then overwritten: leave the caller's RNG unchanged.
    with torch.random.fork_rng(devices=[]):
        model = family.build(config)
    _assign(model, tensors, weights)
    return model.eval().to(device)


def _read_document(folder: Path) -> dict[str, Any]:
    """Read and check config.json."""
    file = folder / "config.json"
    check(file.is_file(), f"{folder} holds no model: {file} is missing; give a folder save() wrote")
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not JSON ({error}); save the model again") from error
    if not isinstance(document, dict):
        raise UserError(f"{file} is no JSON object; save the model again")
    check(
        document.get("format") == FORMAT,
        f"{file} has format {document.get('format')!r} (written by acmoe "
        f"{document.get('acmoe', 'unknown')}); this acmoe {acmoe.__version__} reads {FORMAT}",
    )
    for key, kind in (("weights", str), ("sha256", str), ("family", str), ("model", dict)):
        check(
            isinstance(document.get(key), kind),
            f"{file} lacks {key!r} or holds something else there; save the model again",
        )
    check(
        document["family"] in FAMILIES,
        f"{file} is of family {document['family']!r}; this acmoe knows {', '.join(FAMILIES)}",
    )
    return document


def _flatten(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return tensors by name; a module's extra state, a dict of tensors, becomes `key:name`."""
    flat: dict[str, Tensor] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            flat.update({f"{key}:{name}": item.contiguous() for name, item in value.items()})
        else:
            flat[key] = value.contiguous()
    return flat


def _unflatten(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Invert `_flatten`."""
    state: dict[str, Any] = {}
    for key, tensor in tensors.items():
        module, _, name = key.partition(":")
        if name:
            state.setdefault(module, {})[name] = tensor
        else:
            state[key] = tensor
    return state


def _assign(model: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """Load the tensors, after checking that names and shapes are exactly the model's."""
    tensors = {current_name(name): tensor for name, tensor in tensors.items()}
    wanted = _flatten(model.state_dict())
    for title, names in (
        ("lacks", wanted.keys() - tensors.keys()),
        ("has unknown", tensors.keys() - wanted.keys()),
    ):
        check(
            not names,
            f"{source} {title} {', '.join(sorted(names)[:3])} ({len(names)} tensors in all); it is "
            "not a checkpoint of the model in config.json",
        )
    for name, tensor in tensors.items():
        check(
            tensor.shape == wanted[name].shape,
            f"{source} has {name} of shape {tuple(tensor.shape)}; the model in config.json needs "
            f"{tuple(wanted[name].shape)}",
        )
    model.load_state_dict(_unflatten(tensors), assign=True)


@contextlib.contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Yield a draft path in the same folder, so that a rename is atomic; delete the draft after."""
    draft = folder / f".draft-{uuid.uuid4().hex}"
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def _sync(file: Path) -> None:
    """Flush a file to disk."""
    with file.open("rb") as handle:
        os.fsync(handle.fileno())


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
