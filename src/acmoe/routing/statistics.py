"""The scale of each cluster, by the set of tokens that its dispersion is computed from.

    batch      all tokens of the call, as in the paper; depends on later tokens and other sequences
    running    a running average over optimizer steps, the same in training, evaluation and decoding
    prefix     the tokens of the same sequence up to each token, shrunk towards the running average
    sequence   all tokens of the same sequence

A training forward writes two buffers: it adds the dispersion of its tokens to `last_dispersion`, as
a mean weighted by token counts, and the counts to `last_count`. It writes nothing when activation
checkpointing repeats it inside a backward, and an evaluation forward writes nothing. The averages
`dispersion` and `weight` change in `update` alone, which every optimizer step calls (step_hook.py).

B sequences, L tokens in each, D features, C clusters, J clusters per token.
"""

import contextlib
import logging
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from acmoe.config.routing import AdaptiveConfig
from acmoe.errors import check
from acmoe.ops.dispatch import log_once, transforming
from acmoe.ops.statistics.dispersion import accumulation_dtype
from acmoe.ops.statistics.op import (
    ScaleOptions,
    measure_dispersion,
    measure_prefix,
    measure_scale,
    scale_of,
)
from acmoe.ops.statistics.over_ranks import dispersion_over_ranks, sum_over_ranks
from acmoe.ops.statistics.pending import capturing, record_batch, replaying
from acmoe.ops.statistics.prefix import PrefixMoments
from acmoe.ops.statistics.running import update_average, update_average_and_scale
from acmoe.routing.cache import StatisticsSlot, check_inference
from acmoe.routing.group import group_of
from acmoe.routing.step import StepStatistics


class ClusterStatistics(StepStatistics):
    """The scale of each cluster under a config's statistics mode, and the running average."""

    waits = ("last_dispersion", "last_count")
    dispersion: Tensor
    weight: Tensor
    last_dispersion: Tensor
    last_count: Tensor
    running_scale: Tensor
    checked: tuple[object, ...] = ()  # the average that `warn_if_empty` looked at

    def __init__(self, config: AdaptiveConfig, *, num_clusters: int, dim: int) -> None:
        super().__init__()
        self.config = config
        self.num_clusters = num_clusters
        self.dim = dim
        self.register_buffer("dispersion", torch.zeros(num_clusters, dim))
        self.register_buffer("weight", torch.zeros(num_clusters))  # discounted token count
        # Statistics of the training forwards since the last update; not part of a checkpoint.
        self.register_buffer("last_dispersion", torch.zeros(num_clusters, dim), persistent=False)
        self.register_buffer("last_count", torch.zeros(num_clusters), persistent=False)
        self.register_buffer("running_scale", torch.ones(num_clusters, dim), persistent=False)
        # The buffers and options that `running_scale` was computed from.
        self.scaled_from: Tensor | None = None
        self.scaled_version: tuple[object, ...] = ()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.running_scale.fill_(1.0)

    @property
    def pools(self) -> bool:
        """Return True if the waiting batches of several processes are added up at an update.

        With statistics_group="global" they are the same on all processes already.
        """
        check(
            self.config.statistics_group != "local"
            or not {"running", "prefix"} & set(self.config.modes),
            f"statistics_group='local' with statistics={self.config.statistics!r}: the running "
            "averages of the processes would drift apart; use 'pooled' or 'global'",
        )
        return self.config.statistics_group == "pooled"

    @property
    def group(self) -> str:
        """Return the name of the processes whose tokens a batch has; "" for this one alone."""
        return group_of(self) if self.config.statistics_group == "global" else ""

    @property
    def mode(self) -> str:
        train, evaluation = self.config.modes
        return train if self.training else evaluation

    def new_slot(
        self, num_sequences: int, *, device: torch.device | str | None, dtype: torch.dtype
    ) -> StatisticsSlot | None:
        """Return a decode slot for the current mode; None if nothing needs caching."""
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
        order: Tensor | None = None,
        chosen_C: Tensor | None = None,
    ) -> Tensor:
        """Return the scale: (C, D) for batch and running statistics, (B, C, D) for sequence.

        order: the packed `TokenOrder` of the assignment, masked tokens in no cluster, or None.
        chosen_C: not 0 for clusters that a token chose, first or not; mean_over="chosen" and batch
        statistics read it. None: those of the assignment.
        """
        with self._recording(x_BLD, slot):
            x_BLD = x_BLD.detach() if self.config.detach else x_BLD
            if self.mode == "batch":
                if self.group:
                    return self._global_scale(x_BLD, assignment_BL, token_mask_BL, chosen_C, slot)
                batch = self._new_batch() if self.training else None
                scale = measure_scale(
                    *self._all_tokens(x_BLD, assignment_BL),
                    self.options._replace(chosen=chosen_C),
                    measure=self.config.measure,
                    token_mask=None if token_mask_BL is None else token_mask_BL.flatten(),
                    order=order,
                    out=batch,
                )
                if batch is not None:
                    self._record(batch)
            else:
                self._record_dispersion(x_BLD, assignment_BL, token_mask_BL, order)
            if self.mode == "running":
                self.warn_if_empty()
                # Copy it: the routing state must not change when the buffer does.
                return self.average_scale().to(accumulation_dtype(x_BLD.dtype), copy=True)
            if self.mode == "sequence":
                scale = measure_scale(
                    x_BLD,
                    assignment_BL,
                    self.num_clusters,
                    self.options,
                    measure=self.config.measure,
                    token_mask=token_mask_BL,
                )
            return scale if slot is None else slot.scale_once(scale)

    def _all_tokens(self, x_BLD: Tensor, assignment_BL: Tensor) -> tuple[Tensor, Tensor, int]:
        return x_BLD.flatten(0, 1), assignment_BL.flatten(), self.num_clusters

    def _record_dispersion(
        self,
        x_BLD: Tensor,
        assignment_BL: Tensor,
        token_mask_BL: Tensor | None,
        order: Tensor | None = None,
    ) -> None:
        """In training, record the dispersion of all tokens of the call for `update`."""
        if self.training and self.group:
            if not replaying():  # a recompute in the backward communicates nothing
                self._record(self._global_dispersion(x_BLD, assignment_BL, token_mask_BL))
        elif self.training:
            batch = self._new_batch()
            measure_dispersion(
                *self._all_tokens(x_BLD, assignment_BL),
                measure=self.config.measure,
                token_mask=None if token_mask_BL is None else token_mask_BL.flatten(),
                order=order,
                out=batch,
            )
            self._record(batch)

    def _global_dispersion(
        self, x_BLD: Tensor, assignment_BL: Tensor, token_mask_BL: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the dispersion (C, D) and token counts (C,) of the tokens of all processes."""
        mask_T = None if token_mask_BL is None else token_mask_BL.flatten()
        tokens = self._all_tokens(x_BLD, assignment_BL)
        spread_CD, count_C = dispersion_over_ranks(*tokens, self.config.measure, mask_T, self.group)
        return spread_CD, count_C

    def _global_scale(
        self,
        x_BLD: Tensor,
        assignment_BL: Tensor,
        token_mask_BL: Tensor | None,
        chosen_C: Tensor | None,
        slot: StatisticsSlot | None,
    ) -> Tensor:
        """Return the (C, D) scale of the tokens of all processes, and record them in training."""
        found = self._global_dispersion(x_BLD, assignment_BL, token_mask_BL)
        if self.training:
            self._record(found)
        if chosen_C is not None:
            chosen_C = sum_over_ranks((chosen_C != 0).float(), self.group) != 0
        scale = scale_of(*found, self.options._replace(chosen=chosen_C))
        return scale if slot is None else slot.scale_once(scale)

    def _new_batch(self) -> tuple[Tensor, Tensor]:
        """Return memory for the dispersion (C, D) and the token counts (C,) of a batch."""
        return torch.empty_like(self.last_dispersion), torch.empty_like(self.last_count)

    def _record(self, batch: tuple[Tensor, Tensor]) -> None:
        # A single token has dispersion 0, which carries no information.
        record_batch(
            self.waiting_buffer("last_dispersion"),
            self.waiting_buffer("last_count"),
            *batch,
            least=2,
        )
        self.count_forward()

    def average_scale(self) -> Tensor:
        """Return the scale of the running average, recomputed only if the average has changed.

        It is stored in a buffer, so that a captured CUDA graph reads what `update` writes.
        """
        if not self.caches_scale:
            return scale_of(self.dispersion, self.weight, self.options)
        if self.scaled_from is not self.dispersion or self.scaled_version != self.version:
            with torch.no_grad():
                self.running_scale.copy_(scale_of(self.dispersion, self.weight, self.options))
            self.scaled_from, self.scaled_version = self.dispersion, self.version
        return self.running_scale

    def warn_if_empty(self) -> None:
        """Warn once where evaluation reads an average that no batch has ever moved.

        It reads `weight` on the host, only if the average has changed since it last did.
        """
        weight = self.weight
        if self.training or torch.compiler.is_compiling() or weight.is_meta:
            return
        now = id(weight), 0 if weight.is_inference() else weight._version
        if self.checked == now or capturing(weight):
            return
        self.checked = now
        if not weight.any():
            log_once(
                "an adaptive layer evaluates with running statistics that no batch has moved: its "
                "scale is 1 and it routes as the plain router; load a trained checkpoint, or train "
                "(acmoe.fold_statistics(model) moves them by hand)",
                logging.WARNING,
            )

    @property
    def caches_scale(self) -> bool:
        """Return True if `running_scale` may be reused: changes of the average can be detected."""
        tracing = torch.compiler.is_compiling() or transforming()
        return not (tracing or self.dispersion.is_inference())

    @property
    def version(self) -> tuple[object, ...]:
        """Return a value that changes with everything that the running scale depends on."""
        return self.dispersion._version, self.weight._version, self.config

    def prefix_scale(
        self,
        x_BLD: Tensor,
        assignment_BLJ: Tensor,
        token_mask_BL: Tensor | None,
        slot: StatisticsSlot | None,
    ) -> Tensor:
        """Return (B, L, J, D): the scale of each token's J clusters, from tokens up to it."""
        with self._recording(x_BLD, slot):
            x_BLD = x_BLD.detach() if self.config.detach else x_BLD
            self.warn_if_empty()
            self._record_dispersion(x_BLD, assignment_BLJ[..., 0], token_mask_BL)
            before = slot.moments if slot is not None else None
            if before is None:
                before = PrefixMoments.empty(
                    x_BLD.shape[0],
                    self.num_clusters,
                    self.dim,
                    device=x_BLD.device,
                    dtype=accumulation_dtype(x_BLD.dtype),
                )
            spread_BLJD, count_BLJ, after = measure_prefix(
                x_BLD,
                assignment_BLJ,
                before,
                measure=self.config.measure,
                token_mask=token_mask_BL,
            )
            if slot is not None:
                slot.store(after)
            return scale_of(*self._shrink(spread_BLJD, count_BLJ, assignment_BLJ), self.options)

    def _shrink(
        self, spread_BLJD: Tensor, count_BLJ: Tensor, assignment_BLJ: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (n * prefix + k * average) / (n + k), with k = `prior_tokens`, and n + k."""
        own_BLJ = assignment_BLJ.clamp(min=0)
        known_BLJ = (self.weight[own_BLJ] >= self.config.min_tokens) & (assignment_BLJ >= 0)
        prior_BLJ = (self.config.prior_tokens * known_BLJ).to(spread_BLJD.dtype)
        # A single token has dispersion 0, which carries no information.
        seen_BLJ = torch.where(count_BLJ >= 2, count_BLJ, 0.0)
        total_BLJ = seen_BLJ + prior_BLJ
        prior_BLJD = self.dispersion.to(spread_BLJD.dtype)[own_BLJ]
        mixed_BLJD = seen_BLJ[..., None] * spread_BLJD + prior_BLJ[..., None] * prior_BLJD
        return mixed_BLJD / total_BLJ.clamp(min=1)[..., None], total_BLJ

    @property
    def options(self) -> ScaleOptions:
        """Return the options by which a scale is computed from a dispersion."""
        return scale_options(self.config)

    @property
    def constant(self) -> bool:
        """Return True if no gradient flows through the scale."""
        return self.config.detach

    def _recording(
        self, x: Tensor, slot: StatisticsSlot | None
    ) -> contextlib.AbstractContextManager[Any]:
        if slot is not None and slot.inference_only:
            check_inference(x)
        return torch.no_grad() if self.constant else contextlib.nullcontext()

    def update(self) -> None:
        """Update the running average, and its scale, with the recorded batches."""
        buffers = (self.dispersion, self.weight, self.last_dispersion, self.last_count)
        if self.caches_scale:
            update_average_and_scale(
                *buffers, self.running_scale, self.config.momentum, self.options
            )
            self.scaled_from, self.scaled_version = self.dispersion, self.version
        else:
            update_average(*buffers, self.config.momentum)


def scale_options(config: AdaptiveConfig) -> ScaleOptions:
    """The options of `scale_from_dispersion` in a config."""
    return ScaleOptions(
        normalize=config.normalize,
        strength=config.strength,
        floor=config.floor,
        eps=config.eps,
        clamp=config.clamp,
        min_tokens=config.min_tokens,
        mean_over=config.mean_over,
        mean_before_clamp=config.mean_before_clamp,
    )


@singledispatch
def build_statistics(config: AdaptiveConfig, *, num_clusters: int, dim: int) -> ClusterStatistics:
    """Return the statistics of a config; its subclasses may register others (`.register`)."""
    return ClusterStatistics(config, num_clusters=num_clusters, dim=dim)
