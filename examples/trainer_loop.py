"""The GPT of nanogpt.py, an ordinary nn.Module, trained by the HuggingFace Trainer.

Nothing in it is about statistics.
"""

import tempfile

import torch
from nanogpt import BATCH, GPT, windows
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments


class ForTrainer(nn.Module):
    """The Trainer reads the loss from a dict, and passes batches by name."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT()

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits, loss = self.gpt(tokens, labels)
        return {"loss": loss, "logits": logits}


def main(epochs: int = 2) -> tuple[GPT, list[float]]:
    """Train; return the model and the loss of every step."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=BATCH,
            learning_rate=2e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        model = ForTrainer()
        examples = [
            {"tokens": tokens, "labels": targets}
            for tokens, targets in zip(*windows(96), strict=True)
        ]
        trainer = Trainer(model, arguments, train_dataset=examples)
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return model.gpt, losses


if __name__ == "__main__":
    _, losses = main()
    print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {len(losses)} steps")
