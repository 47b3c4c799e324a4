"""Benchmark reports: the figures, and everything needed to measure them again."""

import datetime
import importlib.metadata
import json
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from acmoe.errors import UserError
from acmoe.evaluate.environment import code_commit, device_name
from acmoe.storage.atomic import replace_text, report_write_errors

FOLDER = Path("benchmarks/results")

_BASELINES = ("sonic-moe", "quack-kernels", "scattermoe", "liger-kernel", "transformers")


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of one `acmoe bench` command. A row is one implementation, shape and pass."""

    kind: str  # layer, layer-skew, router, train, ...
    date: str  # YYYY-MM-DD
    command: str
    environment: dict[str, str | None]
    arguments: dict[str, Any]
    rows: list[dict[str, Any]]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, *, source: str = "the report") -> "Report":
        try:
            found = json.loads(text)
            return cls(**found)
        except (json.JSONDecodeError, TypeError) as mistake:
            raise UserError(f"{source} is no benchmark report ({mistake}); delete it") from None


def environment(device: torch.device) -> dict[str, str | None]:
    """Describe the machine: device, versions and commit, and on a CPU the number of threads.

    acmoe and triton are None if they are not installed. Baselines are listed only if installed.
    """
    threads = {"threads": str(torch.get_num_threads())} if device.type == "cpu" else {}
    return {
        "device": device_name(device),
        **threads,
        "python": platform.python_version(),
        **{package: _version(package) for package in ("acmoe", "torch", "triton")},
        **{package: found for package in _BASELINES if (found := _version(package)) is not None},
        "commit": code_commit(),
    }


def software(report: Report) -> str:
    """Describe in a line what ran: versions, and on a CPU the number of threads."""
    where = report.environment
    found = f"torch {where['torch']}, triton {where['triton']}"
    threads = where.get("threads")
    return found if threads is None else f"{found}, threads {threads}"


def _version(package: str) -> str | None:
    if package == "torch":
        return torch.__version__  # also names the CUDA version it was built for
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def new_report(
    kind: str, device: torch.device, command: str, arguments: object, rows: list[dict[str, Any]]
) -> Report:
    return Report(
        kind=kind,
        date=datetime.date.today().isoformat(),
        command=command,
        environment=environment(device),
        arguments=asdict(arguments),  # type: ignore[call-overload]
        rows=rows,
    )


def save(report: Report, folder: Path = FOLDER) -> Path:
    """Write YYYY-MM-DD-KIND-DEVICE.json. It replaces an earlier report of the same kind and day."""
    device = re.sub(r"[^a-z0-9]+", "-", (report.environment["device"] or "unknown").lower())
    path = folder / f"{report.date}-{report.kind}-{device.strip('-')}.json"
    with report_write_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
    replace_text(path, report.to_json() + "\n")
    return path


def newest(folder: Path = FOLDER) -> list[Report]:
    """Read the latest report of each kind and device, sorted by kind."""
    found: dict[tuple[str, str | None], Report] = {}
    for path in sorted(folder.glob("*.json")):
        report = Report.from_json(path.read_text(), source=str(path))
        key = (report.kind, report.environment["device"])
        if key not in found or found[key].date <= report.date:
            found[key] = report
    return [found[key] for key in sorted(found, key=lambda key: (key[0], key[1] or ""))]
