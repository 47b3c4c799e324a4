"""The cost model of many GPUs: rows by hand arithmetic, and the command that prints them."""

import math
from pathlib import Path

import pytest

from acmoe.cli import main
from acmoe.errors import UserError
from acmoe.lab.bench.scaling import (
    MODELS,
    Machine,
    boundary_bytes,
    expert_bytes,
    row,
    state_bytes,
    table,
)

PAGE = Path(__file__).parents[3] / "docs" / "scaling.md"
OLMOE, MIXTRAL, DEEPSEEK = MODELS


def test_deepseek_on_2048_gpus_by_hand() -> None:
    found = row(DEEPSEEK, 2048, Machine())
    # 30,720 tokens a GPU at 1e12 tokens in 180,000 x 3,600 GPU seconds.
    assert found.step == pytest.approx(30_720 * 180e3 * 3600 / 1e12)
    assert found.step == pytest.approx(19.9, abs=0.01)
    # 57 layers on 16 stages; 256 x 7,169 floats each; 128 replicas: a ring sends 2 x 127 / 128.
    assert found.pooled == pytest.approx(57 / 16 * 256 * 7169 * 4 * 2 * 127 / 128)
    # 50 GB/s, and 14 hops of 8 us up and down a tree of 128.
    assert found.pooled_share == pytest.approx((found.pooled / 50e9 + 14 * 8e-6) / found.step)
    assert 5e-5 < found.pooled_share < 6e-5
    # 120 micro-batches of 4,096 tokens a replica, each with two reductions of every layer.
    assert found.barriers == 855 == round(2 * 120 * 57 / 16)
    whole = 256 * 7169 * 8 + 256 * 7168 * 4
    assert found.globally == pytest.approx(120 * 57 / 16 * whole * 2 * 127 / 128)
    assert found.globally_share > 0.02
    # 8 rows of 7,168 bf16 numbers a token, four times, in 58 layers; 63 of 64 go away.
    assert found.experts == pytest.approx(4 * 30_720 * 8 * 7168 * 2 * 58 * 63 / 64)


def test_the_models_have_their_published_sizes() -> None:
    for model, billions in ((OLMOE, 6.44), (MIXTRAL, 45.1), (DEEPSEEK, 653.9)):
        assert model.expert_parameters / 1e9 == pytest.approx(billions, rel=2e-3)
        assert model.expert_parameters < model.parameters


def test_gradients_of_mixtral_on_64_gpus_by_hand() -> None:
    # Experts: an eighth of them on each process, eight copies. The rest: on all 64.
    experts, rest = 45_097_156_608 / 8, 46.7e9 - 45_097_156_608
    expected = 4 * (experts * 2 * 7 / 8 + rest * 2 * 63 / 64)
    assert row(MIXTRAL, 64, Machine()).gradients == pytest.approx(expected)


def test_bytes_of_experts_and_pipelines_by_hand() -> None:
    assert expert_bytes(10, 2, 6, 2) == 4 * 10 * 2 * 6 * 2
    assert boundary_bytes(4096, 7168, 2) == 2 * 58_720_256
    assert state_bytes(4096, 256, 7168, with_scale=False) == 4096 * 4
    # M is 12.5 % of the 58.7 MB of hidden states.
    scale = state_bytes(4096, 256, 7168, with_scale=True) - 4096 * 4
    assert math.isclose(scale / 58_720_256, 0.125)


def test_a_layout_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="DeepSeek-V3 is laid out in multiples of 1024"):
        row(DEEPSEEK, 512, Machine())
    assert "| DeepSeek-V3 | 512 | needs 1,024 |" in table(Machine(), (512,))[-1]


def test_the_command_prints_the_table_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "scaling"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert printed.strip() == "\n".join(table(Machine()))
    assert printed.strip() in PAGE.read_text()
