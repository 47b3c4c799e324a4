"""The adaptive router alone, over experts of your own: here ordinary Linear layers, in a loop.

It learns to undo a random rotation of clustered points; a few seconds on a CPU.
"""

import torch
from torch import Tensor, nn

import acmoe

WIDTH, EXPERTS, LAYERS, TOKENS = 16, 4, 3, 256


class MyExperts(nn.Module):
    """y = sum of gate * expert(x) over each token's experts. acmoe has no part in it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor, expert_ids: Tensor, gate: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, place = (expert_ids == index).nonzero(as_tuple=True)
            y = y.index_add(0, token, gate[token, place, None] * expert(x[token]))
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(MyExperts() for _ in range(LAYERS))
        self.routers = nn.ModuleList(
            acmoe.build_router("adaptive", dim=WIDTH, num_experts=EXPERTS, top_k=2, standalone=True)
            for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, acmoe.RoutingState]:
        state = None
        for router, experts in zip(self.routers, self.experts, strict=True):
            routing = router(x, state)
            state = router.next_state(x, routing, state)
            x = x + experts(x, routing.expert_ids, routing.gate)
        return x, state


def main(steps: int = 100) -> tuple[Model, list[float]]:
    """Train; return the model and the loss of every step."""
    torch.manual_seed(0)
    rotation, _ = torch.linalg.qr(torch.randn(WIDTH, WIDTH))
    centers = 2 * torch.randn(EXPERTS, WIDTH)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        target = centers[torch.randint(EXPERTS, (TOKENS,))] + torch.randn(TOKENS, WIDTH)
        y, state = model(target @ rotation)
        loss = (y - target).square().mean() + state.aux_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    _, losses = main()
    print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {len(losses)} steps")
