"""Under detach=False the gradient of every option is the layer's slope, by central differences.

Two MoE layers in float64, so that the scale of the first reaches the second through the state.
"""

import pytest
import torch

from acmoe import AdaptiveConfig, MoE, RoutingState
from acmoe.lab.variants import VariantConfig

B, L, D, E = 2, 12, 5, 3
BATCH = {"statistics": "batch"}
CURRENT = {"statistics": "batch", "statistics_of": "current"}
OPTIONS = {
    **{f"batch {m}": {**BATCH, "measure": m} for m in ("mad", "variance", "std", "gini", "iqr")},
    **{f"prefix {m}": {"statistics": "prefix", "measure": m} for m in ("mad", "variance", "std")},
    "sequence gini": {"statistics": "sequence", "measure": "gini"},
    "sequence": {"statistics": "sequence"},
    "running": {},
    "current": CURRENT,
    "feature": {**BATCH, "normalize": "feature"},
    "global": {**CURRENT, "normalize": "global", "clamp": 1.3, "eps": 0.1},
    "strength": {**BATCH, "strength": 0.7},
    "prefix strength": {"statistics": "prefix", "strength": 0.7},
    "mix": {**BATCH, "mix": 2},
    "mix, sequence": {"statistics": "sequence", "mix": 3},
    "mix, prefix": {"statistics": "prefix", "mix": 2},
    "scaled experts": {**CURRENT, "scale_experts": True},
    "match": {**BATCH, "match": True},
    "match, current": {**CURRENT, "match": True},
    "match, center": {**CURRENT, "match": True, "center": True},
    "match, running": {"match": True},
    "center": {**CURRENT, "center": True},
    "power": {**BATCH, "power": 0.5},
    "own": {**BATCH, "part": "own", "power": 0.5},
    "common": {**CURRENT, "part": "common"},
    "learned": {**BATCH, "strength": 0.7, "learn_strength": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_gradient_is_the_slope(name):
    options = {**OPTIONS[name], "detach": False}
    names = AdaptiveConfig.__dataclass_fields__
    kind = AdaptiveConfig if options.keys() <= names.keys() else VariantConfig
    torch.manual_seed(0)
    config = kind(**options)
    layers = [
        MoE(dim=D, hidden=6, num_experts=E, top_k=2, router=config, activation="gelu").double()
        for _ in range(2)
    ]
    for layer in layers:
        layer.eval()
        for key, buffer in layer.named_buffers():  # running statistics with a past
            torch.nn.init.uniform_(buffer, 0.5, 2.0)
            buffer.mul_(20 if key.endswith("weight") else 1)
    x = torch.randn(B, L, D, dtype=torch.float64, requires_grad=True)
    tokens, mix = B * L, config.mix
    begin = RoutingState.identity(
        num_tokens=tokens, num_clusters=E, dim=D, mix=mix, dtype=torch.float64
    )
    first = torch.arange(tokens)[:, None] * torch.ones(mix, dtype=torch.long)
    begin = begin._replace(
        assignment=(first + torch.arange(mix)) % E, membership=torch.full((tokens, mix), 1 / mix)
    )

    def loss(x):
        state, total = begin, 0.0
        for layer in layers:
            y, state = layer(x, state)
            x = x + y
            total = total + y.square().sum()
        return total + state.aux_loss

    (gradient,) = torch.autograd.grad(loss(x), x)
    direction = torch.randn(x.shape, dtype=x.dtype)
    step = 1e-6 * direction
    with torch.no_grad():
        slope = (loss(x + step) - loss(x - step)) / 2e-6
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-6, atol=1e-7)
