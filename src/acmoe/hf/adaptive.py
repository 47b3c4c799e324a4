"""The module that `attach` puts on a router of transformers, as `router.adaptive`.

Before the router it multiplies the tokens by M_k* of their cluster; after it, it reads the choice
and computes the state for the next MoE layer. The router itself is not changed: its weights, its
top-k and its outputs are the model's own.

T tokens, or B sequences of L tokens; D features, E experts, K experts per token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from acmoe.config.routing import AdaptiveConfig
from acmoe.errors import UserError, check
from acmoe.hf.blend import Blend
from acmoe.hf.discovery import FoundRouter
from acmoe.hf.families import Jitter
from acmoe.hf.tape import Tape
from acmoe.ops.precision import without_autocast
from acmoe.ops.statistics.dispersion import accumulation_dtype
from acmoe.ops.statistics.pending import replaying
from acmoe.routing.adaptive import AdaptiveRouter
from acmoe.routing.next_state import NextState
from acmoe.routing.router import Router, blank
from acmoe.routing.state import Routing, RoutingState
from acmoe.routing.statistics import ClusterStatistics
from acmoe.routing.statistics.cache import StatisticsSlot


class ForeignRouter(Router):
    """Stands for the model's router where `AdaptiveRouter` asks for sizes; it is never called."""


@dataclass
class LayerContext:
    """The state of one call of a decoder layer, which its routers share during the call."""

    tape: Tape
    num_sequences: int
    length: int  # tokens of each sequence in this call
    x: Tensor | None = None  # the router's input before it was rescaled
    done: bool = False  # the layer has returned


class AdaptivePart(nn.Module):
    """Rescales the input of one router, and computes the state for the next one.

    depth         the router's number among the MoE routers of its stack, from 0
    reads         the config by which this router is rescaled; None: it stays plain
    next_router   the config of the next router, whose state is computed here; None: it is plain
    """

    def __init__(
        self,
        found: FoundRouter,
        depth: int,
        *,
        reads: AdaptiveConfig | None,
        next_router: AdaptiveConfig | None,
        blend_steps: int,
    ) -> None:
        super().__init__()
        self.name = found.name
        self.depth = depth
        self.dim, self.num_experts = found.dim, found.num_experts
        self.read = found.read
        self.jitter: Jitter | None = None
        self.jitter_size: float | None = None
        self.reader: AdaptiveRouter | None = None
        self.blend: Blend | None = None
        self.next_state: NextState | None = None
        # For compiled code: torch.compile cannot trace a thread-local variable.
        self.context: LayerContext | None = None
        if reads is not None:
            base = ForeignRouter(dim=self.dim, num_experts=self.num_experts, top_k=1)
            self.reader = AdaptiveRouter(reads, base)
            self.blend = Blend(blend_steps)
        if next_router is not None:
            self.next_state = NextState(next_router, num_clusters=self.num_experts, dim=self.dim)

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle no call: Ctrl-C leaves a context, whose tensors cannot be copied."""
        return {**self.__dict__, "context": None}

    @property
    def statistics(self) -> ClusterStatistics | None:
        """Return the statistics measured at this router, if any."""
        for holder in (self.reader, self.next_state):
            if holder is not None and holder.statistics is not None:
                return holder.statistics
        return None

    @property
    def on_meta(self) -> bool:
        """Return True if the statistics have no values."""
        return self.statistics is not None and self.statistics.dispersion.is_meta

    def keep_float32(self) -> None:
        """Make the statistics float32 again: accelerate loads them in the dtype of a model.

        A call under `torch.inference_mode` must not make them inference tensors, which no later
        optimizer step could update.
        """
        statistics = self.statistics
        if statistics is not None and statistics.dispersion.dtype != torch.float32:
            with torch.inference_mode(statistics.dispersion.is_inference()):
                statistics.load_state_dict(statistics.state_dict())

    def take_jitter(self, router: nn.Module, jitter: Jitter | None) -> None:
        """Draw the noise of the router here: in the rescaled copy the experts would not see it."""
        if jitter is None or self.reader is None:
            return
        size = getattr(router, jitter.attribute)
        if size != jitter.off:
            self.jitter, self.jitter_size = jitter, size
            setattr(router, jitter.attribute, jitter.off)

    def give_back_jitter(self, router: nn.Module) -> None:
        """Let the router draw its noise itself."""
        if self.jitter is not None:
            setattr(router, self.jitter.attribute, self.jitter_size)
            self.jitter = self.jitter_size = None

    def add_jitter(self, x: Tensor) -> None:
        """Multiply x in place by the noise that the router would draw, in training."""
        if self.training and self.jitter_size is not None:
            x *= torch.empty_like(x).uniform_(1.0 - self.jitter_size, 1.0 + self.jitter_size)

    def rescale(self, x: Tensor, context: LayerContext) -> Tensor:
        """Return M_k* h for the router's input x (..., D), in the shape and dtype of x.

        Padding stays as it is. Where the router before was not called there is no state: the
        router reads x, and the stack raises at its end.
        """
        state = context.tape.states.get(self.depth - 1)
        if self.reader is None or self.blend is None or state is None:
            return x
        x_BLD = self._sequences(x, context)
        mask_BL = _mask_on(x, context)
        with without_autocast(x):
            tokens = self.reader.rescale(
                blank(x_BLD, mask_BL),
                state_on(state, x),
                token_mask=mask_BL,
                cache=self._slot(x_BLD, context),
            )
            own_BLD = tokens.dense()
            blended_BLD: Tensor = self.blend(x_BLD.to(own_BLD.dtype), own_BLD)
        scaled_BLD = narrowed(blended_BLD, x.dtype)
        if mask_BL is not None:
            scaled_BLD = torch.where(mask_BL[..., None], scaled_BLD, x_BLD)
        return scaled_BLD.view(x.shape)

    def record(self, x: Tensor, output: Any, context: LayerContext) -> None:
        """Write the state for the next router to the tape, from the router's input and output."""
        tape = context.tape
        repeated = self.depth in tape.called
        if repeated:
            self._check_repetition(tape)
        tape.called.add(self.depth)
        if self.next_state is None:
            return
        check(
            repeated or self.depth + 1 not in tape.called,
            f"{self.name} was called after the router that reads its choice: the layers are not in "
            "the order in which acmoe.attach found them; call acmoe.detach(model) and attach again",
        )
        config = self.next_state.next_router
        assert isinstance(config, AdaptiveConfig)
        # Gradient checkpointing repeats the call. The state of the first time stays; a state with
        # gradients is computed again, because the same tensors must be saved for backward.
        if repeated and config.detach:
            return
        self._check_gradient(config, tape)
        # No tensor of a detached state may be saved for backward, since the repetition saves none.
        x_BLD = self._sequences(x.detach() if config.detach else x, context)
        mask_BL = _mask_on(x, context)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not config.detach):
            routing = self._routing(output, config)
        before = RoutingState.before(x_BLD, num_clusters=self.num_experts, mix=config.mix)
        state = self.next_state(blank(x_BLD, mask_BL), routing, before, token_mask=mask_BL)
        if not repeated:
            tape.states[self.depth] = state

    def _routing(self, output: Any, config: AdaptiveConfig) -> Routing:
        """Return the choice of the router as the library's `Routing`, from its output."""
        scores_TE, ids_TK = self.read(output)
        scores_TE = scores_TE.to(accumulation_dtype(scores_TE.dtype))
        first_T = first_choice(scores_TE.detach(), ids_TK)
        if ids_TK is None:
            check(
                config.mean_over == "all",
                f"mean_over={config.mean_over!r} counts the chosen experts, which the output of "
                f"{self.name} does not tell; use mean_over='all'",
            )
            ids_TK = first_T[:, None]
        E = self.num_experts
        ids_TK = torch.where((ids_TK >= 0) & (ids_TK < E), ids_TK.long(), E)
        gate_TK = torch.ones_like(ids_TK, dtype=scores_TE.dtype)
        loss = torch.zeros((), device=scores_TE.device, dtype=torch.float32)
        return Routing(ids_TK, gate_TK, scores_TE, loss, first_T)

    def _sequences(self, x: Tensor, context: LayerContext) -> Tensor:
        """Return the router's input as (B, L, D)."""
        B, L = context.num_sequences, context.length
        if x.shape[-1] != self.dim or x.numel() != B * L * self.dim:
            raise UserError(
                f"{self.name} was called with {tuple(x.shape)} in a call of {B} sequences of {L} "
                f"tokens and {self.dim} features; an adaptive router reads all tokens of its "
                "layer's call: leave out images if the model routes them elsewhere, or call "
                "acmoe.detach(model)"
            )
        return x.reshape(B, L, self.dim)

    def _slot(self, x_BLD: Tensor, context: LayerContext) -> StatisticsSlot | None:
        """Return the decode slot of prefix statistics; a new one where a cache may be returned."""
        assert self.reader is not None
        if self.statistics is None or self.statistics.training or self.statistics.mode != "prefix":
            return None
        B = x_BLD.shape[0]
        slot = context.tape.slot(self.depth)
        if slot is None and not (torch.is_grad_enabled() and x_BLD.requires_grad):
            slot = self.reader.new_slot(B, device=x_BLD.device, dtype=x_BLD.dtype)
            assert slot is not None
            context.tape.new_slots[self.depth] = slot
        check(
            slot is None or slot.num_sequences == B,
            f"past_key_values was filled for {slot and slot.num_sequences} sequences, and this "
            f"call has {B}; begin with an empty cache",
        )
        return slot

    def _check_repetition(self, tape: Tape) -> None:
        """Raise a UserError if the model called the router again, and not gradient checkpointing.

        Checkpointing repeats a layer in a backward, or when saved tensors are read after the pass.
        Either may come before the pass has ended only in eager code. A plain router that tells the
        next one nothing may be called any number of times.
        """
        adapts = self.reader is not None or self.next_state is not None
        check(
            not adapts or tape.ended or (not torch.compiler.is_compiling() and replaying()),
            f"{self.name} was called twice in a forward pass: two layers of the model are one "
            "module, and an adaptive router has one place among the MoE layers; give each layer a "
            "module of its own, by copy.deepcopy, before acmoe.attach",
        )

    def _check_gradient(self, config: AdaptiveConfig, tape: Tape) -> None:
        """Raise a UserError if reentrant checkpointing would drop the gradient of the scale."""
        crosses = not config.detach and (config.mix > 1 or config.reads == "previous")
        check(
            not (crosses and tape.gradient and not torch.is_grad_enabled()),
            "detach=False sends a gradient from layer to layer, which reentrant gradient "
            "checkpointing drops; use gradient_checkpointing_kwargs={'use_reentrant': False}",
        )


def first_choice(scores_TE: Tensor, ids_TK: Tensor | None) -> Tensor:
    """Return (T,) k*: the expert of highest score among those chosen, lowest index among equals.

    The argmax of all scores need not be chosen: groups and selection biases may forbid it. Ids
    outside 0 to E - 1 mean an expert on another rank; a token with no other id has the argmax.
    """
    if ids_TK is None:
        return scores_TE.argmax(-1)
    E = scores_TE.shape[-1]
    local_TK = (ids_TK >= 0) & (ids_TK < E)
    chosen_TE = scores_TE.new_zeros((scores_TE.shape[0], E + 1), dtype=torch.bool)
    # 1, not True: torch.jit.trace knows no scatter of a bool.
    chosen_TE = chosen_TE.scatter(1, torch.where(local_TK, ids_TK.long(), E), 1)[:, :E]
    chosen_TE = chosen_TE | ~local_TK.any(-1, keepdim=True)
    return scores_TE.masked_fill(~chosen_TE, float("-inf")).argmax(-1)


def narrowed(x_XD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in the dtype; a row beyond the range of float16 is shrunk to it, in its direction.

    M has a mean of one over D features, so that it may reach D: a token of 20 times D = 4096 would
    be infinite in float16, and its router's scores NaN. Other rows are multiplied by exactly 1.
    """
    if dtype == torch.float16:
        largest_X1 = x_XD.detach().abs().amax(dim=-1, keepdim=True)
        x_XD = x_XD * (torch.finfo(dtype).max / largest_X1).clamp(max=1.0)
    return x_XD.to(dtype)


def state_on(state: RoutingState, x: Tensor) -> RoutingState:
    """Return the state on the device of x: layers of one model may be on several devices."""
    if state.assignment.device == x.device:
        return state
    return RoutingState(*(tensor.to(x.device) for tensor in state))


def _mask_on(x: Tensor, context: LayerContext) -> Tensor | None:
    mask_BL = context.tape.token_mask
    return None if mask_BL is None else mask_BL.to(x.device)
