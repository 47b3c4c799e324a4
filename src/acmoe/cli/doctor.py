"""`acmoe doctor`: describe this installation, for a look or for a bug report."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from acmoe.storage.strict_json import json_text


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Show versions, devices, the kernels that run here, extras, data sets and cache folders."""

    root: Path = Path("data")
    """Folder that holds the prepared data sets."""
    json: bool = False
    """Print everything as JSON."""

    def run(self) -> int:
        from acmoe.lab.installation import describe_installation

        facts = describe_installation(self.root)
        if self.json:
            print(json_text(facts))
            return 0
        console = Console(highlight=False)
        _show_versions(console, facts)
        _show_kernels(console, facts["kernels"])
        _show_extras(console, facts["extras"])
        _show_folders(console, facts, self.root)
        return 0


def _say(console: Console, text: str) -> None:
    """Print text as it is: rich would take the brackets of an extra for markup."""
    console.print(text, markup=False, soft_wrap=True)


def _show_versions(console: Console, facts: dict[str, Any]) -> None:
    python = facts["python"]
    _say(console, f"acmoe {facts['acmoe']} in {facts['folder']}")
    _say(console, f"Python {python['version']} ({python['executable']}) on {facts['platform']}")
    there = [f"{name} {version or 'missing'}" for name, version in facts["packages"].items()]
    _say(console, ", ".join(there))
    for device in facts["devices"]:
        chosen = "; device=auto takes it" if device["auto"] else ""
        _say(console, f"device {device['name']}: {device['what']}{chosen}")
    _say(
        console,
        f"CPU threads of torch: {facts['threads']}; commands take 1 for small models, or what "
        "--threads and OMP_NUM_THREADS say",
    )
    for name, value in facts["environment"].items():
        _say(console, f"{name}={value}")


def _show_kernels(console: Console, kernels: dict[str, Any]) -> None:
    if kernels["problem"]:
        _say(console, f"kernels: {kernels['problem']}")
        return
    title = f"kernels for {kernels['dtype']} on {kernels['device']}; acmoe bench --which shows all"
    columns = ("op", "runs", "why not another")
    table = Table(*(Column(name, overflow="fold") for name in columns), title=title)
    alike: dict[tuple[str, str], list[str]] = {}  # ops by the kernel that serves and the reasons
    for op in kernels["ops"]:
        why = "\n".join(f"{name}: {reason}" for name, reason in op["cannot"].items())
        alike.setdefault((op["serves"] or "none", why), []).append(op["op"])
    for (serves, why), ops in alike.items():
        table.add_row(*map(escape, (", ".join(ops), serves, why)))
    console.print(table)


def _show_extras(console: Console, extras: list[dict[str, Any]]) -> None:
    if not extras:
        _say(console, "extras: unknown, because acmoe is not installed by pip")
    for extra in extras:
        if extra["lacking"]:
            lacking = ", ".join(extra["lacking"])
            _say(console, f"extra {extra['extra']}: lacks {lacking}; {extra['install']}")
        else:
            _say(console, f"extra {extra['extra']}: installed ({', '.join(extra['needs'])})")


def _show_folders(console: Console, facts: dict[str, Any], root: Path) -> None:
    for entry in facts["data"]:
        _say(console, f"data {entry['name']}: {entry['state']} in {entry['folder']}")
        _say(console, f"  {entry['detail']}")
    if not facts["data"]:
        _say(console, f"data: none is prepared in {root}; `acmoe data list` shows what there is")
    for cache in facts["caches"]:
        state = "" if cache["exists"] else " (not there yet)"
        _say(
            console,
            f"cache of {cache['of']}: {cache['folder']}{state}; {cache['variable']} sets it",
        )
