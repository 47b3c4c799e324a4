"""Take statistics of tokens before a norm: the options `gain` and `read` of `VariantConfig`.

With h = g z + b, z the standardized token, the dispersion of h is |g| times that of z, so the
paper's M divides by g what the norm has just multiplied: h M e = sign(g) z M_z e, up to b, and the
gain cannot reach the router. M_z, from statistics before the gain, leaves the gain in place.

A layer sees the output of the norm only, so a forward pre-hook on the norm passes its input to the
statistics.
"""

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.experts.moe import MoE
from acmoe.lab.variants.statistics import VariantStatistics
from acmoe.models.registry import AFTER_BUILD
from acmoe.models.text.blocks import Block, PostNormBlock


class HandOver:
    """A forward pre-hook of a LayerNorm that gives the statistics the tokens they measure.

    It is an object because a copy of the model then copies it together with its statistics; a
    closure would refer to the statistics of the original model.
    """

    def __init__(self, statistics: VariantStatistics) -> None:
        self.statistics = statistics

    def __call__(self, norm: nn.LayerNorm, inputs: tuple[Tensor, ...]) -> None:
        config = self.statistics.config
        if config.stats_input == "input":
            return
        tokens = inputs[0].detach() if config.detach else inputs[0]
        if config.stats_input == "standardized":
            tokens = F.layer_norm(tokens, norm.normalized_shape, eps=norm.eps)
        self.statistics.handed_over = tokens


def hand_over_tokens(model: nn.Module) -> None:
    """Install the hooks in every block of a language model whose layer has `VariantStatistics`.

    Models that `acmoe.create_model`, `build_model` or `acmoe.load` makes have them where their
    config needs them.
    """
    for norm, statistics in _norms(model):
        if not any(isinstance(hook, HandOver) for hook in norm._forward_pre_hooks.values()):
            norm.register_forward_pre_hook(HandOver(statistics))


def _norms(model: nn.Module) -> list[tuple[nn.LayerNorm, VariantStatistics]]:
    """Return the norm before each MoE layer that has `VariantStatistics`, and these statistics."""
    found = []
    for block in model.modules():
        if isinstance(block, Block) and isinstance(block.layer, MoE):
            statistics = block.layer.next_state.statistics
            if isinstance(statistics, VariantStatistics):
                post = isinstance(block, PostNormBlock)
                found.append((block.norm_attention if post else block.norm_layer, statistics))
    return found


def _hand_over_where_needed(model: nn.Module) -> None:
    if any(statistics.config.stats_input != "input" for _, statistics in _norms(model)):
        hand_over_tokens(model)


AFTER_BUILD.append(_hand_over_where_needed)
