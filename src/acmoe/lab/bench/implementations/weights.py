"""Draw the weights and tokens that all implementations of a shape share.

T tokens, D features, F hidden units, W = F or 2F, E experts, K experts per token.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from acmoe.errors import check
from acmoe.lab.bench.shapes import EVEN, SKEW, Shape

# A skewed layer multiplies one expert's embedding by this factor. Its affinity is then the highest
# for nearly half of the tokens, and the lowest for the others.
_SKEW = 8.0
# Under an even load, a token has about this affinity with its own experts, and 0 with all others.
# Both vary by a quarter of what standard normal tokens vary by, so that no other expert comes near.
_EVEN, _VARIATION = 3.0, 0.25


class Weights(NamedTuple):
    """Parameters of a layer in acmoe's layout, (experts, output features, input features)."""

    embedding: nn.Parameter  # (E, D)
    up: nn.Parameter  # (E, W, D); for swiglu the rows of gate, then those of up
    down: nn.Parameter  # (E, D, F)
    up_bias: nn.Parameter | None  # (E, W)
    down_bias: nn.Parameter | None  # (E, D)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [weight for weight in self if weight is not None]


def draw_weights(
    shape: Shape,
    *,
    generator: torch.Generator,
    dtype: torch.dtype = torch.bfloat16,
    skew: bool = False,
) -> Weights:
    """Draw weights with variance 1 / fan-in. Unless skewed, loads differ by chance only.

    skew: send nearly half of the tokens to one expert, whatever the shape says.
    """

    def normal(*size: int, std: float) -> nn.Parameter:
        device = generator.device
        values = torch.randn(size, generator=generator, device=device, dtype=dtype)
        return nn.Parameter(values.mul_(std))

    D, F, W, E = shape.dim, shape.hidden, shape.width, shape.num_experts
    embedding = normal(E, D, std=D**-0.5)
    if skew or shape.load == SKEW:
        with torch.no_grad():
            embedding[0] *= _SKEW
    return Weights(
        embedding,
        normal(E, W, D, std=D**-0.5),
        normal(E, D, F, std=F**-0.5),
        normal(E, W, std=0.1) if shape.bias else None,
        normal(E, D, std=0.1) if shape.bias else None,
    )


def draw_tokens(
    shape: Shape, *, generator: torch.Generator, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Draw standard normal tokens, (T, D)."""
    size = (shape.tokens, shape.dim)
    return torch.randn(size, generator=generator, device=generator.device, dtype=dtype)


def draw_inputs(
    shape: Shape,
    weights: Weights,
    *,
    generator: torch.Generator,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Draw the tokens that enter a layer, (T, D): standard normal, unless the load is even."""
    x_TD = draw_tokens(shape, generator=generator, dtype=dtype)
    return _even_load(x_TD, weights.embedding, shape) if shape.load == EVEN else x_TD


@torch.no_grad()
def _even_load(x_TD: Tensor, embedding_ED: Tensor, shape: Shape) -> Tensor:
    """Change the tokens so that they choose the experts in turn."""
    E, K = shape.num_experts, shape.top_k
    check(
        shape.dim >= E,
        f"shape {shape.name!r} has {E} experts and {shape.dim} features; an even load needs at "
        "least as many features as experts, so leave out +even",
    )
    experts_TK = torch.arange(shape.rows, device=x_TD.device).view(-1, K) % E
    own_TE = torch.zeros(shape.tokens, E, device=x_TD.device).scatter_(1, experts_TK, _EVEN)
    affinity_TE = x_TD.float() @ embedding_ED.float().T
    # The pseudoinverse's column of an expert has affinity 1 with it and 0 with all others.
    direction_ED: Tensor = torch.linalg.pinv(embedding_ED.float()).T
    change_TE = own_TE - (1 - _VARIATION) * affinity_TE
    return (x_TD.float() + change_TE @ direction_ED).to(x_TD.dtype)
