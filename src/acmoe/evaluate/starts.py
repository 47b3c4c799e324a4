"""RUN/starts.jsonl: the command, code and machine of every start of a run.

A run that was continued has a line for each start. Runs of earlier versions have no such file.
"""

import platform
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType
from typing import Any

import torch

import acmoe
from acmoe.evaluate.environment import code_commit, command_line, device_name
from acmoe.storage.atomic import report_write_errors
from acmoe.storage.lines import append_line, read_lines

STARTS = "starts.jsonl"


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a training process."""

    time: str  # UTC, such as 2026-01-31T12:00:00+00:00
    step: int  # updates, or epochs of finetuning, that were done before
    command: str
    commit: str | None  # None: the package was installed without a checkout
    acmoe: str  # version
    torch: str  # version
    python: str  # version
    device: str  # such as cuda:0
    device_name: str  # such as NVIDIA H200
    processes: int


# Types of the fields in a record.
_TYPES: dict[str, tuple[type, ...]] = {
    **{field.name: (str,) for field in fields(Start)},
    "step": (int,),
    "processes": (int,),
    "commit": (str, NoneType),
}


def record_start(folder: Path, device: torch.device, *, step: int, processes: int = 1) -> None:
    """Append a line for this process to the run in `folder`, which continues after `step`."""
    start = Start(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        step=step,
        command=command_line(),
        commit=code_commit(),
        acmoe=acmoe.__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
        device=str(device),
        device_name=device_name(device),
        processes=processes,
    )
    path = folder / STARTS
    if read_lines(path).cut_off:  # by a crash: end that line, so that the next one is whole
        with report_write_errors(path), path.open("ab") as file:
            file.write(b"\n")
    append_line(path, asdict(start))


def read_starts(folder: Path) -> tuple[tuple[Start, ...], list[str]]:
    """Return all starts, the earliest first, and a line for each kind of damage."""
    path = folder / STARTS
    lines = read_lines(path)
    known = [record for record in lines.records if _is_start(record)]
    notes = [complaint] if (complaint := lines.complaint(path)) else []
    if path.is_file() and not path.stat().st_size:
        notes.append(f"{path} is empty: its lines are lost, or the first start was interrupted")
    if left := len(lines.records) - len(known):
        notes.append(f"{path}: {left} lines are no starts of a run; left out")
    return tuple(Start(**{name: record[name] for name in _TYPES}) for record in known), notes


def _is_start(record: dict[str, Any]) -> bool:
    return all(type(record.get(name, ...)) in kinds for name, kinds in _TYPES.items())
