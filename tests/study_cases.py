"""Small studies: data folders of a few kilobytes, cells of a few steps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from acmoe.lab.study.cell import Cell, TextTests
from acmoe.lab.study.grids.text import CONDITIONS, TextSetting, text_cells
from acmoe.lab.study.materials import Materials, Text
from acmoe.lab.study.size import Size
from tiny_runs import MODEL

SMALL = ("split=1", "precision=fp32", "eval_tokens=200", "eval_batch=2")


def data_folder(folder: Path) -> Path:
    """Two byte corpora laid out as the studies expect them."""
    text = "".join(f"line {n}: {n} and {n} make {2 * n}.\n" for n in range(300))
    for name in ("enwiki15-bytes", "enwik8-prefix"):
        (folder / name).mkdir(parents=True)
        (folder / name / "text").write_text(text if name == "enwiki15-bytes" else text[::-1])
    return folder


def tiny_text(folder: Path) -> Text:
    materials = Materials(data=data_folder(folder / "data"), work=folder / "work")
    return materials.bytes(0.01)


def tiny_cells(
    text: Text, *names: str, seeds: tuple[int, ...] = (0,), steps: int = 4, **tests: Any
) -> list[Cell]:
    """Cells of the byte study's conditions, three MoE layers of 16 features."""
    size = Size(steps=steps, batch=2, overrides=SMALL, device="cpu")
    setting = TextSetting(
        study="bytes",
        name="tiny",
        model=replace(MODEL, vocab_size=text.vocab_size),
        text=text,
        tests=TextTests(tokens=200, rows=2, **tests),
        factors={"norm": "post"},
    )
    return text_cells(setting, {name: CONDITIONS[name] for name in names}, size, seeds)


def record(condition: str, seed: int, test: float, **changes: Any) -> dict[str, Any]:
    """A line of results such as a finished cell leaves."""
    made = {
        "study": "bytes",
        "setting": "switch",
        "condition": condition,
        "seed": seed,
        "size": "4 steps of 32 tokens",
        "digest": f"{condition}-{seed}",
        "status": "done",
        "metrics": {"test": test, "load_balance": 2.0 + seed},
        "curves": {"valid": [[2, test + 1], [4, test]]},
        "environment": {"commit": "abc1234", "device": "a card", "jobs": 2},
        "options": "--steps 4",
    }
    return {**made, **changes}


def write_results(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in records))
    return path
