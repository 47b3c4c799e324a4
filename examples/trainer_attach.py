"""A Mixtral of transformers, made adaptive by one line and trained by the HuggingFace Trainer.

Gradient checkpointing and accumulation are on. The saved model is loaded by AutoModelForCausalLM.
"""

import tempfile

import torch
from nanogpt import windows
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)

import acmoe

BATCH = 4  # twice per step


def build() -> MixtralForCausalLM:
    """A small Mixtral over bytes, to keep this short; a pretrained one is attached likewise."""
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        bos_token_id=None,
        eos_token_id=None,
    )
    return MixtralForCausalLM(config)


def main(epochs: int = 2) -> tuple[MixtralForCausalLM, list[float]]:
    """Train, save and load; return the loaded model and the loss of every step."""
    torch.manual_seed(0)
    model = acmoe.attach(build())
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        # The model shifts the labels by one itself.
        examples = [{"input_ids": tokens, "labels": tokens} for tokens in windows(96)[0]]
        trainer = Trainer(model, arguments, train_dataset=examples)
        trainer.train()
        trainer.save_model(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return model, losses


if __name__ == "__main__":
    _, losses = main()
    print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {len(losses)} steps")
