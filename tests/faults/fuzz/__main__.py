"""Fuzz for some minutes on some cores: `python -m tests.faults.fuzz --minutes 5 --workers 12`.

Prints the examples of each target, writes what it found to a file, and ends with 1 if there is
anything in it.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# As in pyproject.toml; a worker inherits the path by the environment.
PATHS = [str(ROOT / name) for name in ("src", "tests")]
sys.path[:0] = PATHS
os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])

from faults.fuzz.runner import Report, work  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=None, help="of the first worker; random")
    parser.add_argument("--target", action="append", default=[], help="only this one; repeatable")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings.jsonl"))
    given = parser.parse_args()
    seed = time.time_ns() % 2**32 if given.seed is None else given.seed
    report, seconds = Report(), 60 * given.minutes
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.workers, mp_context=spawn) as pool:
        parts = [pool.submit(work, given.target, seconds, seed + n) for n in range(given.workers)]
        for part in parts:
            report.add(part.result())
    print(f"seed {seed}, {given.workers} workers, {given.minutes:g} minutes")
    for name, count in sorted(report.examples.items()):
        found = sum(finding["target"] == name for finding in report.findings)
        print(f"{name:24} {count:10,} examples  {found} findings")
    print(f"{'all':24} {sum(report.examples.values()):10,} examples")
    given.findings.write_text("".join(json.dumps(one) + "\n" for one in report.findings))
    for finding in report.findings:
        print(f"\n{finding['place']}\n  value {finding['value'][:500]}\n{finding['error'][-1500:]}")
    print(f"{len(report.findings)} findings written to {given.findings}")
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
