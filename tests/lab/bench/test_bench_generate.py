"""`acmoe bench generate` times decode steps and says what could not be timed."""

from dataclasses import replace

import pytest
import torch

from acmoe.cli.bench.terminal import terminal_tables
from acmoe.errors import UserError
from acmoe.experts.moe import MoE
from acmoe.lab.bench.models import decode_steps, generate, generate_models
from acmoe.lab.bench.models.generate import GenerateBenchConfig, bench_generate
from acmoe.routing.statistics import ClusterStatistics

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU captures no graph")

TWO_ROUTERS = GenerateBenchConfig(
    models=("switch-nano",),
    batches=(1,),
    contestants=("plain",),
    router=("smoe", "adaptive"),
    prompt=2,
    tokens=2,
    repeat=1,
    dtype="fp32",
)

ON_CPU = {"dtype": torch.float32, "seed": 0, "device": torch.device("cpu")}


def test_a_step_takes_the_time_of_the_second_half(monkeypatch: pytest.MonkeyPatch) -> None:
    # A call of 4 tokens takes 7 s and one of 8 tokens 15 s: 4 steps in 8 s, of 3 sequences each.
    monkeypatch.setattr(generate, "_seconds", lambda call, tokens, device: 2.0 * tokens - 1)
    config = GenerateBenchConfig(
        models=("switch-nano",), batches=(3,), prompt=2, tokens=8, repeat=2, dtype="fp32"
    )
    report = bench_generate(config, command="acmoe bench generate")
    plain, captured = report.rows
    assert (plain["ms_per_step"], plain["tokens_per_second"], plain["seconds"]) == (2000, 1.5, 15)
    assert captured["refused"] == "smoe: CUDA graphs need a CUDA device, not cpu"
    (table,) = terminal_tables(report, 200)
    assert table.row_count == 2


def test_names_are_checked() -> None:
    for wrong in ({"models": ("swin-nano",)}, {"contestants": ("fast",)}, {"tokens": 1}):
        with pytest.raises(UserError):
            GenerateBenchConfig(**wrong)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"prompt": 0}, "prompt=0; it must be at least 1"),
        ({"repeat": 0}, "repeat=0; it must be at least 1"),
        ({"batches": (1, 0)}, "batches=0; each must be at least 1"),
        ({"tokens": 1}, "tokens=1; half of them are timed against all: give at least 2"),
    ],
)
def test_a_count_that_is_too_small_is_named(wrong: dict[str, object], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        GenerateBenchConfig(**wrong)


def test_the_model_of_olmoe_s_size_has_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(generate_models.OLMOE, dim=32, hidden=8, repeats=2)
    monkeypatch.setattr(generate_models, "OLMOE", small)
    model = generate_models.build_ours("olmoe", "adaptive", **ON_CPU)
    moe = [one for one in model.modules() if isinstance(one, MoE)]
    # A gate and an up projection of 8 units each, and no biases, as in OLMoE.
    assert [tuple(p.shape) for p in moe[1].experts.parameters()] == [(64, 16, 32), (64, 32, 8)]
    assert len(moe) == 2
    # It decodes with the statistics of a batch: no scale is that of the plain router.
    running = [one for one in model.modules() if isinstance(one, ClusterStatistics)]
    assert len(running) == 1 and running[0].weight.any()


def test_routers_are_timed_in_turn_and_compared_within_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A round takes 10, 11, 12, ... s with the first router and 1 s more with the second."""
    order, seen = [], {}

    def seconds(run: decode_steps.Decoding) -> float:
        which = seen.setdefault(id(run), len(seen))
        order.append(which)
        return 10.0 + (len(order) - 1) // 2 + which

    monkeypatch.setattr(decode_steps, "_seconds", seconds)
    monkeypatch.setattr(decode_steps, "ROUNDS", 6)
    monkeypatch.setattr(generate, "_seconds", lambda call, tokens, device: 2.0 * tokens)
    plain, adaptive = bench_generate(TWO_ROUTERS, command="").rows
    assert order == [0, 1, 1, 0] * 3
    assert [plain["router"], adaptive["router"]] == ["smoe", "adaptive"]
    assert (plain["ms_per_step"], adaptive["ms_per_step"]) == (2_000, 2_000)
    assert plain["added_percent"] is None
    # One second of the median round, 12.5 s; all six differences are equal.
    assert adaptive["added_percent"] == pytest.approx(100 / 12.5)
    assert (
        adaptive["added_percent_low"] == adaptive["added_percent_high"] == pytest.approx(100 / 12.5)
    )


def test_a_step_that_fails_refuses_the_rows_and_not_the_benchmark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All routers have a cache at once, which may be more memory than a call of each needs."""

    def full(run: decode_steps.Decoding) -> float:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(decode_steps, "_seconds", full)
    monkeypatch.setattr(generate, "_seconds", lambda call, tokens, device: 2.0 * tokens)
    rows = bench_generate(TWO_ROUTERS, command="").rows
    assert [row["refused"] for row in rows] == ["OutOfMemoryError: out of memory"] * 2


def test_decoding_takes_the_most_likely_tokens_of_generate() -> None:
    model = generate_models.build_ours("switch-nano", "smoe", **ON_CPU)
    prompt = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        run = decode_steps.Decoding(model, prompt)
        found = []
        for _ in range(5):
            found.append(run.logits_BV.argmax(-1).item())
            run.take(1)
    assert found == model.generate(prompt, 5, temperature=0)[0].tolist()
