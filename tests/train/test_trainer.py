"""One update: what it averages, what it carries on, what it changes once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_updates import statistics_updated

from acmoe.config.text.train import RunConfig
from acmoe.data.text.corpus import load_corpus
from acmoe.errors import UserError
from acmoe.evaluate.run import open_corpus
from acmoe.fast.text import FastRunner
from acmoe.routing.baselines.stable import StableRouter
from acmoe.train.run import train
from acmoe.train.text import TextTrainer
from tiny_runs import QUIET, byte_corpus, tiny_run


def trainer_of(config: RunConfig) -> TextTrainer:
    torch.manual_seed(config.seed)
    return TextTrainer(config, open_corpus(config.data), torch.device("cpu"))


def plain(corpus: Path, *overrides: str) -> RunConfig:
    """A run whose streams do not see each other: no statistics, no balance loss, no dropout."""
    return tiny_run(corpus, "model.router=smoe", "model.balance=0", "model.dropout=0", *overrides)


def test_micro_batches_make_the_update_of_the_whole_batch(tmp_path: Path) -> None:
    corpus = byte_corpus(tmp_path)
    whole, parts = (trainer_of(plain(corpus, f"split={n}", "lr=1e-3")) for n in (1, 4))
    for step in range(1, 4):
        one, other = whole.update(step, record=True), parts.update(step, record=True)
        assert one.loss.item() == pytest.approx(other.loss.item(), rel=1e-5)
        for load, same in zip(one.loads, other.loads, strict=True):
            assert torch.equal(load, same)
            assert load.sum() == 4 * 16 * 2  # tokens of the step, each at two experts


def test_the_loss_is_the_models_on_the_batch_with_the_memory_of_the_last(tmp_path: Path) -> None:
    trainer = trainer_of(plain(byte_corpus(tmp_path), "split=1"))
    reader = trainer_of(plain(tmp_path / "corpus", "split=1")).batches
    memory = None
    for step in range(1, 4):
        batch = next(reader)
        with torch.no_grad():
            out = trainer.model(batch.tokens, batch.targets, memory=memory)
        update = trainer.update(step, record=False)
        assert update.loss.item() == pytest.approx(out.loss.item(), rel=1e-6)
        memory = trainer.memories[0]
        assert memory is not None
        assert memory.hidden[0].shape == (4, min(24, 16 * step), 16)


def test_a_new_pass_over_the_data_begins_without_memory(tmp_path: Path) -> None:
    # 13 lines: 333 bytes of training text make 4 rows of 83, that is 5 blocks of 16 a pass.
    trainer = trainer_of(plain(byte_corpus(tmp_path, lines=13), "split=1"))
    lengths = []
    for step in range(1, 8):
        trainer.update(step, record=False)
        assert trainer.memories[0] is not None
        lengths.append(trainer.memories[0].hidden[0].shape[1])
    assert trainer.batches.passes >= 1
    resets = [place for place, length in enumerate(lengths) if length == 16]
    assert resets[0] == 0 and len(resets) == 2  # span is 24: a second block fills it
    assert set(lengths) == {16, 24}


def test_the_auxiliary_loss_is_part_of_what_is_minimised(tmp_path: Path) -> None:
    corpus = byte_corpus(tmp_path)
    updates = {}
    for balance in ("0", "1"):
        overrides = ("model.router=smoe", f"model.balance={balance}", "model.dropout=0")
        trainer = trainer_of(tiny_run(corpus, *overrides))
        update = trainer.update(1, record=False)
        gate = trainer.model.moe_layers()[0].router.embedding.detach().clone()
        updates[balance] = (update, gate)
    assert updates["0"][0].aux_loss == 0
    assert updates["1"][0].aux_loss > 2.5  # three layers, each 1 at perfect balance and more off it
    assert updates["0"][0].loss == updates["1"][0].loss  # the reported loss is cross-entropy alone
    assert not torch.equal(updates["0"][1], updates["1"][1])


def test_statistics_are_folded_in_once_per_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tiny_run(byte_corpus(tmp_path), "split=4"))
    updated = statistics_updated(trainer, monkeypatch)
    assert len(updated) == 2  # layers 1 and 2 measure for the adaptive layers 2 and 3
    assert all(statistics.weight.sum() > 0 for statistics in updated)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (20, [{1}, {1}, {2}, {2}]),  # 20 / 10 = 2 steps of stage one
        (5, [{1}, {2}, {2}, {2}]),  # one step: routers that never learned would stay random
    ],
)
def test_stablemoe_freezes_its_routing_after_a_tenth_of_the_steps(
    tmp_path: Path, steps: int, expected: list[set[int]]
) -> None:
    trainer = trainer_of(tiny_run(byte_corpus(tmp_path), "model.router=stable", f"steps={steps}"))
    routers = [module for module in trainer.model.modules() if isinstance(module, StableRouter)]
    stages = []
    for step in range(1, 5):
        trainer.update(step, record=False)
        stages.append({router.stage for router in routers})
    assert stages == expected
    light = routers[0].light_tokens.weight.detach().clone()
    trainer.update(5, record=False)
    assert torch.equal(light, routers[0].light_tokens.weight)


@pytest.mark.parametrize("router", ["adaptive", "random"])
def test_a_gate_below_a_rescaling_router_has_a_bias_only_if_the_run_asks_for_it(
    tmp_path: Path, router: str
) -> None:
    corpus = byte_corpus(tmp_path)
    sizes = []
    for bias in ("true", "false"):
        config = tiny_run(corpus, f"model.router.base.bias={bias}", router=router)
        trainer = trainer_of(config)
        sizes.append(sum(one.numel() for one in trainer.model.parameters()))
    assert sizes[0] - sizes[1] == 3 * 4  # three layers of four experts


def test_rows_that_the_validation_text_does_not_fill_are_refused_before_the_first_step(
    tmp_path: Path,
) -> None:
    corpus = byte_corpus(tmp_path)
    valid = len(load_corpus(corpus)["valid"])
    whole = ("eval_tokens=none", "steps=1")
    train(tiny_run(corpus, *whole, f"eval_batch={valid - 1}"), tmp_path / "run", console=QUIET)
    config = tiny_run(corpus, *whole, f"eval_batch={valid}")
    with pytest.raises(UserError, match=f"eval_batch={valid} rows .* has {valid - 1:,}; lower"):
        train(config, tmp_path / "other", console=QUIET)
    assert not (tmp_path / "other").exists()


def test_the_gradient_is_clipped_to_the_norm_asked_for(tmp_path: Path) -> None:
    trainer = trainer_of(plain(byte_corpus(tmp_path), "clip=0.25", "warmup=0"))
    norms: list[float] = []
    step = trainer.optimizer.step

    def noted(*arguments: Any) -> None:
        gradients = [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
        norms.append(torch.cat(gradients).norm().item())
        step(*arguments)

    trainer.optimizer.step = noted  # type: ignore[method-assign, assignment]
    trainer.update(1, record=False)
    assert norms == pytest.approx([0.25], rel=1e-4)


def test_bf16_keeps_weights_and_moments_in_float32(tmp_path: Path) -> None:
    trainer = trainer_of(tiny_run(byte_corpus(tmp_path), "precision=bf16"))
    low = trainer.update(1, record=False).loss
    exact = trainer_of(tiny_run(tmp_path / "corpus")).update(1, record=False).loss
    assert low != exact
    assert low.item() == pytest.approx(exact.item(), rel=2e-2)  # bf16 has 8 bits
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    moments = [state["exp_avg"].dtype for state in trainer.optimizer.state.values()]
    assert set(moments) == {torch.float32}


def test_validation_leaves_training_as_it_was(tmp_path: Path) -> None:
    # This router draws in every call.
    config = tiny_run(byte_corpus(tmp_path), "model.router=random", "eval_tokens=100")
    with_validation, without = [], []
    for losses, validate in ((with_validation, True), (without, False)):
        trainer = trainer_of(config)
        for step in range(1, 4):
            losses.append(trainer.update(step, record=False).loss.item())
            if validate:
                found = trainer.validate()
                assert (found.tokens, found.batch, found.block) == (99, 2, 16)
                assert found.statistics == "none"
    assert with_validation == without


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # dynamo warns and hides it, which works for defaults only
def test_compiled_blocks_train_as_eager_ones_with_a_graph_for_each_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")  # captures graphs, builds no machine code
    real = FastRunner.compile

    def traced(self: FastRunner, *, backend: str, **how: object) -> None:
        real(self, backend=counter, **how)

    monkeypatch.setattr(FastRunner, "compile", traced)
    corpus = byte_corpus(tmp_path)
    overrides = ("model.dropout=0", "steps=9", "lr=1e-3", "model.repeats=4", "eval_tokens=60")
    eager, compiled = (
        trainer_of(replace(tiny_run(corpus, *overrides), compile=flag)) for flag in (False, True)
    )
    for step in range(1, 10):
        record = step % 4 == 0  # these, and validation, run eagerly in between
        one, other = eager.update(step, record=record), compiled.update(step, record=record)
        assert other.loss.item() == pytest.approx(one.loss.item(), rel=1e-4)
        if step == 5:
            assert compiled.validate().loss == pytest.approx(eager.validate().loss, 1e-4)
    # First (plain), middle (adaptive, before an adaptive one) and last (adaptive) blocks.
    assert counter.frame_count == 3
    assert eager.model.state_dict().keys() == compiled.model.state_dict().keys()
