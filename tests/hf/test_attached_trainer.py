"""Loops of other packages train an attached model; the statistics move, and are resumed from."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from attached import logits, statistics
from small_models import build, inputs
from torch import Tensor, nn

import acmoe
import acmoe.hf
from acmoe import AdaptiveConfig

pytest.importorskip("accelerate", reason="needs accelerate: pip install 'acmoe[examples]'")
from transformers import Trainer, TrainingArguments

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # of packages not ours

TOKENS = inputs("mixtral", 32, 16)["input_ids"]


def attached(**fields: Any) -> nn.Module:
    return acmoe.attach(build("mixtral"), AdaptiveConfig(momentum=0.5, **fields), skip=0)


def arguments(path: Path, kind: type = TrainingArguments, **options: Any) -> Any:
    """Two micro-batches of four sequences a step: four steps over all tokens."""
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    given = {**quiet, **sizes, "num_train_epochs": 1, "learning_rate": 1e-2, **options}
    return kind(output_dir=str(path), **given)


def rows() -> list[dict[str, Tensor]]:
    return [{"input_ids": row, "labels": row} for row in TOKENS]


def assert_moved(model: nn.Module, steps: int, tokens: int = 128) -> None:
    """`steps` of so many tokens, discounted by 1/2 each. Clusters of one token do not count, and
    those of none are not discounted; twice or half the tokens would be far outside."""
    expected = sum(tokens * 0.5**n for n in range(steps))
    for one in statistics(model):
        assert 0.9 * expected <= one.weight.sum() <= 1.15 * expected


@pytest.mark.parametrize("reentrant", [False, True])
def test_trainer_with_checkpointing_and_accumulation(reentrant: bool, tmp_path: Path) -> None:
    """Both micro-batches of a step count, once each: 2 * 4 * 16 tokens a step."""
    model = attached()
    options = arguments(
        tmp_path,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )
    Trainer(model, options, train_dataset=rows()).train()
    assert_moved(model, steps=4)


def test_label_smoothing_shifts_the_labels(tmp_path: Path) -> None:
    """As for the plain model, whose class the Trainer knows."""
    losses = []
    for model in (build("mixtral"), attached()):
        options = arguments(tmp_path, label_smoothing_factor=0.1, max_steps=1, logging_steps=1)
        trainer = Trainer(model, options, train_dataset=rows())
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] == losses[1]


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft", reason="needs peft: pip install peft")
    torch.manual_seed(1)
    return peft.get_peft_model(attached(), peft.LoraConfig(r=2, target_modules=["q_proj"]))


@pytest.mark.parametrize("with_callback", [True, False])
def test_training_of_an_adapter_is_resumed_with_its_statistics(
    with_callback: bool, tmp_path: Path
) -> None:
    def callbacks(resume_from: Path | None = None) -> list[Any]:
        return [acmoe.hf.StatisticsCallback(resume_from)] if with_callback else []

    options = arguments(tmp_path, save_strategy="steps", save_steps=2, save_total_limit=2)
    whole = adapted()
    Trainer(whole, options, train_dataset=rows(), callbacks=callbacks()).train()
    names = {file.name for file in (tmp_path / "checkpoint-2").iterdir()}
    assert {"adapter_model.safetensors", "acmoe_statistics.safetensors"} <= names
    for resume_from, given in ((None, True), (tmp_path / "moved", str(tmp_path / "moved"))):
        if resume_from is not None:
            (tmp_path / "checkpoint-2").rename(resume_from)
        else:  # the last checkpoint is then that of step 2
            (tmp_path / "checkpoint-4").rename(tmp_path / "last")
        resumed = adapted()
        trainer = Trainer(resumed, options, train_dataset=rows(), callbacks=callbacks(resume_from))
        trainer.train(resume_from_checkpoint=given)
        for one, other in zip(statistics(whole), statistics(resumed), strict=True):
            torch.testing.assert_close(one.dispersion, other.dispersion)
            assert torch.equal(one.weight, other.weight)
        x = inputs("mixtral")
        torch.testing.assert_close(logits(resumed.eval(), **x), logits(whole.eval(), **x))
        if resume_from is None:
            shutil.rmtree(tmp_path / "checkpoint-4")


def test_training_of_a_whole_model_is_resumed_with_its_experts(tmp_path: Path) -> None:
    """The Trainer of transformers 5.22 leaves out the experts of a plain Mixtral."""
    options = arguments(tmp_path, save_strategy="steps", save_steps=2)
    whole, resumed = attached(), attached()
    Trainer(whole, options, train_dataset=rows()).train()
    trainer = Trainer(resumed, options, train_dataset=rows())
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for (name, one), other in zip(
        whole.state_dict().items(), resumed.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(one, other, msg=name)


def test_the_best_model_gets_its_statistics_back(tmp_path: Path) -> None:
    options = arguments(
        tmp_path,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        learning_rate=0.3,
    )
    model = adapted()
    trainer = Trainer(model, options, train_dataset=rows(), eval_dataset=rows()[:4])
    trainer.train()
    other = adapted()
    acmoe.hf.load_statistics(other, trainer.state.best_model_checkpoint)
    for one, expected in zip(statistics(model), statistics(other), strict=True):
        assert torch.equal(one.dispersion, expected.dispersion)


def test_accelerate() -> None:
    from accelerate import Accelerator

    model = attached().train()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in TOKENS.split(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    assert_moved(model, steps=4)


def test_sft_trainer_of_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="needs trl: pip install trl")
    datasets = pytest.importorskip("datasets", reason="needs datasets: pip install datasets")
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(n): n for n in range(97)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="2")
    table = datasets.table.InMemoryTable.from_pydict({"input_ids": TOKENS.tolist()})
    data = datasets.Dataset(table, fingerprint="tokens")
    options = arguments(tmp_path, trl.SFTConfig, gradient_checkpointing=True, max_length=16)
    model = attached()
    trl.SFTTrainer(model, options, train_dataset=data, processing_class=tokenizer).train()
    assert_moved(model, steps=4)
