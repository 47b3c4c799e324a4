"""Write the HTML page of several runs as one file without external resources.

The data are embedded as escaped JSON. A content security policy allows the page's own script and
style only, by their hashes.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from acmoe.data.progress import Progress, silent
from acmoe.report.content import report_data
from acmoe.report.routing import RoutingReader
from acmoe.report.runs import find_runs
from acmoe.storage.atomic import replace_text, report_write_errors
from acmoe.storage.strict_json import finite_or_null
from acmoe.storage.writable import check_can_write

# These files are joined to one script in this order. live.js is added when a server sends the page.
SCRIPTS = (
    *("dom.js", "numbers.js", "summary.js", "groups.js", "settings.js", "provenance.js"),
    *("scale.js", "chart.js", "curves.js"),
    *("tokens.js", "details.js", "explorer.js", "layers.js", "robustness.js", "theme.js"),
    *("experts.js", "attacked.js", "export.js", "link.js"),
)
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


def escaped_json(data: Any) -> str:
    """Write JSON that is safe inside a script element, whatever texts the data hold."""
    finite = finite_or_null(data)
    text = json.dumps(finite, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # A name of a folder that is no UTF-8 has lone surrogates: JSON can escape them, UTF-8 has none.
    return text.translate(ESCAPES).encode("utf-8", "backslashreplace").decode("utf-8")


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
