"""The running average of each cluster's dispersion, and the scale that follows from it.

A training forward writes two buffers: it adds the dispersion of its tokens to `last_dispersion`, as
a mean weighted by token counts, and the counts to `last_count`. It writes nothing when activation
checkpointing repeats it inside a backward, and an evaluation forward writes nothing. The averages
`dispersion` and `weight` change in `update` alone, which every optimizer step calls (step_hook.py).

D features, C clusters.
"""

import logging
from typing import Any, Self

import torch
from torch import Tensor

from acmoe.config.routing import AdaptiveConfig
from acmoe.ops.checks import has_values
from acmoe.ops.dispatch import log_once, rewriting, transforming
from acmoe.ops.statistics.over_ranks import world_size
from acmoe.ops.statistics.pending import capturing
from acmoe.ops.statistics.running import update_average, update_average_and_scale
from acmoe.ops.statistics.scale import ScaleOptions, scale_of
from acmoe.routing.statistics.step import StepStatistics


class RunningAverage(StepStatistics):
    """The dispersion of each cluster, averaged over optimizer steps, and its scale."""

    pending_names = ("last_dispersion", "last_count")
    dispersion: Tensor
    weight: Tensor
    last_dispersion: Tensor
    last_count: Tensor
    running_scale: Tensor
    checked: tuple[object, ...] = ()  # the average that `warn_if_empty` looked at
    looked: tuple[object, ...] = ()  # the version of the average that an evaluation looked at

    def __init__(self, config: AdaptiveConfig, *, num_clusters: int, dim: int) -> None:
        super().__init__()
        self.config = config
        self.measure = config.measure  # the averages keep it if an override changes the config
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle or deepcopy, and compute its scale anew.

        The tensors of a copy count their versions anew, so a version may equal one that was seen.
        """
        super().__setstate__(state)
        self.__dict__.setdefault("measure", self.config.measure)  # pickles of earlier versions
        self.scaled_from = None
        self.checked = self.looked = ()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.running_scale.fill_(1.0)

    def train(self, mode: bool = True) -> Self:
        """Set the mode, and compute the scale anew: `.data` may have been written unnoticed.

        Averaged copies of a model (EMA) write their buffers in this way. In a change to evaluation
        mode, warn once if no batch has updated the average.
        """
        self.scaled_from = None
        if self.training and not mode:
            self.warn_if_pending()
        return super().train(mode)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save the buffers, and the name of the measure in the metadata, where torch keeps some.

        The scale is computed anew: `.data` may be written unnoticed.
        """
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {})
        if prefix[:-1] in metadata:
            metadata[prefix[:-1]]["measure"] = self.measure
        self.scaled_from = None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load the averages; report an error if they were measured by another measure.

        Plain dicts, files of safetensors and those of earlier versions do not name the measure.
        """
        metadata, errors = rest[0], rest[-1]
        saved, weight = metadata.get("measure"), state_dict.get(f"{prefix}weight")
        differs = saved not in (None, self.measure)
        if weight is not None and differs and has_values(weight) and weight.any():
            errors.append(
                f"{prefix}dispersion holds running averages of measure={saved!r}, and the layer "
                f"has measure={self.measure!r}; build it with the same measure, or leave "
                "the keys that contain 'statistics' out and load with strict=False"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @property
    def options(self) -> ScaleOptions:
        """Return the options by which a scale is computed from a dispersion."""
        return scale_options(self.config)

    @property
    def batches(self) -> tuple[Tensor, Tensor]:
        """Return the means (C, D) and counts (C,) that a training forward adds its batch to."""
        if world_size() == 1:
            return self.last_dispersion, self.last_count
        return self.pending_buffer("last_dispersion"), self.pending_buffer("last_count")

    def average_scale(self) -> Tensor:
        """Return the scale of the running average, recomputed only if the average has changed.

        It is stored in a buffer, so that a captured CUDA graph reads what `update` writes. A write
        through `.data` of a buffer changes no version and goes unnoticed until `train`, `eval` or
        `state_dict` is called: to compare values, the host would have to wait for the device.
        """
        if not self.caches_scale:
            return scale_of(self.dispersion, self.weight, self.options)
        dispersion, version = self.dispersion, self.version
        if self.scaled_from is not dispersion or self.scaled_version != version:
            with torch.no_grad():
                self.running_scale.copy_(scale_of(dispersion, self.weight, self.options))
            self.scaled_from, self.scaled_version = dispersion, version
        return self.running_scale

    def known_scale(self) -> Tensor | None:
        """Return the scale of the average as it is now, or None if it must be computed.

        In evaluation it is also None if `warn_if_empty` has not looked at this average.
        """
        if not self.caches_scale:
            return None
        if self.scaled_from is not self.dispersion:
            return None
        version = self.version
        known = version == self.scaled_version and (self.training or version == self.looked)
        return self.running_scale if known else None

    def evaluation_scale(self, assignment: Tensor) -> Tensor:
        """Return `average_scale`, after `warn_if_empty`.

        Both look at the average again only when it has changed.
        """
        self.warn_if_empty(assignment)
        scale = self.average_scale()
        self.looked = self.scaled_version if self.caches_scale else ()
        return scale

    def warn_if_empty(self, assignment: Tensor) -> None:
        """Warn once where evaluation reads an average that no batch has ever updated.

        A first layer measures nothing where the statistics are of the current layer: its tokens are
        in no cluster, and its average is rightly empty. The method reads `weight` on the host, only
        if the average has changed since it last did.
        """
        if self.training or torch.compiler.is_compiling():
            return
        weight = self.weight
        now = id(weight), 0 if weight.is_inference() else weight._version
        if self.checked == now:
            return
        if transforming() or not has_values(weight) or capturing(weight):
            return
        self.checked = now
        if not weight.any() and (assignment >= 0).any():
            result = (
                "its scale is that of each sequence alone"
                if self.config.modes.evaluation == "prefix"
                else "its scale is 1 and it routes as the plain router"
            )
            log_once(
                "an adaptive layer evaluates with running statistics that no batch has updated: "
                f"{result}; load a trained checkpoint, or train after model.train(), since calls "
                "in evaluation mode update none (acmoe.fold_statistics(model) updates them by "
                "hand, acmoe.calibrate those of an attached transformers model without training)",
                logging.WARNING,
            )

    def warn_if_pending(self) -> None:
        """Warn once if compiled training forwards recorded batches, and no update has used them.

        Compiled forwards are not counted. After eager ones, the first eager evaluation warns
        (`warn_if_empty`).
        """
        if not self.recorded:  # to ask for a pending buffer would make one
            return
        count = self.pending_buffer("last_count")
        reads = not {"running", "prefix"}.isdisjoint(self.config.modes)
        unseen = torch.compiler.is_compiling() or not has_values(count) or capturing(count)
        if self.has_pending or not reads or unseen:
            return
        if count.any() and not self.weight.any():
            log_once(
                "running statistics: compiled training forwards came, and no optimizer step that "
                "updates them; every step of a torch.optim.Optimizer does: with another "
                "optimizer call acmoe.fold_statistics(model) after each step",
                logging.WARNING,
            )

    @property
    def caches_scale(self) -> bool:
        """Return True if `running_scale` may be reused: changes of the average can be detected."""
        return not (rewriting() or self.dispersion.is_inference())

    @property
    def version(self) -> tuple[object, ...]:
        """Return a value that changes with everything that the running scale depends on."""
        weight = self.weight
        return self.dispersion._version, weight._version, id(weight), self.config

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
    """Return the options of `scale_from_dispersion` in a config."""
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
