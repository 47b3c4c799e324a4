"""The record of one forward pass: what each MoE router hands to the next, and the call's masks.

A stack puts a new `Tape` into the keyword arguments of its call, and the model passes it on to its
decoder layers (hooks.py). Each call has a tape of its own, so two forward passes in flight do not
meet, and gradient checkpointing, which repeats a layer with the arguments it had, finds the tape of
the same pass.

B sequences of L tokens.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from acmoe.errors import UserError, check
from acmoe.hf.cache import past_tokens, slots_in
from acmoe.ops.dispatch import log_once
from acmoe.routing.state import RoutingState
from acmoe.routing.statistics import ClusterStatistics
from acmoe.routing.statistics.cache import StatisticsSlot

KEY = "acmoe_tape"  # name of the keyword argument
PAGED = "cache"  # argument of continuous batching: the keys and values of all its sequences
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")  # arguments of packed sequences


class Tape:
    """The states of one forward pass of a stack, written once each.

    It is no dataclass: FSDP with mixed precision copies a dataclass among the arguments of a layer
    and casts what is in it, so that every layer would write to a tape of its own.
    """

    def __init__(self, *, gradient: bool) -> None:
        self.token_mask: Tensor | None = None  # (B, L), None: no padding, or no statistic asks
        self.slots: dict[int, StatisticsSlot] | None = None  # decode slots in the call's cache
        self.past = 0  # tokens in that cache; 0 where running statistics are only read
        self.gradient = gradient  # gradients were recorded where the pass began
        self.called: set[int] = set()  # depths of the routers called so far
        self.states: dict[int, RoutingState] = {}  # by depth: the state for the next router
        self.new_slots: dict[int, StatisticsSlot] = {}
        self.ended = False  # the stack has returned: further calls are repetitions

    def slot(self, depth: int) -> StatisticsSlot | None:
        """Return the decode slot of a router; None if the cache of the call has none yet."""
        if self.slots is None:
            check(
                self.past == 0,
                f"past_key_values holds {self.past} tokens without their prefix statistics; fill "
                "the cache by this model, attached and under torch.no_grad()",
            )
            return None
        return self.slots[depth]


def new_tape(given: Mapping[str, Any], name: str, statistics: ClusterStatistics | None) -> Tape:
    """Return the tape of a call of the stack `name` with the arguments `given`.

    statistics: those of one of its routers, whose mode is the mode of all; None: there are none.
    """
    tape = Tape(gradient=torch.is_grad_enabled())
    if statistics is None or (statistics.mode == "running" and not statistics.training):
        return tape
    check(
        statistics.mode == "running" or given.get(PAGED) is None,
        f"statistics={statistics.mode!r} measure the tokens of a call, and generate_batch puts new "
        "tokens of several sequences into one call; use statistics='running', or generate",
    )
    cache = given.get("past_key_values")
    tape.past = past_tokens(cache)
    check(
        statistics.mode in ("running", "prefix") or tape.past == 0,
        f"statistics={statistics.mode!r} measure whole sequences, and with a cache a call has "
        "only the last tokens; use statistics='running' or 'prefix', or generate with "
        "use_cache=False",
    )
    check(
        statistics.mode == "running" or not statistics.training or tape.past == 0,
        f"past_key_values holds {tape.past} tokens, and in training mode statistics="
        f"{statistics.mode!r} measure whole sequences; call model.eval() before generate; to train "
        "with tokens in the cache (prefix tuning of PEFT puts some there), use "
        "statistics='running'",
    )
    if statistics.mode == "prefix" and not statistics.training:
        tape.slots = slots_in(cache, name)
    tape.token_mask = token_mask(given, tape.past, statistics.mode)
    if statistics.training and given.get("encoder_hidden_states") is not None:
        say_labels_count(given, name)
    return tape


def token_mask(given: Mapping[str, Any], past: int, mode: str) -> Tensor | None:
    """Return the (B, L) mask of real tokens of a call, from its attention mask.

    The mask is 2-D, or a dict of the masks of each kind of attention layer: Gemma 4 and others make
    such a dict before they call their text model.
    """
    mask = given.get("attention_mask")
    if isinstance(mask, Mapping):
        mask = mask_of_layers(mask, past, call_length(given), mode)
    if mode in ("prefix", "sequence"):
        check_not_packed(given, mask)
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise UserError(
            f"attention_mask is {_shown(mask)}, from which padding cannot be read, and statistics="
            f"{mode!r} must not count it; pass a 2-D mask (batch, tokens), and generate without a "
            "static cache"
        )
    length = call_length(given)
    check(
        mask.shape[1] == past + length,
        f"attention_mask has {mask.shape[1]} columns for {past} cached and {length} new tokens; "
        f"statistics={mode!r} need one column per token",
    )
    return mask[:, -length:].bool()


def say_labels_count(given: Mapping[str, Any], name: str) -> None:
    """Warn once if the decoder of an encoder-decoder gets no mask of its tokens in training.

    Such models make its tokens of the labels. Padding of these is -100, and becomes a token.
    """
    if given.get("attention_mask") is None:
        log_once(
            f"{name} gets no attention mask in training, so that its statistics count padded "
            "labels as tokens; if labels are padded, pass the model decoder_attention_mask = "
            "(labels != -100)",
            logging.WARNING,
        )


def mask_of_layers(masks: Mapping[str, Any], past: int, length: int, mode: str) -> Tensor | None:
    """Return a (B, past + L) mask whose last L columns tell the new tokens that are real.

    masks: by kind of layer, as transformers makes them: 4-D (B, 1, L, past + L), bool or 0 where a
    key is seen; 2-D; or None where there is no padding. A token that is real sees itself, and
    nothing sees padding. Masks of sliding windows have fewer columns and are left out.
    """
    total = past + length
    tensors = [one for one in masks.values() if isinstance(one, Tensor) and one.dim() in (2, 4)]
    whole = [one for one in tensors if one.shape[-1] == total]
    unmasked = any(one is None for one in masks.values())
    longer = any(one.shape[-1] > total for one in tensors)
    if longer or not (whole or unmasked):
        shown = ", ".join(f"{kind}: {_shown(one)}" for kind, one in masks.items())
        raise UserError(
            f"attention_mask is a dict ({shown}), from which padding cannot be read, and "
            f"statistics={mode!r} must not count it; generate without a static cache, and use the "
            "attention of 'sdpa', 'eager' or 'flash_attention_2'"
        )
    if not whole:
        return None
    if whole[0].dim() == 2:
        return whole[0]
    sees_BLK = whole[0][:, 0] if whole[0].dtype == torch.bool else whole[0][:, 0] == 0
    sees_itself_BL = sees_BLK.diagonal(past, dim1=-2, dim2=-1)
    return torch.nn.functional.pad(sees_itself_BL, (past, 0), value=True)


def _shown(mask: Any) -> str:
    return str(tuple(mask.shape)) if isinstance(mask, Tensor) else type(mask).__name__


def call_length(given: Mapping[str, Any]) -> int:
    """Return L, the number of new tokens in each sequence of a call."""
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if not isinstance(tokens, Tensor):
        raise UserError(
            "this call has neither input_ids nor inputs_embeds, whose length its statistics need; "
            "pass one of them"
        )
    return tokens.shape[1]


def check_not_packed(given: Mapping[str, Any], mask: Any) -> None:
    """Raise a UserError if several sequences share a row, which the statistics would mix.

    It reads position_ids on the host. Compiled code cannot, and treats a row as one sequence.
    """
    packed = any(given.get(name) is not None for name in PACKED)
    positions = given.get("position_ids")
    if isinstance(positions, Tensor) and positions.dim() == 2 and not torch.compiler.is_compiling():
        restarts = positions.diff(dim=-1) <= 0  # 0, 0, 1: a sequence of one token is the first
        if isinstance(mask, Tensor) and mask.dim() == 2:
            real = mask[:, -positions.shape[1] :].bool()
            restarts = restarts & real[:, :-1] & real[:, 1:]
        packed = packed or bool(restarts.any())
    check(
        not packed,
        "several sequences are packed into one row, and prefix or sequence statistics would mix "
        "them; use statistics='running', or one sequence per row",
    )
