"""Cluster statistics with the options of `VariantConfig` that change the scale or its tokens."""

import torch
from torch import Tensor

from acmoe.errors import check
from acmoe.lab.variants.config import VariantConfig
from acmoe.lab.variants.scale import reshape_scale
from acmoe.lab.variants.steps import Fade
from acmoe.lab.variants.strength import LearnedStrength, ScheduledStrength
from acmoe.ops.statistics.scale import ScaleOptions, informs
from acmoe.routing.statistics import ClusterStatistics, build_statistics, scale_options
from acmoe.routing.statistics.cache import StatisticsSlot


class VariantStatistics(ClusterStatistics):
    """`ClusterStatistics` whose M may be a power or a part, change in time, or use other tokens."""

    config: VariantConfig

    def __init__(self, config: VariantConfig, *, num_clusters: int, dim: int) -> None:
        super().__init__(config, num_clusters=num_clusters, dim=dim)
        self.strength: ScheduledStrength | LearnedStrength | None = None
        if config.learn_strength:
            self.strength = LearnedStrength(config)
        elif config.strength_end is not None:
            self.strength = ScheduledStrength(config)
        self.fade = None if config.fade_steps is None else Fade(config.fade_steps)
        # The tokens to measure in place of the router's input (acmoe/lab/variants/tokens.py).
        self.handed_over: Tensor | None = None

    def cluster_scale(
        self,
        x_BLD: Tensor,
        assignment_BL: Tensor,
        token_mask_BL: Tensor | None = None,
        slot: StatisticsSlot | None = None,
        order: Tensor | None = None,
        chosen_C: Tensor | None = None,
    ) -> Tensor:
        x_BLD = self._measured(x_BLD)
        return super().cluster_scale(x_BLD, assignment_BL, token_mask_BL, slot, order, chosen_C)

    def count_forward(self) -> None:
        super().count_forward()
        if isinstance(self.strength, ScheduledStrength):
            self.strength.record()
        if self.fade is not None:
            self.fade.record()

    def _measured(self, x_BLD: Tensor) -> Tensor:
        """Return the tokens to measure: x, or the tokens before the norm, which are used once."""
        tokens, self.handed_over = self.handed_over, None
        if self.config.stats_input == "input":
            return x_BLD
        check(
            tokens is not None and tokens.shape == x_BLD.shape,
            f"gain={self.config.gain} and read={self.config.read!r} take statistics of tokens in "
            "front of a block's norm, which nothing has handed over; build a language model with "
            "acmoe.create_model, or call acmoe.lab.variants.hand_over_tokens(model)",
        )
        assert tokens is not None
        return tokens

    @property
    def options(self) -> ScaleOptions:
        options = scale_options(self.config)  # torch.compile cannot trace super().options
        if self.strength is not None:
            options = options._replace(strength=self.strength())
        if self.config.power != 1 or self.config.part != "both" or self.fade is not None:
            options = options._replace(transform=self._reshape)
        return options

    def _reshape(self, scale: Tensor, spread: Tensor, count: Tensor) -> Tensor:
        config = self.config
        occupied = informs(spread, count, eps=config.eps, min_tokens=config.min_tokens)
        power = config.power if self.fade is None else config.power * self.fade()
        return reshape_scale(
            scale, occupied, power=power, part=config.part, normalize=config.normalize
        )

    @property
    def caches_scale(self) -> bool:
        if torch.compiler.is_compiling():  # it cannot trace super().caches_scale
            return False
        # A fading scale changes with every step. Training with batch statistics never reads the
        # scale of the average, so each update would compute it, in about fifty operations, in vain.
        changes = self.config.learn_strength or self.fade is not None
        return super().caches_scale and not changes

    @property
    def version(self) -> tuple[object, ...]:
        step = self.strength.step._version if isinstance(self.strength, ScheduledStrength) else 0
        return *super().version, step

    @property
    def constant(self) -> bool:
        return self.config.detach and not self.config.learn_strength


@build_statistics.register
def _(config: VariantConfig, *, num_clusters: int, dim: int) -> ClusterStatistics:
    return VariantStatistics(config, num_clusters=num_clusters, dim=dim)
