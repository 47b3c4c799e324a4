"""A small language model with the plain runner, for the tests of the fast one."""

import torch
from torch import Tensor

import acmoe
from acmoe.fast import restore
from acmoe.models.text.decoder import LanguageModel

TOKENS = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(0))


def build(**changes: object) -> LanguageModel:
    torch.manual_seed(0)
    return restore(acmoe.create_model("switch-nano", router="adaptive", dropout=0.0, **changes))


def outcome(model: LanguageModel) -> list[Tensor]:
    """Loss of two segments with memory, and all gradients."""
    model.zero_grad()
    first = model(TOKENS[:, :24], TOKENS[:, 1:25])
    second = model(TOKENS[:, 24:47], TOKENS[:, 25:], memory=first.memory)
    loss = first.loss + first.aux_loss + second.loss + second.aux_loss
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients]
