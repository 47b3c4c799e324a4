"""Which tokens of time and batch a cluster's dispersion is taken over.

    batch      every token of the call: the paper. Sees the future, and other sequences.
    running    an average over past optimizer steps, the same in training, evaluation and decoding
    prefix     the tokens of the same sequence up to each token, shrunk towards the running average
    sequence   every token of the same sequence

`forward` may overwrite a buffer but never adds to one, so activation checkpointing, which replays
it, cannot count a batch twice. `fold_statistics(model)`, called once after each optimizer step,
moves the last batch into the average.

B sequences, L tokens in each, D features, C clusters, J clusters per token.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from acmoe.config.routing import AdaptiveConfig
from acmoe.errors import check
from acmoe.ops.sort.op import Clusters
from acmoe.ops.statistics.dispersion import accumulation_dtype
from acmoe.ops.statistics.op import (
    ScaleOptions,
    measured_dispersion,
    measured_prefix,
    measured_scale,
    scale_of,
)
from acmoe.ops.statistics.prefix import PrefixMoments
from acmoe.ops.statistics.running import fold_and_scale, fold_average
from acmoe.routing.cache import StatisticsSlot, check_inference
from acmoe.routing.step import StepStatistics
from acmoe.routing.strength import Strength


class ClusterStatistics(StepStatistics):
    """The scale of each cluster under a config's statistics mode, and the running average."""

    dispersion: Tensor
    weight: Tensor
    last_dispersion: Tensor
    last_count: Tensor
    running_scale: Tensor

    def __init__(self, config: AdaptiveConfig, *, num_clusters: int, dim: int) -> None:
        super().__init__()
        self.config = config
        self.num_clusters = num_clusters
        self.dim = dim
        self.register_buffer("dispersion", torch.zeros(num_clusters, dim))
        self.register_buffer("weight", torch.zeros(num_clusters))  # tokens behind the average
        # What the latest training forward saw; not part of a checkpoint.
        self.register_buffer("last_dispersion", torch.zeros(num_clusters, dim), persistent=False)
        self.register_buffer("last_count", torch.zeros(num_clusters), persistent=False)
        self.register_buffer("running_scale", torch.ones(num_clusters, dim), persistent=False)
        self.strength: Strength | None = None
        if config.learn_strength or config.strength_end is not None:
            self.strength = Strength(config)
        self.scaled_from: Tensor | None = None  # the average `running_scale` was made of, and when
        self.scaled_state: tuple[object, ...] = ()

    @property
    def mode(self) -> str:
        train, evaluation = self.config.modes
        return train if self.training else evaluation

    def new_slot(
        self, num_sequences: int, *, device: torch.device | str | None, dtype: torch.dtype
    ) -> StatisticsSlot | None:
        """A decode slot for the current mode; None where nothing needs caching."""
        train, evaluation = self.config.modes
        check(
            not self.training or train == evaluation,
            f"new_cache of a layer in training mode would fit statistics={train!r}, and decoding "
            f"uses eval_statistics={evaluation!r}; call eval() first",
        )
        device = self.dispersion.device if device is None else device
        dtype = accumulation_dtype(dtype)
        shape: tuple[int, ...] = (self.num_clusters, self.dim)
        if self.mode == "prefix":
            moments = PrefixMoments.empty(num_sequences, *shape, device=device, dtype=dtype)
            return StatisticsSlot(moments=moments)
        if self.mode == "running":
            return None
        shape = (num_sequences, *shape) if self.mode == "sequence" else shape
        return StatisticsSlot(scale=torch.ones(shape, device=device, dtype=dtype))

    def cluster_scale(
        self,
        x_BLD: Tensor,
        assignment_BL: Tensor,
        token_mask_BL: Tensor | None,
        slot: StatisticsSlot | None,
        clusters: Clusters | None = None,
    ) -> Tensor:
        """(C, D) for batch and running; (B, C, D) for sequence.

        clusters: the same tokens sorted by assignment, masked ones in none, if somebody did that.
        """
        with self._recording(x_BLD, slot):
            x_BLD = x_BLD.detach() if self.config.detach else x_BLD
            if self.mode == "batch":
                scale = measured_scale(
                    *self._all_tokens(x_BLD, assignment_BL),
                    self._options,
                    measure=self.config.measure,
                    token_mask=None if token_mask_BL is None else token_mask_BL.flatten(),
                    clusters=clusters,
                    into=self._last if self.training else None,
                )
            else:
                self._look(x_BLD, assignment_BL, token_mask_BL, clusters)
            if self.mode == "running":
                # A copy: the state that carries it on must not change when the buffer does.
                return self.average_scale().to(accumulation_dtype(x_BLD.dtype), copy=True)
            if self.mode == "sequence":
                scale = measured_scale(
                    x_BLD,
                    assignment_BL,
                    self.num_clusters,
                    self._options,
                    measure=self.config.measure,
                    token_mask=token_mask_BL,
                )
            return scale if slot is None else slot.scale_once(scale)

    def _all_tokens(self, x_BLD: Tensor, assignment_BL: Tensor) -> tuple[Tensor, Tensor, int]:
        return x_BLD.flatten(0, 1), assignment_BL.flatten(), self.num_clusters

    def _look(
        self,
        x_BLD: Tensor,
        assignment_BL: Tensor,
        token_mask_BL: Tensor | None,
        clusters: Clusters | None = None,
    ) -> None:
        """In training, note what the whole call looked like, for `fold`."""
        if self.training:
            measured_dispersion(
                *self._all_tokens(x_BLD, assignment_BL),
                measure=self.config.measure,
                token_mask=None if token_mask_BL is None else token_mask_BL.flatten(),
                clusters=clusters,
                into=self._last,
            )

    @property
    def _last(self) -> tuple[Tensor, Tensor]:
        """What `fold` reads. Only `forward` and it may see them: the next forward overwrites."""
        return self.last_dispersion, self.last_count

    def average_scale(self) -> Tensor:
        """The scale of the running average, worked out again only when that has changed.

        Kept in a buffer of its own place, so that a captured CUDA graph reads what `fold` writes.
        """
        if not self._keeps_scale:
            return scale_of(self.dispersion, self.weight, self._options)
        if self.scaled_from is not self.dispersion or self.scaled_state != self._state:
            with torch.no_grad():
                self.running_scale.copy_(scale_of(self.dispersion, self.weight, self._options))
            self.scaled_from, self.scaled_state = self.dispersion, self._state
        return self.running_scale

    @property
    def _keeps_scale(self) -> bool:
        """Not under a learned lambda, nor where nothing tells that an average has changed."""
        fresh = torch.compiler.is_compiling() or self.config.learn_strength
        return not (fresh or self.dispersion.is_inference())

    @property
    def _state(self) -> tuple[object, ...]:
        """What changes when anything does that the running scale depends on."""
        step = 0 if self.strength is None else self.strength.step._version
        return self.dispersion._version, self.weight._version, step, self.config

    def prefix_scale(
        self,
        x_BLD: Tensor,
        assignment_BLJ: Tensor,
        token_mask_BL: Tensor | None,
        slot: StatisticsSlot | None,
    ) -> Tensor:
        """(B, L, J, D) scale of each token's clusters, as seen at that token."""
        with self._recording(x_BLD, slot):
            x_BLD = x_BLD.detach() if self.config.detach else x_BLD
            self._look(x_BLD, assignment_BLJ[..., 0], token_mask_BL)
            before = slot.moments if slot is not None else None
            if before is None:
                before = PrefixMoments.empty(
                    x_BLD.shape[0],
                    self.num_clusters,
                    self.dim,
                    device=x_BLD.device,
                    dtype=accumulation_dtype(x_BLD.dtype),
                )
            spread_BLJD, count_BLJ, after = measured_prefix(
                x_BLD,
                assignment_BLJ,
                before,
                measure=self.config.measure,
                token_mask=token_mask_BL,
            )
            if slot is not None:
                slot.remember(after)
            return scale_of(*self._shrink(spread_BLJD, count_BLJ, assignment_BLJ), self._options)

    def _shrink(
        self, spread_BLJD: Tensor, count_BLJ: Tensor, assignment_BLJ: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(n * prefix + k * prior) / (n + k): the running average, if any, counts as k tokens."""
        own_BLJ = assignment_BLJ.clamp(min=0)
        known_BLJ = (self.weight[own_BLJ] >= self.config.min_tokens) & (assignment_BLJ >= 0)
        prior_BLJ = (self.config.prior_tokens * known_BLJ).to(spread_BLJD.dtype)
        # One token's own deviation from itself is 0 by construction and tells nothing.
        seen_BLJ = torch.where(count_BLJ >= 2, count_BLJ, 0.0)
        total_BLJ = seen_BLJ + prior_BLJ
        prior_BLJD = self.dispersion.to(spread_BLJD.dtype)[own_BLJ]
        mixed_BLJD = seen_BLJ[..., None] * spread_BLJD + prior_BLJ[..., None] * prior_BLJD
        return mixed_BLJD / total_BLJ.clamp(min=1)[..., None], total_BLJ

    @property
    def _options(self) -> ScaleOptions:
        config = self.config
        return ScaleOptions(
            normalize=config.normalize,
            strength=config.strength if self.strength is None else self.strength(),
            floor=config.floor,
            eps=config.eps,
            clamp=config.clamp,
            min_tokens=config.min_tokens,
            power=config.power,
            part=config.part,
        )

    def _recording(
        self, x: Tensor, slot: StatisticsSlot | None
    ) -> contextlib.AbstractContextManager[Any]:
        """Statistics carry no gradient unless the config lets it flow."""
        if slot is not None:
            check_inference(x)
        constant = self.config.detach and not self.config.learn_strength
        return torch.no_grad() if constant else contextlib.nullcontext()

    def fold(self) -> None:
        """Move the last batch into the average, each cluster weighted by its tokens."""
        buffers = (self.dispersion, self.weight, *self._last)
        if self._keeps_scale:
            fold_and_scale(*buffers, self.running_scale, self.config.momentum, self._options)
            self.scaled_from, self.scaled_state = self.dispersion, self._state
        else:
            fold_average(*buffers, self.config.momentum)


# What a model is built with; the other fields of a config are read at every call.
_BUILT = ("base", "mix", "scale_experts", "center", "match", "learn_strength", "strength_end")


@contextlib.contextmanager
def override_statistics(model: nn.Module, **changes: Any) -> Iterator[None]:
    """Change fields of every adaptive config inside `with`, for an evaluation or an attack.

    >>> # with override_statistics(model, eval_statistics="running"): ...
    >>> # with override_statistics(model, detach=False): ...   # a white-box attack
    """
    for name in changes:
        check(
            name in AdaptiveConfig.__dataclass_fields__ and name not in _BUILT,
            f"{name}={changes[name]!r} cannot be overridden; {', '.join(_BUILT)} are fixed when a "
            "model is built, and any other name must be a field of AdaptiveConfig",
        )
    # Statistics, the router that reads them and the emitter before it hold the same config.
    found = [
        (module, name, config)
        for module in model.modules()
        for name in ("config", "reader")
        if isinstance(config := getattr(module, name, None), AdaptiveConfig)
    ]
    try:
        for module, name, config in found:
            changed = replace(config, **changes)
            check(
                "strength" not in changes or not config.learn_strength,
                f"strength={changes.get('strength')} cannot be overridden where it is learned",
            )
            check(
                changed.reads == config.reads,
                f"{changes} would take statistics of the {changed.reads} layer in a model built "
                f"for the {config.reads} one; build it with that statistics_of",
            )
            setattr(module, name, changed)
        yield
    finally:
        for module, name, config in found:
            setattr(module, name, config)
