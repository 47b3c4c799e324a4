"""Build the HTML page of several runs as one file without external resources.

The data are embedded as escaped JSON. A content security policy allows the page's own script and
style only, by their hashes.
"""

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.resources import files
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
from acmoe.report.runs import HF_MODEL, RunFacts, find_runs, read_runs
from acmoe.report.scores import chosen_score, score_command
from acmoe.storage.atomic import replace_text, report_write_errors
from acmoe.storage.writable import check_can_write

# These files are joined to one script in this order. live.js is added when a server sends the page.
SCRIPTS = (
    *("dom.js", "numbers.js", "summary.js", "groups.js", "settings.js", "provenance.js"),
    *("scale.js", "chart.js", "curves.js"),
    *("tokens.js", "details.js", "explorer.js", "layers.js", "robustness.js", "theme.js"),
    *("experts.js", "attacked.js", "export.js", "link.js"),
)
ROUTER, BASE = "model.router.", "model.router.base."  # prefixes of settings' names
POINTS = 1500  # the most points of a curve; longer curves keep every n-th record
# The data are inside <script>, where these characters could end the element or begin a comment.
ESCAPES = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


def write_report(
    folders: Sequence[Path],
    out: Path,
    *,
    tokens: int = 640,
    device: str = "auto",
    progress: Progress = silent,
) -> tuple[Path, list[str]]:
    """Write the page; return its path, and one line for each thing that is missing from it."""
    check_can_write(out)
    reader = RoutingReader(tokens=tokens, device=device)
    data = report_data(find_runs(folders), reader, progress)
    with report_write_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out, render(data))
    return out, [f"{run['name']}: {note}" for run in data["runs"] for note in run["notes"]]


def report_data(
    folders: Sequence[Path], reader: RoutingReader, progress: Progress = silent
) -> dict[str, Any]:
    """Collect everything the page shows, as values that JSON can hold."""
    runs = read_runs(folders)
    routings = []
    for done, run in enumerate(runs):
        progress("reading runs", done, len(runs))
        routings.append(reader.read(run, len(runs)))
    progress("reading runs", len(runs), len(runs))
    samples: dict[str, Any] = {}
    for routing in routings:
        if isinstance(routing, RunRouting):
            known = samples.get(routing.sample.mark)
            if known is None or known.count < routing.sample.count:
                samples[routing.sample.mark] = routing.sample
    marks = list(samples)
    numbers = groups(runs)
    entries = []
    for run, routing, group in zip(runs, routings, numbers, strict=True):
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
        "settings": _settings(runs),
        "samples": [sample.content for sample in samples.values()],
        "reading": read_figures(runs, routings).to_json(),
    }


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


def _settings(runs: Sequence[RunFacts]) -> list[dict[str, Any]]:
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


def escaped_json(data: Any) -> str:
    """Write JSON that is safe inside a script element, whatever texts the data hold."""
    text = json.dumps(_finite(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.translate(ESCAPES)


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def render(data: dict[str, Any], *, live: bool = False) -> str:
    """Render the page. With `live`, it polls the server that sent it for changes."""
    names = (*SCRIPTS, "live.js", "main.js") if live else (*SCRIPTS, "main.js")
    script = "".join(static(name) for name in names)
    style = static("style.css")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "POLICY": f"{policy}; connect-src 'self'" if live else policy,
        "STYLE": style,
        "SCRIPT": script,
        "DATA": escaped_json(data),
    }
    page = static("page.html")
    for name, part in parts.items():  # DATA is last, so that no placeholder in it is replaced
        page = page.replace(f"{{{{{name}}}}}", part)
    return page


def static(name: str) -> str:
    return (files("acmoe.report") / "static" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
