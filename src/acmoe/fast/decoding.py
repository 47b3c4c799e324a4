"""Decode steps of one shape, captured in a CUDA graph.

A plain decode step (models/text/generate.py) launches some hundred kernels, for which a GPU waits.
Its keys and values grow, so that a graph of these launches could not be replayed. Here keys and
values are ring buffers, the position is a tensor, and a mask says which places of the ring a query
may see. So every step has the same launches at the same addresses, which a graph replays in one
launch.

The position p of a token has place p mod N in a ring of N. The query at position p sees place n at
distance (p - n) mod N. Blocks, routers and experts are called as in a plain step; only attention
differs, and gives the same result up to rounding.

Shapes: B batch, H heads, N places of a ring, P features of a head, W those of a stored head (a
multiple of 8), J = P / 2 feature pairs, S = span, V words.
"""

import logging
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the customary name

from acmoe.models.text.cache import BlockCache
from acmoe.models.text.decoder import LanguageModel
from acmoe.models.text.generate import DecodeStep, decode_steps
from acmoe.models.text.memory import DecodeCache
from acmoe.models.unmodified import hooked
from acmoe.ops.attention.ring import store_in_ring
from acmoe.ops.attention.rotary import rotation
from acmoe.ops.dispatch import log_once, transforming

WARM_UP = 2  # steps before the capture; they are real steps, and compile kernels
FEWEST_STEPS = 16  # a capture takes about as long as so many steps


class Clock:
    """The position of the step, and the masks, columns and angles that all blocks compute from it.

    The blocks attend to ring buffers of N places; position p is at place p modulo N.
    """

    def __init__(self, model: LanguageModel, first: int, real_BN: Tensor) -> None:
        self.position = torch.full((), first, device=real_BN.device)
        self.places_N = torch.arange(real_BN.shape[1], device=real_BN.device)
        self.span = model.config.span
        # With a relative-position embedding a query does not see itself.
        self.nearest = 0 if model.positions is None else 1
        # The published model attends to padding, which is zeros.
        self.hides_padding = model.config.empty_memory == "masked"
        self.real_BN = real_BN  # True where a place holds a token that may be seen
        self.features = model.config.head_dim
        self.rotation_21J: Tensor | None = None  # None: the model has relative positions
        self.wide = torch.float64 if model.embed.weight.dtype == torch.float64 else torch.float32

    def begin(self, mask_B1: Tensor | None) -> None:
        """Set the place of the new token and the mask of its query; mask_B1: False for padding."""
        self.place_1 = (self.position % len(self.places_N)).view(1)
        new_B1 = torch.ones_like(self.real_BN[:, :1])
        if mask_B1 is not None and self.hides_padding:
            new_B1 = mask_B1
        self.real_BN.index_copy_(1, self.place_1, new_B1)
        distance_N = (self.position - self.places_N) % len(self.places_N)
        self.column_N = (self.span - distance_N).clamp(0, self.span - 1)
        inside_N = (distance_N >= self.nearest) & (distance_N < self.nearest + self.span)
        open_BN = inside_N & self.real_BN
        seen_B = open_BN.any(1)
        # A query that sees nothing attends to everything, which keeps softmax finite; its output is
        # then set to zero. Only after a masked token can a query see nothing: the last token of a
        # prompt is never padding.
        self.closed_B11N = (~open_BN & seen_B[:, None])[:, None, None]
        self.blind_B111 = None if mask_B1 is None else ~seen_B[:, None, None, None]
        if self.nearest == 0:
            self.rotation_21J = rotation(self.position.to(self.wide).view(1), self.features)
        self.shared: dict[str, Tensor] = {}  # by name, what the first block computes for all

    def bias(self, q_BH1W: Tensor, positions_PS: Tensor | None) -> Tensor:
        """Return the term added to the scores: relative positions, and -inf at masked places."""
        if positions_PS is None:
            if "bias" not in self.shared:
                zeros = torch.zeros_like(self.closed_B11N, dtype=q_BH1W.dtype)
                self.shared["bias"] = zeros.masked_fill(self.closed_B11N, -math.inf)
            return self.shared["bias"]
        if "positions" not in self.shared:  # one embedding for all blocks
            positions_PN = positions_PS.to(q_BH1W.dtype).index_select(1, self.column_N)
            wider = q_BH1W.shape[-1] - len(positions_PN)
            self.shared["positions"] = F.pad(positions_PN, (0, 0, 0, wider))
        bias_BH1N = q_BH1W @ self.shared["positions"]
        return bias_BH1N.masked_fill(self.closed_B11N, -math.inf)

    def end(self) -> None:
        self.position += 1


class RingCache(BlockCache):
    """One block's keys and values in ring buffers, and its routing statistics."""

    def __init__(self, held: BlockCache, clock: Clock, place_S: Tensor) -> None:
        self.routing = held.routing
        self.position = clock.position
        self.clock = clock
        self.keys, self.values = (self._ring(last_BHSP, place_S) for last_BHSP in held.last())

    def _ring(self, last_BHSP: Tensor, place_S: Tensor) -> Tensor:
        """Return a ring buffer that holds the last S positions, each at its position modulo N."""
        last_BHSP = _padded(last_BHSP[:, :, -len(place_S) :])
        shape = (*last_BHSP.shape[:2], len(self.clock.places_N), last_BHSP.shape[-1])
        return last_BHSP.new_zeros(shape).index_copy_(2, place_S, last_BHSP)

    def rotate(self, q_BHLP: Tensor, k_BHNP: Tensor) -> tuple[Tensor, Tensor]:
        """Return both as they are: `attend` rotates them."""
        return q_BHLP, k_BHNP

    def attend(
        self,
        q_BHLP: Tensor,
        k_BHLP: Tensor,
        v_BHLP: Tensor,
        *,
        span: int,
        positions: Tensor | None,
        key_mask: Tensor | None,
        dropout: float,
    ) -> Tensor:
        """Rotate, write the new key and value to their place, and attend to all that may be seen.

        key_mask: not read; the clock has it.
        """
        clock, features = self.clock, q_BHLP.shape[-1]
        q_BH1W = store_in_ring(
            *(q_BHLP, k_BHLP, v_BHLP, self.keys, self.values, clock.place_1, clock.rotation_21J),
            1 / math.sqrt(features),
        )
        out_BH1W = F.scaled_dot_product_attention(
            *(q_BH1W, self.keys, self.values), attn_mask=clock.bias(q_BH1W, positions), scale=1.0
        )
        if clock.blind_B111 is not None:
            out_BH1W = out_BH1W.masked_fill(clock.blind_B111, 0.0)
        return out_BH1W[..., :features]


class RingDecodeCache(DecodeCache):
    """The rings of all blocks, filled from a cache that holds the prompt."""

    def __init__(self, held: DecodeCache, model: LanguageModel, most_steps: int) -> None:
        first = held.blocks[0].position
        assert isinstance(first, int), "the cache has rings already"
        keys, _ = held.blocks[0].last()
        kept = keys.shape[2]
        places = min(model.config.span + 1, first + most_steps)
        places = -(-max(places, kept) // 8) * 8  # kernels of attention read 8 places at a time
        place_S = torch.arange(first - kept, first, device=keys.device) % places
        real_BN = torch.zeros(keys.shape[0], places, dtype=torch.bool, device=keys.device)
        real_BS = held.mask.last() if held.masked else torch.ones_like(real_BN[:, :kept])
        real_BN.index_copy_(1, place_S, real_BS)
        self.clock = Clock(model, first, real_BN)
        blocks: list[BlockCache] = [RingCache(one, self.clock, place_S) for one in held.blocks]
        super().__init__(blocks, held.mask, held.masked)

    def extend_mask(self, tokens_BL: Tensor, token_mask_BL: Tensor | None) -> None:
        """Return None: the clock holds the mask."""


class RingSteps:
    """Takes decode steps on rings: the first ones eagerly, then, with `capture`, by a graph."""

    def __init__(
        self, model: LanguageModel, cache: DecodeCache, most_steps: int, *, capture: bool
    ) -> None:
        self.model = model
        self.cache = RingDecodeCache(cache, model, most_steps)
        self.capture = capture
        self.steps = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens_B1: Tensor, mask_B1: Tensor | None) -> Tensor:
        """Return the (B, V) logits after the new tokens."""
        self.steps += 1
        if not self.capture:
            return self._step(tokens_B1, mask_B1)
        if self.steps == 1:
            self.tokens_B1, self.mask_B1 = tokens_B1.clone(), mask_B1
            if mask_B1 is not None:
                self.mask_B1 = mask_B1.clone()
        self.tokens_B1.copy_(tokens_B1)
        if self.mask_B1 is not None and mask_B1 is not None:
            self.mask_B1.copy_(mask_B1)
        if self.graph is None and (self.steps <= WARM_UP or not self._captured()):
            return self._step(self.tokens_B1, self.mask_B1)
        assert self.graph is not None
        self.graph.replay()
        return self.logits_BV

    def _step(self, tokens_B1: Tensor, mask_B1: Tensor | None) -> Tensor:
        self.cache.clock.begin(mask_B1)
        x_BLD, _, _ = self.model.hidden_states(tokens_B1, token_mask=mask_B1, cache=self.cache)
        logits_BV: Tensor = self.model.unembed(x_BLD[:, -1])
        self.cache.clock.end()
        return logits_BV

    def _captured(self) -> bool:
        """Capture a step, which is not run yet; return False if the model cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.logits_BV = self._step(self.tokens_B1, self.mask_B1)
        except RuntimeError as error:
            self.capture = False
            reason = (str(error) or type(error).__name__).splitlines()[0]
            log_once(f"decode steps are not captured: {reason}", logging.WARNING)
            return False
        self.graph = graph
        return True


def captured_steps(
    model: LanguageModel, cache: DecodeCache, most_steps: int, masked: bool
) -> DecodeStep:
    """Return decode steps that a CUDA graph replays; plain ones, and why, where that cannot be."""
    reason = capture_unsupported(model, most_steps)
    if reason is not None:
        log_once(f"decode steps are not captured: {reason}")
        return decode_steps(model, cache, most_steps, masked)
    log_once("decode steps are captured in a CUDA graph")
    return RingSteps(model, cache, most_steps, capture=True)


def capture_unsupported(model: LanguageModel, most_steps: int = FEWEST_STEPS) -> str | None:
    """Return the reason why decode steps cannot or should not be captured, or None."""
    device = model.embed.weight.device
    if device.type != "cuda":
        return f"CUDA graphs need a CUDA device, not {device.type}"
    if transforming():
        return "a torch.func transform runs"
    if torch.cuda.is_current_stream_capturing():
        return "the caller captures a graph"
    if most_steps < FEWEST_STEPS:
        return f"a capture pays from {FEWEST_STEPS} steps on"
    for name, reason in _changes(model, device):
        return f"{name} {reason}"
    return None


def _changes(model: LanguageModel, device: torch.device) -> Iterator[tuple[str, str]]:
    """Yield what a replay would leave out, by name."""
    for name, module in model.named_modules():
        if hooked(module):
            yield name or "the model", "has hooks, which a replay would not call"
    for name, tensor in model.named_parameters():
        if tensor.device != device:
            yield name, f"is on {tensor.device}"


def _padded(x: Tensor) -> Tensor:
    """Pad the features of a head with zeros to a multiple of 8, which fused attention needs."""
    return F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x
