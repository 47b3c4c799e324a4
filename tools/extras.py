"""Install the wheel with one extra at a time in a new environment, and use what the extra is for.

    make test-extras                      # all of them, and none
    make test-extras EXTRAS="hf plots"    # these

An environment begins with the dependencies of acmoe alone, linked from the environment that runs
this file (torch is large). pip installs what the extra adds, by constraints.txt, from the registry.
An extra whose packages the registry does not have, such as a mirror with few of them, is named and
not tried: that is no failure.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from archives import BUILD, ROOT, only
from licences import runtime_names
from venvs import install, new_venv, run_file

NONE = "none"


def link_core(folder: Path) -> None:
    """Fill the folder with links to the packages that acmoe needs without extras."""
    shutil.rmtree(folder, ignore_errors=True)  # removes links, not what they lead to
    folder.mkdir(parents=True)
    for name in sorted(runtime_names(chosen=()) - {"acmoe"}):
        package = distribution(name)
        tops = {file.parts[0] for file in package.files or []}
        for top in tops - {"..", "__pycache__"}:
            link = folder / top
            if not link.is_symlink():
                link.symlink_to(Path(str(package.locate_file(top))).resolve())


def extras() -> list[str]:
    """Return the extras of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(project["optional-dependencies"])


def try_extra(extra: str, wheel: Path, core: Path) -> None:
    """Install acmoe[extra] and run its function of tools/try_extra.py."""
    python = new_venv(BUILD / f"venv-extra-{extra}", [core])
    what = str(wheel) if extra == NONE else f"{wheel}[{extra}]"
    install(python, "--constraint", str(ROOT / "constraints.txt"), what)
    run_file(python, str(ROOT / "tools" / "try_extra.py"), extra)


def absent(error: subprocess.CalledProcessError) -> str | None:
    """Return the requirement that the registry does not have, if that is why pip failed."""
    found = re.search(r"No matching distribution found for (.+)", error.stderr or "")
    return found[1].strip() if found else None


def main(chosen: list[str]) -> None:
    known = [NONE, *extras()]
    if unknown := [one for one in chosen if one not in known]:
        raise SystemExit(f"no extra is called {unknown[0]!r}; there are {', '.join(known)}")
    core, wheel = BUILD / "core-packages", only("*.whl")
    link_core(core)
    failed, untried = [], []
    for extra in chosen or known:
        try:
            try_extra(extra, wheel, core)
        except subprocess.CalledProcessError as error:
            if name := absent(error):
                untried.append(extra)
                print(f"{extra}: not tried, the registry does not have {name}", flush=True)
            else:
                failed.append(extra)
                print(f"{extra}: failed ({error})", flush=True)
        else:
            print(f"{extra}: works", flush=True)
    if untried:
        print(f"extras that were not tried: {', '.join(untried)}")
    if failed:
        raise SystemExit(f"extras that do not work: {', '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
