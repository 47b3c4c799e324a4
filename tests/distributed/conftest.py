"""The folder of runs that several processes train."""

from pathlib import Path

import pytest
import torch

from tiny_runs import byte_corpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for runs, with a byte corpus in `corpus`."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs")
    byte_corpus(folder)
    return folder
