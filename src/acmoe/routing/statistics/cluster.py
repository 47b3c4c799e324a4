"""The scale of each cluster, by the set of tokens that its dispersion is computed from.

    batch      all tokens of the call, as in the paper; depends on later tokens and other sequences
    running    a running average over optimizer steps, the same in training, evaluation and decoding
    prefix     the tokens of the same sequence up to each token, shrunk towards the running average
    sequence   all tokens of the same sequence

In training, every mode also records the dispersion of its tokens for the running average
(average.py), which `running` and `prefix` read.

B sequences, L tokens in each, D features, C clusters, J clusters per token.
"""

from functools import singledispatch

import torch
from torch import Tensor

from acmoe.config.routing import AdaptiveConfig
from acmoe.errors import UserError, check
from acmoe.ops.statistics.dispersion import accumulation_dtype
from acmoe.ops.statistics.op import measure_scale
from acmoe.ops.statistics.over_ranks import dispersion_over_ranks, sum_over_ranks
from acmoe.ops.statistics.pending import LEAST, record_batch, replaying, snapshot
from acmoe.ops.statistics.prefix import PrefixMoments, Prior
from acmoe.ops.statistics.prefix.op import measure_prefix_scale
from acmoe.ops.statistics.recorded import record_dispersion, record_scale
from acmoe.ops.statistics.scale import scale_of
from acmoe.routing.statistics.average import RunningAverage
from acmoe.routing.statistics.cache import StatisticsSlot, check_inference
from acmoe.routing.statistics.group import group_of


class ClusterStatistics(RunningAverage):
    """The scale of each cluster under a config's statistics mode, and the running average."""

    @property
    def pools(self) -> bool:
        """Return True if the pending batches of several processes are added up at an update.

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
        return self.config.modes.when(training=self.training)

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
        token_mask_BL: Tensor | None = None,
        slot: StatisticsSlot | None = None,
        order: Tensor | None = None,
        chosen_C: Tensor | None = None,
    ) -> Tensor:
        """Return the scale: (C, D) for batch and running statistics, (B, C, D) for sequence.

        Batch and running statistics also take tokens (T, D) and clusters (T,), without a view.
        order: the packed `TokenOrder` of the assignment, masked tokens in no cluster, or None.
        chosen_C: not 0 for clusters that a token chose, first or not; mean_over="chosen" and batch
        statistics read it. None: those of the assignment.
        """
        mode = self.mode
        if mode == "running" and not self.training:  # nothing is measured
            return self._kept(self._average(assignment_BL), x_BLD)
        if mode == "prefix":
            raise UserError("prefix statistics give each token its scale; call prefix_scale")
        if slot is not None and slot.inference_only:
            check_inference(x_BLD)
        x_BLD = x_BLD.detach() if self.config.detach else x_BLD
        if mode == "batch":
            scale = self._batch_scale(x_BLD, assignment_BL, token_mask_BL, order, chosen_C)
        elif mode == "running":
            average = self._average(assignment_BL)
            kept = self._record_dispersion(x_BLD, assignment_BL, token_mask_BL, order, average)
            assert kept is not None
            return kept
        else:
            self._record_dispersion(x_BLD, assignment_BL, token_mask_BL, order)
            scale = self._sequence_scale(x_BLD, assignment_BL, token_mask_BL, order)
        return scale if slot is None else slot.scale_once(scale)

    def _batch_scale(
        self,
        x_BLD: Tensor,
        assignment_BL: Tensor,
        token_mask_BL: Tensor | None,
        order: Tensor | None,
        chosen_C: Tensor | None,
    ) -> Tensor:
        """Return the (C, D) scale of all tokens of the call; in training, record them, too."""
        if self.group:
            return self._global_scale(x_BLD, assignment_BL, token_mask_BL, chosen_C)
        options = self.options
        scale = record_scale(
            self.batches if self.training else None,
            *(x_BLD, assignment_BL, self.num_clusters),
            options if chosen_C is None else options._replace(chosen=chosen_C),
            measure=self.config.measure,
            token_mask=token_mask_BL,
            order=order,
        )
        if self.training:
            self.count_forward()
        return scale

    def _average(self, assignment_BL: Tensor) -> Tensor:
        """Return the (C, D) scale of the running average; the next update may write to it."""
        scale = self.known_scale()
        if scale is None:
            scale = self.average_scale() if self.training else self.evaluation_scale(assignment_BL)
            # Under torch.func the average may carry a gradient, which a constant scale has not.
            scale = scale.detach() if self.constant else scale
        return scale

    def _kept(self, scale: Tensor, x_BLD: Tensor) -> Tensor:
        """Return the scale in the accumulation dtype of x, in a tensor that no update changes."""
        return snapshot(scale, accumulation_dtype(x_BLD.dtype), training=self.training)

    def _sequence_scale(
        self,
        x_BLD: Tensor,
        assignment_BL: Tensor,
        token_mask_BL: Tensor | None,
        order: Tensor | None,
    ) -> Tensor:
        """Return the (B, C, D) scale of each sequence by itself."""
        return measure_scale(
            *(x_BLD, assignment_BL, self.num_clusters, self.options),
            measure=self.config.measure,
            token_mask=token_mask_BL,
            order=order,
        )

    def _record_dispersion(
        self,
        x_BLD: Tensor,
        assignment_BL: Tensor,
        token_mask_BL: Tensor | None,
        order: Tensor | None = None,
        known: Tensor | None = None,
    ) -> Tensor | None:
        """In training, record the dispersion of all tokens of the call for `update`.

        Return the scale `known`, if any, in a tensor that no update changes.
        """
        if self.training and not self.group:
            kept = record_dispersion(
                *(self.batches, x_BLD, assignment_BL, self.num_clusters),
                measure=self.config.measure,
                token_mask=token_mask_BL,
                order=order,
                known=known,
            )
            self.count_forward()
            return kept
        if self.training and not replaying():  # a recompute in the backward communicates nothing
            found = self._global_dispersion(x_BLD, assignment_BL, token_mask_BL)
            record_batch(*self.batches, *found, least=LEAST)
            self.count_forward()
        return None if known is None else self._kept(known, x_BLD)

    def _global_dispersion(
        self, x_BLD: Tensor, assignment_BL: Tensor, token_mask_BL: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the dispersion (C, D) and token counts (C,) of the tokens of all processes."""
        x_TD, assignment_T = x_BLD.flatten(0, -2), assignment_BL.flatten()
        mask_T = None if token_mask_BL is None else token_mask_BL.flatten()
        spread_CD, count_C = dispersion_over_ranks(
            x_TD, assignment_T, self.num_clusters, self.config.measure, mask_T, self.group
        )
        return spread_CD, count_C

    def _global_scale(
        self,
        x_BLD: Tensor,
        assignment_BL: Tensor,
        token_mask_BL: Tensor | None,
        chosen_C: Tensor | None,
    ) -> Tensor:
        """Return the (C, D) scale of the tokens of all processes, and record them in training."""
        found = self._global_dispersion(x_BLD, assignment_BL, token_mask_BL)
        if self.training:
            record_batch(*self.batches, *found, least=LEAST)
            self.count_forward()
        if chosen_C is not None:
            chosen_C = sum_over_ranks((chosen_C != 0).float(), self.group) != 0
        return scale_of(*found, self.options._replace(chosen=chosen_C))

    def prefix_scale(
        self,
        x_BLD: Tensor,
        assignment_BLJ: Tensor,
        token_mask_BL: Tensor | None,
        slot: StatisticsSlot | None,
        order: Tensor | None = None,
    ) -> Tensor:
        """Return (B, L, J, D): the scale of each token's J clusters, from tokens up to it.

        order: the packed `TokenOrder` of the first clusters, or None.
        """
        if slot is not None and slot.inference_only:
            check_inference(x_BLD)
        x_BLD = x_BLD.detach() if self.config.detach else x_BLD
        self.warn_if_empty(assignment_BLJ)
        self._record_dispersion(x_BLD, assignment_BLJ[..., 0], token_mask_BL, order)
        before = slot.moments if slot is not None else None
        if before is None:
            before = PrefixMoments.empty(
                x_BLD.shape[0],
                self.num_clusters,
                self.dim,
                device=x_BLD.device,
                dtype=accumulation_dtype(x_BLD.dtype),
            )
        scale, after = measure_prefix_scale(
            *(x_BLD, assignment_BLJ, before, self.prior, self.options),
            measure=self.config.measure,
            token_mask=token_mask_BL,
        )
        if slot is not None:
            slot.store(after)
        return scale.detach() if self.constant else scale

    @property
    def prior(self) -> Prior:
        """Return the running averages that prefix statistics are shrunk towards."""
        return Prior(self.dispersion, self.weight, self.config.prior_tokens)

    @property
    def constant(self) -> bool:
        """Return True if no gradient flows through the scale."""
        return self.config.detach


@singledispatch
def build_statistics(config: AdaptiveConfig, *, num_clusters: int, dim: int) -> ClusterStatistics:
    """Return the statistics of a config; its subclasses may register others (`.register`)."""
    return ClusterStatistics(config, num_clusters=num_clusters, dim=dim)
