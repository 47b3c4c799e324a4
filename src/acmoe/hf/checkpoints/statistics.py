"""Save and load the statistics of an attached model, or of our own, apart from its weights.

Files of adapters, such as LoRA's, hold only weights that were trained. The statistics have moved
meanwhile, so they are written to a file beside the adapter.
"""

import json
import os
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor, nn

from acmoe.errors import UserError, check, first_line
from acmoe.hf.adaptive import AdaptivePart
from acmoe.hf.checkpoints.wrappers import outermost_models, unwrapped_name
from acmoe.routing.statistics import ClusterStatistics
from acmoe.routing.statistics.step import StepStatistics

FILE = "acmoe_statistics.safetensors"


def save_statistics(model: nn.Module, directory: str | os.PathLike[str]) -> Path:
    """Write the statistics of a model to acmoe_statistics.safetensors in `directory`.

    model: attached, or one of `AcmoeForCausalLM` and its like, or a wrapper around it.

    A model that `save_pretrained` saves whole does not need it, nor does a `PeftModel`, whose
    `save_pretrained` calls it. It is for other files of adapters:

        torch.save(adapter_weights, "adapter/weights.pt")
        acmoe.hf.save_statistics(model, "adapter")
    """
    return write_statistics(model, Path(directory) / FILE)


def write_statistics(model: nn.Module, path: Path, **metadata: str) -> Path:
    """Write the statistics of a model to a file, with these strings in its header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{name}.{key}": value.detach().cpu().contiguous()
        for name, part in _parts(model).items()
        for key, value in part.state_dict().items()
    }
    # A reader never sees half a file.
    half = path.with_suffix(".part")
    metadata["acmoe"] = json.dumps(_options(model))
    safetensors.torch.save_file(tensors, half, metadata=metadata)
    os.replace(half, path)
    return path


def load_statistics(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Load what `save_statistics` wrote into a model that is attached or built in the same way."""
    path = Path(directory) / FILE
    check(
        path.is_file(),
        f"{directory} has no {FILE}; write it by acmoe.hf.save_statistics(model, directory), or "
        "measure the statistics by acmoe.calibrate(model, batches)",
    )
    parts = _parts(model)
    try:
        tensors = safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        remedy = "write it anew by acmoe.hf.save_statistics, or call acmoe.calibrate"
        raise UserError(f"{path} cannot be read: {first_line(error)}; {remedy}") from error
    _check_same(path, parts, tensors)
    for name, part in parts.items():
        start = f"{name}."
        own = {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
        part.load_state_dict(own)


def _check_same(path: Path, parts: dict[str, nn.Module], tensors: dict[str, Tensor]) -> None:
    shapes = {
        f"{name}.{key}": value.shape
        for name, part in parts.items()
        for key, value in part.state_dict().items()
    }
    differing = sorted(
        key
        for key in {*shapes, *tensors}
        if key not in tensors or shapes.get(key) != tensors[key].shape
    )
    with safetensors.safe_open(path, framework="pt") as file:
        stored = json.loads((file.metadata() or {}).get("acmoe", "null"))
    check(
        not differing,
        f"{path} differs from the model at {differing and differing[0]}; attach with the options "
        f"that the file was written with: {json.dumps(stored)}",
    )
    measure = _measure(parts)
    saved = measure if stored is None else stored["router"]["measure"]
    check(
        saved == measure,
        f"{path} holds dispersions by measure={saved!r}, and the model has "
        f"measure={measure!r}; attach, or build it, with the same measure",
    )


def _measure(parts: dict[str, nn.Module]) -> str | None:
    """Return the measure of the dispersions; None if there are none."""
    found = (module for part in parts.values() for module in part.modules())
    return next((one.config.measure for one in found if isinstance(one, ClusterStatistics)), None)


def has_statistics(model: nn.Module) -> bool:
    """Return True if the model has running statistics."""
    return any(isinstance(module, AdaptivePart | StepStatistics) for module in model.modules())


def averages_of(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return copies of the running averages of a model, each with its weights."""
    found = (module for module in model.modules() if isinstance(module, ClusterStatistics))
    return [(one.dispersion.clone(), one.weight.clone()) for one in found]


def _root(model: nn.Module) -> nn.Module:
    """Return the model of transformers inside of a wrapper, or the model itself."""
    models: list[nn.Module] = [*outermost_models(model)] or [model]
    check(
        len(models) == 1,
        f"{type(model).__name__} holds {len(models)} models of transformers; pass one of them",
    )
    return models[0]


def _parts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with statistics by name, as if no wrapper were around the model or in it:
    the parts that `attach` put on, or the statistics of our own models."""
    modules = {unwrapped_name(name): module for name, module in _root(model).named_modules()}
    for kind in (AdaptivePart, StepStatistics):
        found: dict[str, nn.Module] = {
            name: module for name, module in modules.items() if isinstance(module, kind)
        }
        if found:
            return found
    raise UserError(
        f"{type(model).__name__} has no attached router; call acmoe.attach(model) first"
    )


def _options(model: nn.Module) -> Any:
    options = getattr(getattr(_root(model), "config", None), "acmoe", None)
    measure = _measure(_parts(model))
    return {"router": {"measure": measure}} if options is None and measure is not None else options
