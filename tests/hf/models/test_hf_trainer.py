"""transformers' Trainer trains the language model; its statistics move by themselves."""

import pytest
import torch
from hf_cases import language_model

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from acmoe.hf import AcmoeConfig, AcmoeForCausalLM
from acmoe.ops import dispatch

TEXT = torch.tensor(list(b"the cat sat on the mat, and the dog sat on the cat. " * 4))


def test_label_smoothing_scores_the_next_token_and_says_what_it_leaves_out(
    tmp_path, caplog, monkeypatch
):
    """With a factor near 0 the Trainer's loss is the model's without the auxiliary loss."""
    monkeypatch.setattr(dispatch, "_logged", set())
    model = language_model()
    ours = AcmoeForCausalLM(AcmoeConfig.of(model.config), model).train()
    tokens = TEXT[:32].view(2, 16)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), label_smoothing_factor=1e-12, report_to=[], use_cpu=True
    )
    out = ours(tokens, labels=tokens)
    assert out.aux_loss > 0.01
    assert not caplog.records
    smoothed = Trainer(ours, arguments).compute_loss(ours, {"input_ids": tokens, "labels": tokens})
    torch.testing.assert_close(smoothed, out.loss - out.aux_loss)
    assert "label_smoothing_factor or compute_loss_func leaves it out" in caplog.text


@pytest.mark.slow
def test_the_trainer_lowers_the_loss_and_moves_the_statistics(tmp_path):
    model = language_model()
    ours = AcmoeForCausalLM(AcmoeConfig.of(model.config), model)
    rows = [{"input_ids": row, "labels": row} for row in TEXT.unfold(0, 32, 8)]
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=20,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=20,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(model=ours, args=arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1
    moved = [
        name
        for name, value in ours.state_dict().items()
        if "statistics" in name and not torch.equal(value, before[name])
    ]
    assert any(name.endswith("dispersion") for name in moved)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-20")
    state = ours.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    # The loss of the labels and the auxiliary loss together, as in training.
    assert trainer.evaluate()["eval_loss"] < losses[0] - 1
