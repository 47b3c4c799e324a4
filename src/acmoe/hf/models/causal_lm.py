"""The language model as a transformers model that generates text.

B sequences, L new positions, D features, V words, T = B * L tokens, E experts.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812, the customary name
from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from acmoe.errors import check
from acmoe.hf.models.base import (
    AcmoePreTrainedModel,
    add_aux_loss,
    refuse,
    say_aux_loss_is_left,
)
from acmoe.hf.models.cache import AcmoeCache
from acmoe.hf.models.checks import check_all
from acmoe.hf.models.config import AcmoeConfig
from acmoe.hf.models.hidden import check_positions, recorded_inputs, wants_hidden_states
from acmoe.hf.models.padding import IGNORED, token_mask
from acmoe.models.recorded import recorded
from acmoe.models.text.decoder import LanguageModel
from acmoe.models.text.generate import check_generates
from acmoe.models.text.segment import blank_ids
from acmoe.ops.checks import check_range

_PADDED_RIGHT = (
    "a prompt ends with padding; pad prompts on the left (tokenizer.padding_side='left')"
)


class AcmoeForCausalLM(AcmoePreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """`acmoe`'s language model; `self.model` is the library's `LanguageModel`.

    Texts of any length are read: a position attends to the `span` positions up to it.
    """

    _is_stateful = True  # assisted decoding, which takes back tokens, is refused by transformers
    model: LanguageModel

    def __init__(self, config: AcmoeConfig, model: LanguageModel | None = None) -> None:
        check(
            config.family == "language",
            f"family={config.family!r} is no language model; use AcmoeForImageClassification",
        )
        super().__init__(config, model)
        self.generation_config = GenerationConfig(pad_token_id=config.vocab_size)  # padding.py
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.model.unembed

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Refuse a new vocabulary size; without arguments return the embedding."""
        size = args[0] if args else kwargs.get("new_num_tokens")
        check(
            size in (None, self.config.vocab_size),
            f"the vocabulary has {self.config.vocab_size} symbols and cannot be resized to {size}; "
            "build a model with another vocab_size",
        )
        return self.model.embed

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        position_ids: Tensor | None = None,
    ) -> MoeCausalLMOutputWithPast | tuple[Any, ...]:
        """Return logits and, with labels, the loss.

        Args:
            input_ids: (B, L) ids. Positions need no ids of their own: they are relative.
            attention_mask: (B, N), 0 at padding, of cached and new positions.
            past_key_values: what an earlier call returned.
            labels: (B, L), the ids themselves; -100 is not scored. The model shifts them: position
                t predicts labels[t + 1]. In training mode logits are then not returned, so that
                those of the whole vocabulary never exist at one time.
            use_cache: return a cache; only where no gradients are recorded.
            output_router_logits: return each MoE layer's (T, E) affinities.
            logits_to_keep: number of last positions to compute logits of, or their indices; 0: all.
            num_items_in_batch: labels in all micro-batches of an optimizer step, from the Trainer.
            output_hidden_states: return (B, L, D) the inputs of all blocks, of which the first is
                the embedding, and the input of the output layer.
            position_ids: (B, L), only as they are by default: texts count from 0.
            inputs_embeds, output_attentions: not supported; they must be None or False.

        The loss is the cross-entropy plus `aux_loss`, the weighted auxiliary losses of all MoE
        layers. Without labels there is no loss to add it to, and training logs a warning once.
        """
        self.check_placed()
        refuse(
            inputs_embeds=inputs_embeds,
            output_attentions=output_attentions or self.config.output_attentions,
        )
        mask_BL = self._token_mask(input_ids, attention_mask)
        cache = self._cache(past_key_values, use_cache, input_ids, mask_BL)
        seen = 0 if cache is None else cache.seen
        check_positions(position_ids, input_ids, attention_mask, seen)
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        hidden = wants_hidden_states(self.config, output_hidden_states)
        with (
            recorded(self.model.moe_layers() if output_router_logits else []) as routings,
            recorded_inputs(self.model.blocks if hidden else []) as inputs,
        ):
            x_BLD, state, _ = self.model.hidden_states(
                input_ids, token_mask=mask_BL, cache=None if cache is None else cache.cache
            )
        if cache is not None:
            cache.seen += input_ids.shape[1]
        loss = logits = None
        if labels is not None:
            loss = self._loss(x_BLD, labels, mask_BL, state.aux_loss, num_items_in_batch)
        elif self.training:
            say_aux_loss_is_left(state.aux_loss)
        if labels is None or not self.training:
            logits = self.model.unembed(_kept(x_BLD, logits_to_keep))
        found = MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=state.aux_loss,
            logits=logits,
            past_key_values=cache,
            hidden_states=(*inputs, x_BLD) if hidden else None,
            router_logits=tuple(r.affinity for r in routings) if output_router_logits else None,
        )
        return found.to_tuple() if return_dict is False else found

    def _token_mask(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
        """Return (B, L), True for real tokens, or None if all are; check the ids of these."""
        vocab_size = self.config.vocab_size
        mask_BL = token_mask(input_ids, attention_mask, vocab_size)
        check_range(blank_ids(input_ids, mask_BL), 0, vocab_size, "input_ids")
        return mask_BL

    def _loss(
        self,
        x_BLD: Tensor,
        labels: Tensor,
        mask_BL: Tensor | None,
        aux_loss: Tensor,
        num_items: Tensor | int | None,
    ) -> Tensor:
        """Return the cross-entropy of the next labels plus the auxiliary loss.

        Padding predicts nothing: with padding on the left, the first token of a text is not scored.
        """
        check(
            labels.shape == x_BLD.shape[:2],
            f"labels have shape {tuple(labels.shape)}; give the ids of the "
            f"{tuple(x_BLD.shape[:2])} input positions, -100 where a label does not count",
        )
        check(not labels.is_floating_point(), f"labels are {labels.dtype}; give whole numbers")
        targets_BL = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        scored_BL = targets_BL != IGNORED
        if mask_BL is not None:
            scored_BL = scored_BL & mask_BL
        check_range(targets_BL.masked_fill(~scored_BL, 0), 0, self.config.vocab_size, "labels")
        loss = self.model.mean_loss(x_BLD, targets_BL, mask_BL)
        return add_aux_loss(loss, aux_loss, scored_BL.sum(), num_items)

    def _cache(
        self,
        past: Cache | None,
        use_cache: bool | None,
        input_ids: Tensor,
        mask_BL: Tensor | None,
    ) -> AcmoeCache | None:
        """Return the cache to extend: the given one, a new one if asked for, or None."""
        check(
            past is None or isinstance(past, AcmoeCache),
            f"past_key_values is a {type(past).__name__}; this model makes its own cache: pass "
            "use_cache=True, then the past_key_values it returned",
        )
        if past is None and not use_cache:
            return None
        if mask_BL is not None and input_ids.shape[1] > 1:
            check_all(mask_BL[:, -1], _PADDED_RIGHT, wait=True)
        if isinstance(past, AcmoeCache):
            return past
        return AcmoeCache(self.model.new_cache(len(input_ids)))

    def _prepare_position_ids_for_generation(self, *args: Any) -> None:
        """Make no position ids: the model needs none."""

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any
    ) -> None:
        """Check the options. The first forward pass, which knows the beams, makes the cache."""
        check_generates(self.model.config)
        kind = generation_config.cache_implementation
        check(
            kind in (None, "dynamic"),
            f"cache_implementation={kind!r}; this model has a cache of its own: leave it out",
        )
        check(
            not generation_config.is_assistant,
            "this model cannot assist another one: its cache cannot take back tokens; leave "
            "assistant_model out",
        )


def _kept(x_BLD: Tensor, keep: int | Tensor) -> Tensor:
    """Return the positions whose logits are asked for."""
    if isinstance(keep, Tensor):
        return x_BLD[:, keep]
    return x_BLD[:, -keep:] if keep else x_BLD
