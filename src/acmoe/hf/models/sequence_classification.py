"""A finetuned sentence classifier as a transformers model.

B sentences, L positions, D features, K classes.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from acmoe.errors import check
from acmoe.hf.models.base import AcmoePreTrainedModel, refuse
from acmoe.hf.models.checks import check_all
from acmoe.hf.models.config import AcmoeConfig
from acmoe.hf.models.hidden import check_positions, recorded_inputs, wants_hidden_states
from acmoe.hf.models.padding import IGNORED, last_token, token_mask
from acmoe.models.text.decoder import LanguageModel
from acmoe.models.text.segment import blank_ids
from acmoe.ops.checks import check_range
from acmoe.ops.statistics.dispersion import accumulation_dtype
from acmoe.train.finetune.classifier import classification_head

_PADDED_RIGHT = (
    "a sentence ends with padding; the published form pads on the left "
    "(tokenizer.padding_side='left')"
)


class AcmoeForSequenceClassification(AcmoePreTrainedModel):
    """A language model and a head on the hidden state of each sentence's last token.

    `config.head` is the form of finetuning: "clean" masks padding on either side; "paper" repeats
    the published code, which pads on the left and reads padding as token 0.
    """

    model: LanguageModel

    def __init__(
        self,
        config: AcmoeConfig,
        model: LanguageModel | None = None,
        head: nn.Module | None = None,
    ) -> None:
        dim = config.language.dim
        super().__init__(config, model)
        self.num_labels = config.num_labels
        if head is None:
            head = classification_head(dim, self.num_labels, config.head, config.head_dropout)
        self.head = head
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        position_ids: Tensor | None = None,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        """Return (B, K) logits and, with labels (B,), the mean cross-entropy.

        As in `acmoe finetune`, no auxiliary loss is added. output_hidden_states returns the inputs
        of all blocks, (B, L, D), and the last hidden states. position_ids must be those of the
        default; inputs_embeds and output_attentions are not supported.
        """
        self.check_placed()
        refuse(
            inputs_embeds=inputs_embeds,
            output_attentions=output_attentions or self.config.output_attentions,
        )
        config = self.config
        mask_BL = token_mask(input_ids, attention_mask, config.vocab_size)
        check_positions(position_ids, input_ids, attention_mask)
        last_B = last_token(mask_BL, input_ids)
        if config.head == "paper":
            check_all(last_B == input_ids.shape[1] - 1, _PADDED_RIGHT, wait=True)
            mask_BL = None
        check_range(blank_ids(input_ids, mask_BL), 0, config.vocab_size, "input_ids")
        hidden = wants_hidden_states(config, output_hidden_states)
        with recorded_inputs(self.model.blocks if hidden else []) as inputs:
            x_BLD, _, _ = self.model.hidden_states(input_ids, token_mask=mask_BL)
        logits_BK: Tensor = self.head(
            x_BLD[torch.arange(len(last_B), device=last_B.device), last_B]
        )
        loss = None if labels is None else self._loss(logits_BK, labels, num_items_in_batch)
        found = SequenceClassifierOutput(
            loss=loss, logits=logits_BK, hidden_states=(*inputs, x_BLD) if hidden else None
        )
        return found.to_tuple() if return_dict is False else found

    def _loss(self, logits_BK: Tensor, labels: Tensor, num_items: Tensor | int | None) -> Tensor:
        check(
            self.config.problem_type in (None, "single_label_classification")
            and not labels.is_floating_point(),
            f"problem_type={self.config.problem_type!r}, labels of {labels.dtype}; this model "
            "learns one class per sentence, given as integers",
        )
        check_range(labels.masked_fill(labels == IGNORED, 0), 0, self.num_labels, "labels")
        logits_BK = logits_BK.to(accumulation_dtype(logits_BK.dtype))
        loss = nn.functional.cross_entropy(logits_BK, labels, reduction="sum")
        return loss / (len(labels) if num_items is None else num_items)
