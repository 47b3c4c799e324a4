"""Collect everything that the page of several runs shows, as values that JSON can hold."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import acmoe
from acmoe.data.progress import Progress, silent
from acmoe.report.compare import difference, paired
from acmoe.report.groups import conditions, groups
from acmoe.report.reading import read_figures
from acmoe.report.robustness import robustness
from acmoe.report.routing import RoutingReader, RunRouting
from acmoe.report.runs import HF_MODEL, RunFacts, read_runs
from acmoe.report.sample import Sample
from acmoe.report.scores import chosen_score, score_command

ROUTER, BASE = "model.router.", "model.router.base."  # prefixes of settings' names
POINTS = 1500  # the most points of a curve; longer curves keep every n-th record


def report_data(
    folders: Sequence[Path], reader: RoutingReader, progress: Progress = silent
) -> dict[str, Any]:
    """Read the runs and route their samples; return the data of the page."""
    runs = read_runs(folders)
    routings = []
    for done, run in enumerate(runs):
        progress("reading runs", done, len(runs))
        routings.append(reader.read(run, len(runs)))
    progress("reading runs", len(runs), len(runs))
    samples = _samples(routings)
    marks = list(samples)
    entries = []
    for run, routing, group in zip(runs, routings, groups(runs), strict=True):
        entry = _run_entry(run, runs[0], group)
        if isinstance(routing, RunRouting):
            entry["routing"] = routing.to_json(marks.index(routing.sample.mark))
            if isinstance(routing.attacked, str):
                entry["notes"].append(routing.attacked)
        else:
            entry["notes"].append(f"no routing: {routing}")
        entries.append(entry)
    return {
        "acmoe": acmoe.__version__,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "runs": entries,
        "groups": [one.to_json(runs) for one in conditions(runs) if one.runs[0].kind != HF_MODEL],
        "pairs": [pair.to_json() for pair in paired(runs)],
        "settings": settings_rows(runs),
        "samples": [sample.content for sample in samples.values()],
        "reading": read_figures(runs, routings).to_json(),
    }


def _samples(routings: Sequence[RunRouting | str]) -> dict[str, Sample]:
    """Return the samples by their marks; of equal ones, that of the run which shows most of it."""
    samples: dict[str, Sample] = {}
    for routing in routings:
        if isinstance(routing, RunRouting):
            known = samples.get(routing.sample.mark)
            if known is None or known.count < routing.sample.count:
                samples[routing.sample.mark] = routing.sample
    return samples


def _run_entry(run: RunFacts, first: RunFacts, group: int) -> dict[str, Any]:
    apart, best, measured = difference(run, first), run.best(), robustness(run)
    last = run.train[-1] if run.train else {}
    tested = chosen_score(run.tested, None if best is None else best[0])
    return {
        "name": run.name,
        "folder": str(run.folder),
        "kind": run.kind,
        "router": run.router,
        "seed": run.seed,
        "group": group,
        "state": run.state,
        "step": run.step,
        "steps": run.steps,
        "metric": {"key": run.metric.key, "label": run.metric.label, "lower": run.metric.lower},
        "best": None if best is None else {"step": best[0], "value": best[1]},
        "test": None if tested is None else tested.to_json(),
        "tests": [score.to_json() for score in run.tested],
        "test_command": score_command(run.folder, run.kind, run.finetuned, run.starts),
        "difference": None if apart is None or run is first else vars(apart),
        "seconds": last.get("seconds"),
        "speed": _speed(run),
        "train": _columns(run.train),
        "valid": _columns(run.valid),
        "notes": list(dict.fromkeys((*run.notes, *measured.notes))),
        "starts": [asdict(start) for start in run.starts],
        "robustness": measured.to_json(),
        "routing": None,
    }


def _speed(run: RunFacts) -> dict[str, Any] | None:
    """Return the median speed over a run's records, which ignores phases on a busy machine."""
    unit = next((key for key in (run.train or ({},))[-1] if key.endswith("_per_second")), None)
    if unit is None:
        return None
    return {"value": median(record[unit] for record in run.train if unit in record), "unit": unit}


def _columns(records: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Turn records into columns of numbers. A list with one number per layer becomes its mean."""
    stride = -(-len(records) // POINTS) or 1
    thinned = records[::-1][::stride][::-1]  # counted from the end, so that the last one stays
    keys = dict.fromkeys(key for record in thinned for key in record)
    columns = {key: [_number(record.get(key)) for record in thinned] for key in keys}
    return {key: found for key, found in columns.items() if any(x is not None for x in found)}


def _number(value: Any) -> float | int | None:
    if isinstance(value, list) and value and all(isinstance(one, int | float) for one in value):
        value = sum(value) / len(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def settings_rows(runs: Sequence[RunFacts]) -> list[dict[str, Any]]:
    """List every setting with its value in each run as text, and whether the runs differ in it.

    A setting that some runs do not have, such as an option of one router, differs only where two
    runs that have it differ; `only` then lists the runs that have it.
    """
    aligned = aligned_settings(runs)
    keys = dict.fromkeys(key for settings in aligned for key in settings)
    rows = []
    for key in keys:
        values = [
            json.dumps(settings[key], ensure_ascii=False) if key in settings else None
            for settings in aligned
        ]
        having = [place for place, value in enumerate(values) if value is not None]
        rows.append(
            {
                "key": key,
                "values": values,
                "differs": len({values[place] for place in having}) > 1,
                "only": None if len(having) == len(values) else having,
            }
        )
    return rows


def aligned_settings(runs: Sequence[RunFacts]) -> list[dict[str, Any]]:
    """Return each run's settings under names that match between plain and adaptive routers.

    An adaptive router wraps a base router. If only some runs have one, the settings of the plain
    routers are renamed to those of a base, so that the same options are in the same row.
    """
    wraps = [f"{BASE}name" in run.settings for run in runs]
    if all(wraps) or not any(wraps):
        return [run.settings for run in runs]
    return [
        run.settings if wrapped else _as_base(run.settings)
        for run, wrapped in zip(runs, wraps, strict=True)
    ]


def _as_base(settings: dict[str, Any]) -> dict[str, Any]:
    found = {f"{ROUTER}name": settings.get(f"{ROUTER}name")}
    for key, value in settings.items():
        found[BASE + key.removeprefix(ROUTER) if key.startswith(ROUTER) else key] = value
    return found
