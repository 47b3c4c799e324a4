"""Random weights of image models."""

from torch import Tensor, nn

from acmoe.ops.checks import has_values


def trunc_normal_(tensor: Tensor, *, std: float) -> None:
    """Draw normal weights of this deviation, between -2 and 2, as `nn.init.trunc_normal_` does.

    Tensors without values stay as they are: torch rejects draws by reading them, which fails on
    fake tensors.
    """
    if has_values(tensor):
        nn.init.trunc_normal_(tensor, std=std)
