"""A GPT in the style of nanoGPT that learns the bytes of this file: about ten seconds on a CPU.

`diff nanogpt_plain.py nanogpt.py` shows what an adaptive mixture of experts takes.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812, the customary name

import acmoe

WIDTH, HEADS, LAYERS, LENGTH, BATCH = 64, 4, 3, 64, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, L, D = x.shape
        q, k, v = self.qkv(x).view(B, L, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, L, D))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.mlp = acmoe.MoEFFN(dim=WIDTH, hidden=WIDTH, num_experts=4, top_k=2, router="adaptive")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = acmoe.MoEStack([Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        x, state = self.blocks(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + state.aux_loss
        return logits, loss


def windows(count: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, each (count, LENGTH): bytes of this file, and those one later."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    start = torch.randint(len(text) - LENGTH, (count,))
    window = text[start[:, None] + torch.arange(LENGTH + 1)]
    return window[:, :-1], window[:, 1:]


def main(steps: int = 200) -> tuple[GPT, list[float]]:
    """Train; return the model and the loss of every step."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(steps):
        _, loss = model(*windows(BATCH))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    _, losses = main()
    print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {len(losses)} steps")
