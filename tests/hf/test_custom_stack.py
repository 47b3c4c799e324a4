"""Models of other people's code: what their forward must do for `attach`."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

import acmoe
from acmoe import AdaptiveConfig, UserError
from acmoe.hf import families, register_family

TOKENS = torch.arange(24).view(2, 12)


@pytest.fixture(autouse=True)
def gate() -> Iterator[None]:
    """Know the gate of the models below, and leave the table of families as it was."""
    before = dict(families.FAMILIES)
    register_family("Linear", ends_with="block.gate")
    yield
    families.FAMILIES.clear()
    families.FAMILIES.update(before)


class Block(nn.Module):
    """Four experts, each of which adds a vector of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.vectors = nn.Embedding(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x).softmax(-1) @ self.vectors.weight


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return hidden_states + self.block(hidden_states)


class Stack(PreTrainedModel):
    config_class = PreTrainedConfig

    def __init__(self) -> None:
        super().__init__(PreTrainedConfig())
        torch.manual_seed(0)
        self.embed = nn.Embedding(24, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.eval()

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, **kwargs)
        return x


class TakesNone(Stack):
    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids)


class PassesNone(Stack):
    def forward(self, input_ids: Tensor, **kwargs: Any) -> Tensor:
        return super().forward(input_ids)


def test_a_forward_must_take_arguments_for_the_layers_and_pass_them_on() -> None:
    with pytest.raises(UserError, match=r"TakesNone\.forward takes no \*\*kwargs"):
        acmoe.attach(TakesNone())
    model = acmoe.attach(PassesNone())
    with pytest.raises(UserError, match=r"forward must pass its \*\*kwargs on to its layers"):
        model(TOKENS)


def test_an_adapter_beside_a_router_is_refused_and_one_in_its_weight_is_not() -> None:
    """`lora.Linear` would add B A h, not B A M h, to the scores: unlike the merged weight."""
    peft = pytest.importorskip("peft", reason="needs peft: pip install peft")
    beside = peft.LoraConfig(r=2, target_modules=["gate"])
    message = r"is inside a Linear of PEFT.*target_parameters, not in target_modules"
    adapted = peft.get_peft_model(Stack(), beside)
    with pytest.raises(UserError, match=r"\(merge_and_unload\) before acmoe\.attach"):
        acmoe.attach(adapted)
    acmoe.attach(adapted.merge_and_unload())(TOKENS)
    model = peft.get_peft_model(acmoe.attach(Stack()), beside)
    with pytest.raises(UserError, match=message):
        model(TOKENS)

    inside = peft.LoraConfig(
        r=2, target_modules=[], target_parameters=["gate.weight"], init_lora_weights=False
    )
    model = peft.get_peft_model(acmoe.attach(Stack(), AdaptiveConfig(momentum=0.5)), inside)
    acmoe.calibrate(model, [TOKENS])
    adapted = model.eval()(TOKENS)
    merged = model.merge_and_unload()(TOKENS)
    torch.testing.assert_close(adapted, merged, atol=2e-6, rtol=0)
