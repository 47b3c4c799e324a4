"""Describe this installation: versions, devices, kernels, extras, data sets and cache folders."""

import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion

import acmoe
from acmoe.data.text.registry import datasets, found
from acmoe.errors import UserError
from acmoe.lab.bench.shapes import find_shapes
from acmoe.lab.bench.which import which
from acmoe.runtime import GPUS, count_devices, pick_device
from acmoe.storage.user_cache import user_cache

PACKAGES = ("torch", "triton", "numpy", "safetensors", "transformers", "datasets", "matplotlib")

# The folders of this package's caches, by what they hold.
OWN_CACHES = {"acmoe's kernels in C": "native", "acmoe's tuned layers": "experts"}
# The folders in which other packages cache downloads and compiled kernels: the variable that sets
# each, and the folder where it is not set.
CACHES = {
    "HuggingFace": ("HF_HOME", "~/.cache/huggingface"),
    "Triton kernels": ("TRITON_CACHE_DIR", "~/.triton/cache"),
    "torch.compile": (
        "TORCHINDUCTOR_CACHE_DIR",
        f"{tempfile.gettempdir()}/torchinductor_{os.path.basename(os.path.expanduser('~'))}",
    ),
    "torch": ("TORCH_HOME", "~/.cache/torch"),
}


def describe_installation(data: Path) -> dict[str, Any]:
    """Return all facts as values that JSON can hold; `data` is the folder of prepared data sets."""
    return {
        "acmoe": acmoe.__version__,
        "folder": str(Path(__file__).parents[1]),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {name: version_of(name) for name in PACKAGES},
        "devices": _devices(),
        "threads": torch.get_num_threads(),
        "kernels": _kernels(),
        "extras": _extras(),
        "data": _data(data),
        "caches": _caches(),
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith("ACMOE_")
        },
    }


def version_of(package: str) -> str | None:
    """Return the version of an installed package, without importing it; None if it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]]:
    """List the CPU and every GPU that torch can use; `auto` marks the one that is chosen."""
    chosen = pick_device("auto").type
    cores = os.cpu_count()
    found_here: list[dict[str, Any]] = [
        {"name": "cpu", "what": f"{cores} cores", "auto": chosen == "cpu"}
    ]
    for kind in GPUS:
        for index in range(count_devices(kind)):
            what = GPUS[kind]
            if kind != "mps":
                properties = torch.get_device_module(kind).get_device_properties(index)
                what = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
            auto = chosen == kind and index == 0
            found_here.append({"name": f"{kind}:{index}", "what": what, "auto": auto})
    return found_here


def _kernels() -> dict[str, Any]:
    """Return for each op the kernel that serves, and why each other one cannot."""
    device = pick_device("auto")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    facts: dict[str, Any] = {"device": str(device), "dtype": str(dtype).removeprefix("torch.")}
    try:
        (shape,) = find_shapes(("olmoe",), device)
        choices = which(device, dtype, shape)
    except UserError as error:  # a wrong value in an environment variable
        return {**facts, "problem": str(error), "ops": []}
    ops: dict[str, dict[str, Any]] = {}
    for choice in choices:
        entry = ops.setdefault(choice.op, {"op": choice.op, "serves": None, "cannot": {}})
        if choice.runs:
            entry["serves"] = choice.backend
        elif choice.unsupported is not None:
            entry["cannot"][choice.backend] = choice.unsupported
    return {**facts, "problem": None, "ops": list(ops.values())}


def _extras() -> list[dict[str, Any]]:
    """List the extras of this package: what each needs, and what of it is missing or too old."""
    try:
        requirements = metadata.requires("acmoe") or []
    except metadata.PackageNotFoundError:  # a copy of the sources, not installed
        return []
    entries = []
    for extra, wanted in read_extras(requirements).items():
        lacking = [one for one in wanted if not is_installed(one)]
        command = f"pip install 'acmoe[{extra}]'" if lacking else None
        entries.append({"extra": extra, "needs": wanted, "lacking": lacking, "install": command})
    return entries


def read_extras(requirements: Iterable[str]) -> dict[str, list[str]]:
    """Group requirements such as `pillow>=10.4; extra == "vision"` by their extra.

    An extra that needs the same as an earlier one is its other name, and is left out.
    """
    extras: dict[str, list[str]] = {}
    for line in requirements:
        what, _, marker = line.partition(";")
        named = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        if named and not what.startswith("acmoe[") and _applies(marker):
            extras.setdefault(named[1], []).append(what.strip())
    first = {tuple(sorted(needs)): extra for extra, needs in reversed(extras.items())}
    return {extra: extras[extra] for extra in sorted(first.values())}


def _applies(marker: str) -> bool:
    """Return False for a requirement of another operating system."""
    system = re.search(r"platform_system == ['\"](\w+)['\"]", marker)
    return system is None or system[1] == platform.system()


def is_installed(requirement: str) -> bool:
    """Return True where a package is installed and not older than in `requirement`."""
    name, _, rest = requirement.partition(">=")
    version = version_of(re.split(r"[<>=!\[ ]", name)[0])
    floor = rest.partition(",")[0].strip()
    return version is not None and (not floor or TorchVersion(version) >= TorchVersion(floor))


def _data(root: Path) -> list[dict[str, str]]:
    """List the data sets that are prepared, or damaged, in a folder."""
    here = [(entry.name, found(entry.name, root)) for entry in datasets()]
    return [
        {"name": name, "state": one.state, "detail": one.detail, "folder": str(one.folder)}
        for name, one in here
        if one.state != "absent"
    ]


def _caches() -> list[dict[str, Any]]:
    own = {what: ("XDG_CACHE_HOME", user_cache(name)) for what, name in OWN_CACHES.items()}
    others = {
        # Without a home folder "~" stays; Path.expanduser would raise an error.
        what: (variable, Path(os.path.expanduser(os.environ.get(variable) or default)))
        for what, (variable, default) in CACHES.items()
    }
    return [
        {"of": what, "folder": str(folder), "exists": folder.is_dir(), "variable": variable}
        for what, (variable, folder) in {**own, **others}.items()
    ]
