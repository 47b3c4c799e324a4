"""Patches are embedded by the module `project`, whatever was done to it.

Shapes: B batch, Y rows and X columns of the map, D features.
"""

import pytest
import torch
from torch import Tensor, nn

from acmoe.models.images.patches import PatchEmbedding


class Doubled(nn.Module):
    """A wrapper around a layer, as adapters are; it shows the layer's weight."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.base_layer = layer

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    @property
    def kernel_size(self) -> tuple[int, ...]:
        return self.base_layer.kernel_size

    def forward(self, images: Tensor) -> Tensor:
        return 2 * self.base_layer(images)


class Negated(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return -weight


def embedding() -> tuple[PatchEmbedding, Tensor, Tensor]:
    """Return it, images, and their tokens (B, Y, X, D) summed patch by patch, without the bias."""
    torch.manual_seed(0)
    made = PatchEmbedding(channels=3, dim=5, patch=2, norm=False).double()
    images = torch.randn(2, 3, 6, 4, dtype=torch.float64)
    weight = made.project.weight.detach()
    rows = [
        [(weight * images[:, None, :, y : y + 2, x : x + 2]).sum((2, 3, 4)) for x in range(0, 4, 2)]
        for y in range(0, 6, 2)
    ]
    return made, images, torch.stack([torch.stack(row, 1) for row in rows], 1)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_token_is_the_product_of_its_pixels_and_the_weight(layout: torch.memory_format) -> None:
    made, images, tokens_BYXD = embedding()
    found = made(images.to(memory_format=layout))
    torch.testing.assert_close(found, tokens_BYXD + made.project.bias, rtol=1e-12, atol=1e-12)


def test_a_wrapped_projection_is_called() -> None:
    made, images, tokens_BYXD = embedding()
    expected = 2 * (tokens_BYXD + made.project.bias)
    made.project = Doubled(made.project)  # type: ignore[assignment]
    torch.testing.assert_close(made(images), expected, rtol=1e-12, atol=1e-12)


def test_hooks_of_the_projection_run_once_and_change_its_output() -> None:
    made, images, tokens_BYXD = embedding()
    expected, calls = tokens_BYXD + made.project.bias + 1, []

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        calls.append(output.shape)
        return output + 1

    made.project.register_forward_hook(hook)
    torch.testing.assert_close(made(images), expected, rtol=1e-12, atol=1e-12)
    assert calls == [(2, 5, 3, 2)]


def test_a_parametrized_weight_is_the_one_that_is_used() -> None:
    made, images, tokens_BYXD = embedding()
    nn.utils.parametrize.register_parametrization(made.project, "weight", Negated())
    expected = made.project.bias - tokens_BYXD
    torch.testing.assert_close(made(images), expected, rtol=1e-12, atol=1e-12)
