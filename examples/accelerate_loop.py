"""The GPT of nanogpt.py in a loop of HuggingFace Accelerate. Nothing in it is about statistics."""

import torch
from accelerate import Accelerator
from nanogpt import BATCH, GPT, windows
from torch.utils.data import DataLoader, TensorDataset


def main(epochs: int = 2) -> tuple[GPT, list[float]]:
    """Train; return the model and the loss of every step."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(*windows(96)), batch_size=BATCH)
    )
    losses = []
    for _ in range(epochs):
        for tokens, targets in loader:
            _, loss = model(tokens, targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    return accelerator.unwrap_model(model), losses


if __name__ == "__main__":
    _, losses = main()
    print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {len(losses)} steps")
