"""Set the CPU threads of tests; a child process that must give the same bits calls this, too."""

import os
import platform

import torch


def settle_cpu() -> None:
    """One thread, here and in child processes, and BLAS for matrix products.

    pytest-xdist runs one worker a core; more threads would only fight over them. On ARM torch takes
    small float32 products to oneDNN, where one takes 0.6 ms; BLAS takes 0.05 ms.
    """
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if platform.machine() in ("aarch64", "arm64"):
        torch.backends.mkldnn.set_flags(False)
