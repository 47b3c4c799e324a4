"""What one optimizer update tells those who watch it."""

from typing import NamedTuple

from torch import Tensor


class Update(NamedTuple):
    """What an update tells; on the model's device, so that nobody waits for it."""

    loss: Tensor  # () mean nats per token
    aux_loss: Tensor  # ()
    sound: Tensor  # () whether losses (and the gradient, where clipped) are finite: else no update
    loads: tuple[Tensor, ...]  # (E,) routed tokens of each MoE layer, where recorded
