"""Save and load a model as a folder: weights (safetensors) and config.json. Nothing is executable.

Weights are written first, to a file named by their checksum. Replacing config.json, which names
that file, makes the new model current. A crash at any moment leaves the old model intact.

In a checkpoint that several processes wrote, the weights are in the folder `shards` instead.
"""

import contextlib
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
from acmoe.config.serialize import decode, encode, flatten
from acmoe.errors import UserError, check
from acmoe.experts.old_names import current_name
from acmoe.models.by_hand import warn_of_attributes
from acmoe.models.registry import FAMILIES
from acmoe.storage.atomic import report_write_errors, sha256_of, sync
from acmoe.storage.sealed import SEALED, read_sealed, write_sealed
from acmoe.storage.shards import SHARDS, digests, joint_digest, read_shards, stored_tensors

MODEL = "model/"  # names of a model's tensors in `shards` begin with this
READ = (1, SEALED)  # version 0.1 wrote format 1, without a checksum of config.json itself


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write `model` into the folder `path`, replacing a model that may be there.

    Raises a UserError, and leaves the folder as it is, if `load` would refuse the model: adapters
    and parametrizations are not in its config. Warns of attributes and modules that were set by
    hand, which are not in it either, such as `model.blocks[0].dropout.p = 0.5`.
    """
    folder = _folder(path)
    tensors = flat_state(model.state_dict())
    with torch.device("meta"):
        built = FAMILIES[_family(model)].build(model.config)
    _check_loadable(model, built, tensors)
    warn_of_attributes(model, built, stacklevel=2)
    with report_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _replacing(folder) as draft:
            save_file(tensors, draft)
            sync(draft)
            digest = sha256_of(draft)
            weights = f"weights-{digest[:12]}.safetensors"
            os.replace(draft, folder / weights)
    write_config(model, folder, weights, digest)
    for other in folder.glob("weights-*.safetensors"):
        if other.name != weights:
            other.unlink()


def _folder(path: object) -> Path:
    """Return the path of a model's folder; raise a UserError for what is no path."""
    name = os.fspath(path) if isinstance(path, os.PathLike) else path
    check(isinstance(name, str), f"path={path!r} names no folder; pass the one of a saved model")
    return Path(str(name))


def write_config(model: nn.Module, folder: Path, weights: str, digest: str) -> None:
    """Write config.json, which names the file or folder of the weights and their checksum."""
    document = {
        "acmoe": acmoe.__version__,
        "weights": weights,
        "sha256": digest,
        "family": _family(model),
        "model": encode(model.config),
    }
    write_sealed(folder / "config.json", document)


def _check_loadable(model: nn.Module, built: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise a UserError if `load` would refuse the tensors of this model."""
    name = type(model).__name__
    empty = next((key for key, tensor in tensors.items() if tensor.is_meta), None)
    check(empty is None, f"{name}: {empty} is on the meta device, without values; load them first")
    fix = "it was changed; merge adapters and remove wrappers, or save its state_dict yourself"
    _check_tensors(built, tensors, name, fix)
    places: dict[int, str] = {}
    for key, tensor in tensors.items():
        other = places.setdefault(tensor.data_ptr(), key)
        check(
            other == key or tensor.numel() == 0,
            f"{name}: {other} and {key} are one tensor, and a loaded model would have two; untie "
            "them with clone(), or save its state_dict yourself",
        )


def _family(model: nn.Module) -> str:
    config = getattr(model, "config", None)
    family = next((n for n, found in FAMILIES.items() if isinstance(config, found.config)), None)
    check(
        family is not None,
        f"{type(model).__name__} is not a model of this library; save its state_dict yourself",
    )
    return str(family)


def load(path: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> nn.Module:
    """Load the model that `save` wrote, in evaluation mode and in the dtypes it was saved in."""
    folder = _folder(path)
    document = _read_document(folder)
    weights = folder / Path(document["weights"]).name
    tensors = (
        _read_shards(weights, document) if weights.name == SHARDS else _read(weights, document)
    )
    family = FAMILIES[document["family"]]
    config = decode(document["model"], family.config, str(folder / "config.json"))
    tensors = {current_name(name): tensor for name, tensor in tensors.items()}
    check_fits(config, tensors, weights)
    with torch.device("meta"):  # names and shapes first: a damaged config may ask for terabytes
        _check_tensors(family.build(config), tensors, weights)
    # Building draws random weights, which are then overwritten: leave the caller's RNG unchanged.
    with torch.random.fork_rng(devices=[]):
        model = family.build(config)
    model.load_state_dict(nested_state(tensors), assign=True)
    return model.eval().to(device)


def _read(weights: Path, document: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read a file of weights."""
    check(
        weights.is_file(),
        f"{weights} is missing; {weights.parent} holds no whole model, save it again",
    )
    _check_digest(weights, sha256_of(weights), document)
    try:
        return load_file(weights)
    except SafetensorError as error:
        raise UserError(f"{weights} is no safetensors file ({error}); save it again") from error


def _read_shards(weights: Path, document: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read the model's tensors from the files that several processes wrote."""
    _check_digest(weights, joint_digest(digests(weights)), document)
    stored = stored_tensors(weights)
    tensors = {
        name: torch.empty(one.shape, dtype=one.dtype)
        for name, one in stored.items()
        if name.startswith(MODEL)
    }
    read_shards(weights, tensors)
    return {name.removeprefix(MODEL): tensor for name, tensor in tensors.items()}


def _check_digest(weights: Path, digest: str, document: Mapping[str, Any]) -> None:
    check(
        digest == document["sha256"],
        f"{weights} is damaged: its checksum is not the one in config.json; save the model again, "
        "or restore a copy",
    )


def _read_document(folder: Path) -> dict[str, Any]:
    """Read and check config.json."""
    file = folder / "config.json"
    check(
        file.is_file(),
        f"{folder} holds no model: {file} is missing; give a folder acmoe.save wrote",
    )
    document = read_sealed(file, fix="save the model again, or restore a copy")
    check(
        document.get("format") in READ,
        f"{file} has format {document.get('format')!r} (written by acmoe "
        f"{document.get('acmoe', 'unknown')}); this acmoe {acmoe.__version__} reads {READ}: use "
        "the version that wrote it",
    )
    for key, kind in (("weights", str), ("sha256", str), ("family", str), ("model", dict)):
        check(
            isinstance(document.get(key), kind),
            f"{file} lacks {key!r} or holds something else there; save the model again, or restore "
            "a copy",
        )
    check(
        document["family"] in FAMILIES,
        f"{file} is of family {document['family']!r}; this acmoe knows {', '.join(FAMILIES)}",
    )
    return document


def flat_state(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return tensors by name; a module's extra state, a dict of tensors, becomes `key:name`."""
    flat: dict[str, Tensor] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            flat.update({f"{key}:{name}": item.contiguous() for name, item in value.items()})
        else:
            flat[key] = value.contiguous()
    return flat


def nested_state(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Invert `flat_state`."""
    state: dict[str, Any] = {}
    for key, tensor in tensors.items():
        module, _, name = key.partition(":")
        if name:
            state.setdefault(module, {})[name] = tensor
        else:
            state[key] = tensor
    return state


def check_fits(config: Any, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Refuse a config that is far larger than its weights, before a model of it is built.

    Every block of a model owns at least one tensor, and no size exceeds the number of weights.
    """
    numbers = sum(tensor.numel() for tensor in tensors.values())
    for name, value in flatten(encode(config)).items():
        sizes = value if isinstance(value, list) else [value]
        most = len(tensors) if name.rpartition(".")[2] in ("repeats", "depths") else numbers
        for size in sizes:
            check(
                not isinstance(size, int) or size <= most,
                f"{source} has {len(tensors)} tensors of {numbers:,} numbers in all, too few for "
                f"{name}={size}; it is not a checkpoint of the model in config.json",
            )


def _check_tensors(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    source: object,
    fix: str = "it is not a checkpoint of the model in config.json",
) -> None:
    """Check that names, shapes and kinds of numbers are the model's, and that all are finite."""
    wanted = flat_state(model.state_dict())
    for title, names in (
        ("lacks", wanted.keys() - tensors.keys()),
        ("has unknown", tensors.keys() - wanted.keys()),
    ):
        check(
            not names,
            f"{source} {title} {', '.join(sorted(names)[:3])} ({len(names)} tensors in all); {fix}",
        )
    for name, tensor in tensors.items():
        check(
            tensor.shape == wanted[name].shape,
            f"{source} has {name} of shape {tuple(tensor.shape)}; its config needs "
            f"{tuple(wanted[name].shape)}: {fix}",
        )
        same = tensor.dtype == wanted[name].dtype
        check(
            same or (tensor.is_floating_point() and wanted[name].is_floating_point()),
            f"{source} has {name} of {tensor.dtype}; the model needs {wanted[name].dtype}: {fix}",
        )
        check(
            not tensor.is_floating_point() or bool(tensor.isfinite().all()),
            f"{source}: {name} holds NaN or infinity; use another checkpoint",
        )


@contextlib.contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Yield a draft path in the same folder, so that a rename is atomic; delete the draft after."""
    draft = folder / f".draft-{uuid.uuid4().hex}"
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)
