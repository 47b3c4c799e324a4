"""List the licence of every installed package; fail on one that is unknown or not allowed.

    python tools/licences.py [TABLE]        # TABLE: build/licences.md if not given

A licence is what the package's own metadata state: License-Expression, else the classifiers, else
the first line of License. Nothing is asked of the network.
"""

import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = "acmoe"
TABLE = Path("build/licences.md")
# Extras that a user's program runs with. The others (dev, docs, examples) are for development.
RUNTIME_EXTRAS = ("hf", "vision", "plots", "data")

ALLOWED = {
    *("0BSD", "Apache-2.0", "BSD", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0"),
    *("CNRI-Python", "HPND", "ISC", "MIT", "MIT-CMU", "PSF-2.0", "Python-2.0", "Unlicense", "Zlib"),
    *("LGPL-2.1-or-later", "LGPL-3.0-or-later", "MPL-2.0"),  # their conditions end at the file
    "NVIDIA",  # the CUDA libraries of torch: not free, and not copied by this project
}
COPYLEFT = re.compile(r"\bA?GPL|GNU (Affero )?General Public")
# The other spellings that metadata use, in small letters.
SPELLINGS = {
    "apache": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd 3-clause": "BSD-3-Clause",
    "bsd 3-clause license": "BSD-3-Clause",
    "bsd license": "BSD",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0",
    "historical permission notice and disclaimer (hpnd)": "HPND",
    "the unlicense (unlicense)": "Unlicense",
    "zlib/libpng license": "Zlib",
    "nvidia proprietary software": "NVIDIA",
    "licenseref-nvidia-proprietary": "NVIDIA",
    "licenseref-nvidia-software-license": "NVIDIA",
    "other/proprietary license": "NVIDIA",  # only of packages named nvidia-* and cuda-*
}


class Package(NamedTuple):
    name: str
    version: str
    licence: str
    stated: str  # the metadata field that says so
    runtime: bool
    verdict: str  # "allowed", "unknown" or "copyleft"


def stated_licence(package: Distribution) -> tuple[str, str]:
    """Return the licence in SPDX terms where we know the spelling, and the field it comes from."""
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        return " ".join(map(spdx, re.split(r"(\bAND\b|\bOR\b)", expression))), "License-Expression"
    classifiers = [
        line.rsplit(" :: ", 1)[-1]
        for line in metadata.get_all("Classifier") or []
        if line.startswith("License ::") and not line.endswith(":: OSI Approved")
    ]
    if classifiers:
        return " AND ".join(map(spdx, classifiers)), "Classifier"  # the stricter reading
    first, *_ = (metadata.get("License") or "").strip().splitlines() or [""]
    return " ".join(map(spdx, re.split(r"(\bAND\b|\bOR\b)", first))), "License"


def spdx(words: str) -> str:
    bare = words.strip(" ()")
    return SPELLINGS.get(words.strip().lower()) or SPELLINGS.get(bare.lower(), bare)


def judge(name: str, licence: str, *, runtime: bool) -> str:
    """Return "allowed", or "unknown" or "copyleft" where no alternative of an OR is allowed."""
    found = set()
    for alternative in licence.split(" OR "):
        parts = [part.split(" WITH ")[0].strip() for part in alternative.split(" AND ")]
        if any(COPYLEFT.search(part) for part in parts):
            found.add("copyleft" if runtime else "allowed")
        elif "NVIDIA" in parts and not canonicalize_name(name).startswith(("nvidia-", "cuda-")):
            found.add("unknown")
        else:
            found.add("allowed" if set(parts) <= ALLOWED else "unknown")
    return next(word for word in ("allowed", "copyleft", "unknown") if word in found)


def runtime_names(project: str = PROJECT, chosen: tuple[str, ...] = RUNTIME_EXTRAS) -> set[str]:
    """Return the installed packages that the project and its chosen extras need, at any depth."""
    found: set[str] = set()
    waiting = [(project, frozenset(chosen))]
    seen = set(waiting)
    while waiting:
        name, extras = waiting.pop()
        try:
            package = distribution(name)
        except PackageNotFoundError:  # of an extra that is not installed
            continue
        found.add(canonicalize_name(name))
        for line in package.requires or []:
            needed = Requirement(line)
            wanted = [{"extra": extra} for extra in ("", *sorted(extras))]
            if needed.marker is None or any(map(needed.marker.evaluate, wanted)):
                step = (needed.name, frozenset(needed.extras))
                if step not in seen:
                    seen.add(step)
                    waiting.append(step)
    return found


def installed() -> list[Package]:
    """Return the installed packages by name."""
    runtime, found = runtime_names(), {}
    for package in distributions():
        name = package.metadata["Name"]
        licence, stated = stated_licence(package)
        used = canonicalize_name(name) in runtime
        verdict = judge(name, licence, runtime=used)
        found[canonicalize_name(name)] = Package(
            name, package.version, licence, stated, used, verdict
        )
    return [found[name] for name in sorted(found)]


def as_table(packages: list[Package]) -> str:
    rows = ["| package | version | licence | stated in | used |", "|---|---|---|---|---|"]
    for one in packages:
        used = "at run time" if one.runtime else "in development"
        licence = one.licence.replace("|", "/") or "not stated"
        rows.append(f"| {one.name} | {one.version} | {licence} | {one.stated} | {used} |")
    return "\n".join(rows) + "\n"


def main(table: Path = TABLE) -> int:
    packages = installed()
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(as_table(packages))
    wrong = [one for one in packages if one.verdict != "allowed"]
    for one in wrong:
        fix = (
            "a runtime dependency may not have it; replace the package"
            if one.verdict == "copyleft"
            else "read it, then add its name or its spelling to tools/licences.py"
        )
        print(f"{one.name} {one.version}: licence {one.licence or 'not stated'!r}; {fix}")
    runtime = sum(one.runtime for one in packages)
    print(f"licences of {len(packages)} packages ({runtime} at run time): {len(wrong)} refused")
    print(f"the table is in {table}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:2])))
