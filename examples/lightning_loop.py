"""The GPT of nanogpt.py trained by Lightning. Nothing in it is about statistics."""

import lightning
import torch
from nanogpt import BATCH, GPT, windows
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class LitGPT(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT()
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        _, loss = self.gpt(*batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main(epochs: int = 2) -> tuple[GPT, list[float]]:
    """Train; return the model and the loss of every step."""
    torch.manual_seed(0)
    model = LitGPT()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(*windows(96)), batch_size=BATCH))
    return model.gpt, model.losses


if __name__ == "__main__":
    _, losses = main()
    print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {len(losses)} steps")
