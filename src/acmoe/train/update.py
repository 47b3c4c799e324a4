"""The result of one optimizer update."""

from typing import NamedTuple

from torch import Tensor


class Update(NamedTuple):
    """The result of one optimizer update, on the device: reading it waits for the update."""

    loss: Tensor  # () mean nats per token, or per image
    aux_loss: Tensor  # ()
    finite: Tensor  # () False: losses, or clipped gradients, were not finite; weights are unchanged
    loads: tuple[Tensor, ...]  # (E,) routed tokens of each MoE layer; empty unless recorded
