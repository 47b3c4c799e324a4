"""Swin-MoE and the vision transformer with SoftMoE layers as transformers models.

B images, K classes, T tokens of a layer, E experts.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.utils import ModelOutput

from acmoe.errors import check
from acmoe.hf.models.base import (
    AcmoePreTrainedModel,
    add_aux_loss,
    refuse,
    say_aux_loss_is_left,
)
from acmoe.hf.models.config import AcmoeConfig
from acmoe.models.capacity import override_capacity
from acmoe.models.images.classifier import ImageClassifier


@dataclass
class AcmoeImageOutput(ModelOutput):  # type: ignore[misc]
    """Logits (B, K), the loss with labels, the auxiliary losses and the routers' affinities."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    aux_loss: Tensor | None = None
    router_logits: tuple[Tensor, ...] | None = None


class AcmoeForImageClassification(AcmoePreTrainedModel):
    """`acmoe`'s image classifiers; `self.model` is the library's `SwinModel` or `SoftViT`.

    In evaluation mode experts have the capacity `config.eval_capacity`, by default none, as in
    `acmoe evaluate`; in training mode that of the model's config.
    """

    main_input_name = "pixel_values"
    input_modalities = ("image",)
    model: ImageClassifier

    def __init__(self, config: AcmoeConfig, model: ImageClassifier | None = None) -> None:
        check(
            config.family != "language",
            "this checkpoint is a language model; load it with AutoModelForCausalLM",
        )
        super().__init__(config, model)
        check(
            config.num_labels == config.library.num_classes,
            f"num_labels={config.num_labels}, and the model has {config.library.num_classes} "
            "classes; change num_classes of the library's model, or call model.model.new_head(...)",
        )
        self.post_init()

    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_router_logits: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
    ) -> AcmoeImageOutput | tuple[Any, ...]:
        """Return (B, K) logits and, with labels, the cross-entropy plus the auxiliary losses.

        Args:
            pixel_values: (B, 3, height, width) as `AcmoeImageProcessor` makes them.
            labels: (B,) class ids, or (B, K) probabilities.
            output_router_logits: return each MoE layer's affinities.
            num_items_in_batch: images in all micro-batches of an optimizer step.
        """
        self.check_placed()
        refuse(
            output_hidden_states=self.config.output_hidden_states,
            output_attentions=self.config.output_attentions,
        )
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        capacity: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if not self.training:
            capacity = override_capacity(self.model, self.config.eval_capacity)
        with capacity:
            out = self.model(pixel_values, labels, return_routings=output_router_logits)
        loss = None
        if out.loss is not None:
            count = out.loss.new_tensor(len(pixel_values))
            loss = add_aux_loss(out.loss, out.aux_loss, count, num_items_in_batch)
        elif self.training:
            say_aux_loss_is_left(out.aux_loss)
        affinities = tuple(routing.affinity for routing in out.routings or ())
        found = AcmoeImageOutput(
            loss=loss,
            logits=out.logits,
            aux_loss=out.aux_loss,
            router_logits=affinities if output_router_logits else None,
        )
        return found.to_tuple() if return_dict is False else found
