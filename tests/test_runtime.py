"""A run in bfloat16 on a CPU prints no warning, with or without bf16 instructions."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from acmoe import runtime
from acmoe.runtime import autocast
from acmoe.train.run import train
from tiny_runs import QUIET, byte_corpus, tiny_run

CPU = torch.device("cpu")


@pytest.fixture
def fresh_process() -> Iterator[None]:
    """oneDNN is on and no bf16 product has run, as at the start of a process."""
    was_on = torch.backends.mkldnn.enabled
    runtime._settle_bf16_gemm.cache_clear()
    torch.backends.mkldnn.set_flags(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # without the filters that the other tests run under
        yield
    torch.backends.mkldnn.set_flags(was_on)


def test_a_bf16_training_run_on_a_cpu_gives_no_warning(
    fresh_process: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # 64 wide: its products are large enough for oneDNN, which warns where a CPU has no bf16.
    sizes = ("model.dim=64", "model.hidden=64", "steps=2", "eval_every=2")
    config = tiny_run(byte_corpus(tmp_path), "precision=bf16", *sizes)
    train(config, tmp_path / "run", console=QUIET)
    assert capfd.readouterr().err == ""


def test_only_the_warning_of_the_first_bf16_product_is_held_back(fresh_process: None) -> None:
    with autocast("bf16", CPU):
        assert torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64)).eq(64).all()
        with pytest.warns(UserWarning, match="another"):
            warnings.warn("another", stacklevel=1)
    assert warnings.filters[0][0] == "error"  # nothing of ours is left behind


def test_fp32_leaves_products_alone(fresh_process: None) -> None:
    with autocast("fp32", CPU):
        assert torch.ones(64, 64).mm(torch.ones(64, 64)).dtype == torch.float32
    assert torch.backends.mkldnn.enabled and runtime._settle_bf16_gemm.cache_info().misses == 0
