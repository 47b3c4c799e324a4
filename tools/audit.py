"""Look up the known vulnerabilities of every installed package with pip-audit.

    python tools/audit.py

PyPI's JSON interface is the source. Where it cannot be reached, or answers without the
vulnerabilities it is known to have, this says "not checked" and succeeds: a mirror of packages
alone is no reason to refuse a change, and no reason to call it checked. A vulnerability of a
package that is used at run time fails; one of a development tool is printed.
"""

import json
import subprocess
import sys
import sysconfig
import urllib.request
import venv
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from licences import runtime_names

# A version with published vulnerabilities: a service that knows none of them knows nothing.
PROBE = "https://pypi.org/pypi/jinja2/2.11.1/json"
VENV = Path("build/venv-audit")
REPORT = Path("build/audit.json")
# Identifier of a vulnerability that does not concern this project: the reason.
IGNORED: dict[str, str] = {}


def unreachable(url: str, timeout: float = 15.0) -> str | None:
    """Return why the service cannot be used, or None where it can."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            known = json.load(answer).get("vulnerabilities")
    except (OSError, ValueError, AttributeError) as error:
        return f"{url}: {error}"
    return None if known else f"{url} names no vulnerability of a version that has some"


def pip_audit() -> tuple[dict[str, Any] | None, str]:
    """Return the report of pip-audit, or None and its last words.

    It has a virtual environment of its own, so that its requirements do not join those it looks at.
    """
    python = VENV / "bin" / "python"
    if not python.exists():
        venv.create(VENV, with_pip=True)
    REPORT.unlink(missing_ok=True)
    packages = sysconfig.get_paths()["purelib"]
    ignored = [word for name in IGNORED for word in ("--ignore-vuln", name)]
    options = ["--path", packages, "--format", "json", "--output", str(REPORT), *ignored]
    said = ""
    for command in (
        [python, "-m", "pip", "install", "--quiet", "pip-audit"],
        [python, "-m", "pip_audit", "--progress-spinner", "off", *options],
    ):
        run = subprocess.run(command, capture_output=True, text=True)
        said = (run.stderr.strip().splitlines() or [f"it ended with {run.returncode}"])[-1]
    return (json.loads(REPORT.read_text()), said) if REPORT.exists() else (None, said)


def judge(report: dict[str, Any], runtime: set[str]) -> tuple[list[str], int]:
    """Return the lines to print, and how many vulnerabilities the runtime packages have."""
    lines, wrong, checked, skipped = [], 0, 0, []
    for package in report["dependencies"]:
        name = package["name"]
        if "skip_reason" in package:
            skipped.append(name)
            continue
        checked += 1
        used = canonicalize_name(name) in runtime
        for one in package["vulns"]:
            wrong += used
            fixed = ", ".join(one["fix_versions"]) or "no version yet"
            where = "at run time" if used else "in development"
            lines.append(
                f"{name} {package['version']}: {one['id']}, used {where}; fixed in {fixed}"
            )
    lines.append(f"known vulnerabilities of {checked} packages: {wrong} at run time")
    if skipped:
        lines.append(f"not checked, because PyPI does not know them: {', '.join(skipped)}")
    return lines, wrong


def main() -> int:
    reason = unreachable(PROBE)
    if reason is None:
        report, said = pip_audit()
        if report is not None:
            lines, wrong = judge(report, runtime_names())
            print("\n".join(lines))
            return 1 if wrong else 0
        reason = f"pip-audit: {said}"
    print(f"known vulnerabilities: not checked ({reason})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
