"""Move a pretrained model over to adaptive routing gradually.

A router reads (1 - b) h + b M h, that is M_b h with M_b = (1 - b) I + b M. At b = 0 it is the
router of the model, at b = 1 the adaptive one. `attach(model, blend_steps=1000)` begins with b = 0
and raises b by 1/1000 at every optimizer step; b is a buffer, so that checkpoints keep it and
compiled code reads its present value.
"""

import torch
from torch import Tensor, nn

from acmoe.errors import check
from acmoe.ops.statistics.pending import record_count
from acmoe.routing.statistics.step import StepStatistics


class Blend(StepStatistics):
    """b, which rises from 0 to 1 over `steps` optimizer steps; 0 steps: b stays 1, or as set."""

    value: Tensor
    last_forwards: Tensor

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.register_buffer("value", torch.full((), self.begin))
        # Training forwards since the last update, so that a second update changes nothing.
        self.register_buffer("last_forwards", torch.zeros(1), persistent=False)

    @property
    def begin(self) -> float:
        return 0.0 if self.steps else 1.0

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.value.fill_(self.begin)

    def forward(self, x: Tensor, scaled: Tensor) -> Tensor:
        """Return (1 - b) x + b scaled; exactly x at b = 0, and exactly scaled at b = 1."""
        if self.training and self.steps:
            record_count(self.last_forwards, torch.ones_like(self.last_forwards))
            self.count_forward()
        return torch.lerp(x, scaled, self.value.to(x.dtype))

    @torch.no_grad()
    def update(self) -> None:
        """Raise b by 1 / steps if there was a training forward; `steps` of these give exactly 1."""
        if self.steps:
            risen = (((self.value * self.steps).round() + 1) / self.steps).clamp(max=1)
            self.value.copy_(torch.where(self.last_forwards[0] > 0, risen, self.value))
            self.last_forwards.zero_()


@torch.no_grad()
def set_blend(model: nn.Module, blend: float) -> None:
    """Set b of all attached routers: 0 routes as the plain model, 1 adaptively.

    With `attach(..., blend_steps=n)` it goes on rising from there by 1 / n per optimizer step,
    from the nearest multiple of 1 / n.

    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> import acmoe, acmoe.hf
    >>> sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_attention_heads=2)
    >>> config = MixtralConfig(**sizes, num_hidden_layers=3, num_key_value_heads=2)
    >>> model = acmoe.attach(MixtralForCausalLM(config))
    >>> acmoe.hf.set_blend(model, 0.5)
    """
    check(0 <= blend <= 1, f"blend={blend}; it must lie in [0, 1]")
    found = [module for module in model.modules() if isinstance(module, Blend)]
    check(
        bool(found),
        f"{type(model).__name__} has no attached router; call acmoe.attach(model) first",
    )
    for one in found:
        one.value.fill_(blend)
