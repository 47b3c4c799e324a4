"""Remember what was measured: one JSON file for each layer, GPU, version and dtype.

The files are in $XDG_CACHE_HOME/acmoe/experts, by default ~/.cache/acmoe/experts. If a file is
missing, damaged or of another version, the layer is measured again. If the folder cannot be
written, a warning says so, and the next process measures again.
"""

import functools
import hashlib
import importlib.metadata
import json
import logging
from pathlib import Path

import torch

from acmoe.errors import UserError
from acmoe.ops.experts.settings.rules import Layer
from acmoe.ops.experts.settings.tables import Table, is_row, key
from acmoe.storage.atomic import replace_text
from acmoe.storage.user_cache import user_cache

_log = logging.getLogger("acmoe")


def folder() -> Path:
    """Return the folder of the measurements, which need not exist."""
    return user_cache("experts")


@functools.cache
def _sources() -> str:
    """Return a digest of the kernels' sources: if a kernel changes, it is measured again."""
    here = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted([*(here / "experts").rglob("*.py"), *(here / "device").rglob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def identity(
    layer: Layer, act: str, biased: bool, weights: torch.dtype, device: torch.device
) -> dict[str, object]:
    """Return the GPU, the versions and the layer that a measurement holds for."""
    return {
        "gpu": torch.cuda.get_device_name(device),
        "torch": str(torch.__version__),
        "triton": importlib.metadata.version("triton"),
        "kernels": _sources(),
        "activation": act,
        "bias": biased,
        "weights": str(weights),
        **layer._replace(dtype=str(layer.dtype))._asdict(),  # type: ignore[arg-type]
    }


def path_of(what: dict[str, object]) -> Path:
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    return folder() / f"{what['dim']}-{what['hidden']}-{what['experts']}-{digest[:16]}.json"


def read(what: dict[str, object]) -> Table:
    """Return the rows that were measured for this, none if there are none or they are damaged."""
    path = path_of(what)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = found["rows"] if found["of"] == what else {}
        valid = all(is_row(key(name, 1, 1, 1), row) for name, row in rows.items())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        _log.warning("%s cannot be read (%s); the layer is tuned again", path, error)
        return {}
    if not valid:
        _log.warning("%s holds settings that no kernel has; the layer is tuned again", path)
    return dict(rows) if valid else {}


def write(what: dict[str, object], rows: Table) -> None:
    """Store the rows; log a warning if the file cannot be written."""
    path = path_of(what)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps({"of": what, "rows": rows}, indent=1) + "\n")
    except (OSError, UserError) as error:
        _log.warning("what was tuned is not kept for the next process: %s", error)
