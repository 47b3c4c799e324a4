"""MoE layers under `torch.export`, and compiled for any number of tokens."""

import io

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from acmoe import MoE, RoutingState


class Layers(nn.Module):
    """Two adaptive layers with a residual between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"dim": 4, "hidden": 6, "num_experts": 3, "top_k": 2}
        self.layers = nn.ModuleList(MoE(**sizes, router="adaptive") for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = None
        for layer in self.layers:
            y, state = layer(x, state)
            x = x + y
        return x, state.aux_loss


def filled() -> Layers:
    model = Layers()
    for layer in model.layers:
        layer.next_state.statistics.dispersion.copy_(torch.rand(3, 4) + 0.1)
        layer.next_state.statistics.weight.fill_(9.0)
    return model


@pytest.mark.parametrize(
    "lead",
    [("T",), pytest.param(("B", "L"), marks=pytest.mark.slow)],
)
def test_an_exported_model_takes_any_number_of_tokens(lead: tuple[str, ...]) -> None:
    model = filled().eval()
    sizes = {axis: Dim(name, min=2, max=1 << 20) for axis, name in enumerate(lead)}
    example = torch.randn(*(7 + axis for axis in sizes), 4)
    program = export(model, (example,), dynamic_shapes={"x": sizes}).module()
    # From 128 tokens per expert on, an eager layer sorts tokens for its kernels.
    for tokens in (2, 3 * 128):
        x = torch.randn(*(tokens if axis == 0 else 2 for axis in sizes), 4)
        torch.testing.assert_close(program(x), model(x))


def test_a_program_that_returns_its_state_is_saved_and_loaded() -> None:
    layer, x = filled().layers[0].eval(), torch.randn(5, 4)
    file = io.BytesIO()
    torch.export.save(export(layer, (x,)), file)
    file.seek(0)
    y, state = torch.export.load(file).module()(x)
    expected, after = layer(x)
    assert isinstance(state, RoutingState)
    for found, wanted in zip((y, *state), (expected, *after), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's
def test_a_compiled_model_takes_any_number_of_tokens_and_none() -> None:
    torch._dynamo.reset()
    moe = filled().layers[0].eval()
    compiled = torch.compile(moe, backend="eager", fullgraph=True, dynamic=True)
    for tokens in (6, 5, 0):
        x = torch.randn(tokens, 4)
        torch.testing.assert_close(compiled(x)[0], moe(x)[0])
