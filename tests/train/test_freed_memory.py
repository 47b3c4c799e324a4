"""Commands keep the memory that they free, so that it is not faulted in again."""

import os
import subprocess
import sys

import pytest

from acmoe.train.freed_memory import keep_freed_memory

# 32 MiB in 16 pieces. Without `keep`, glibc gets the thresholds that it begins with: it would
# adjust them by itself, which may help or not. Prints the page faults of the second half.
CHURN = """
import ctypes
import resource
import torch
from acmoe.train.freed_memory import keep_freed_memory

kept = {keep} and keep_freed_memory()
if not kept:
    for option in (-1, -3):
        ctypes.CDLL(None).mallopt(option, 128 * 1024)
faults = []
for _ in range(40):
    pieces = [torch.zeros(2**19) for _ in range(16)]
    del pieces
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(kept, faults[-1] - faults[19])
"""
GLIBC = "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", ())


def churn(keep, **variables):
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    done = subprocess.run(
        [sys.executable, "-c", CHURN.format(keep=keep)],
        env={**environment, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    kept, faults = done.stdout.split()
    return kept == "True", int(faults)


@pytest.mark.skipif(not GLIBC, reason="only glibc has the option")
def test_freed_memory_is_used_again_without_page_faults():
    kept, faults = churn(keep=True)
    assert kept
    # 20 rounds touch 8,192 pages each, of which glibc hands back all or none.
    assert faults < 200
    assert churn(keep=False)[1] > 20 * 8000


@pytest.mark.skipif(not GLIBC, reason="only glibc has the option")
def test_the_variables_of_glibc_are_left_to_the_user(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    assert not keep_freed_memory()


def test_another_allocator_is_left_alone(monkeypatch):
    monkeypatch.setattr(os, "confstr_names", {}, raising=False)
    assert not keep_freed_memory()
