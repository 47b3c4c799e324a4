"""A language model whose blocks lie on the processes of a pipeline.

B streams, L positions of a block.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from acmoe.config.text.train import RunConfig
from acmoe.distributed.pipeline import (
    StagePlan,
    build_schedule,
    check_torch,
    own_stages,
    pipeline_group,
    plain_errors,
)
from acmoe.distributed.pipeline_gradients import clip_gradients, gather_stages, reduce_gradients
from acmoe.distributed.ranks import Ranks
from acmoe.distributed.whole import load_whole_state, whole_state
from acmoe.experts.moe import MoE
from acmoe.experts.old_names import current_name
from acmoe.models.recorded import recorded
from acmoe.models.registry import build_model
from acmoe.models.text.decoder import LanguageModel, LanguageOutput
from acmoe.models.text.memory import Memory, StreamMemory
from acmoe.models.text.stage import DecoderStage, cut_blocks
from acmoe.ops.dispatch import log_once
from acmoe.ops.statistics.dispersion import accumulation_dtype
from acmoe.routing.process_group import set_statistics_group
from acmoe.routing.state import Routing
from acmoe.runtime import autocast

StageOutput = tuple[tuple[Tensor, ...], Memory]
SHARED = "positions"  # the parameter that every stage uses


class StageCall(nn.Module):
    """Calls a stage on a micro-batch, and keeps its losses, memory and routings in `found`.

    The tensors that it returns are sent to the next stage.
    """

    def __init__(self, stage: DecoderStage, run: RunConfig, device: torch.device) -> None:
        super().__init__()
        self.stage, self.run, self.device = stage, run, device
        self.record = False
        self.memories: Sequence[Memory | None] = ()  # memory of each micro-batch before the call
        self.found: dict[int, LanguageOutput] = {}  # by micro-batch

    def begin(self, memories: Sequence[Memory | None], *, record: bool) -> None:
        """Set the memory of each micro-batch, and forget the results of earlier calls."""
        self.memories, self.record, self.found = memories, record, {}

    def forward(
        self,
        *received: Tensor,
        part: Tensor,
        tokens: Tensor,
        targets: Tensor,
        token_mask: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return what the stage sends; part: (1,) number of the micro-batch."""
        number = int(part)
        layers = self.stage.moe_layers() if self.record else []
        with recorded(layers) as routings, autocast(self.run.precision, self.device):
            sent, memory = cast(
                StageOutput,
                self.stage(
                    *received,
                    tokens=tokens,
                    targets=targets,
                    memory=self.memories[number],
                    token_mask=token_mask,
                ),
            )
        dtype = accumulation_dtype(self.stage.like.dtype)  # all processes add up the same
        zero = torch.zeros(1, device=self.device)
        losses = sent if self.stage.last else (zero, zero)
        loss, aux_loss = (one.detach()[0].to(dtype) for one in losses)
        self.found[number] = LanguageOutput(None, loss, aux_loss, memory, tuple(routings))
        return sent


class PipelinedDecoder(nn.Module):
    """The part of a decoder that this process holds, with the names of the whole decoder.

    Every call runs through the stages of all processes, so all must make it. The outputs hold the
    loss and the auxiliary loss on the process of the last stage, and zeros elsewhere; memory and
    routings are those of the blocks of this process, `depths`.
    """

    def __init__(
        self, whole: LanguageModel, run: RunConfig, ranks: Ranks, device: torch.device
    ) -> None:
        super().__init__()
        check_torch()
        log_once("parallel.pipeline: the blocks run on the plain path, without the fast runner")
        set_statistics_group(whole, None)  # for the blocks that other processes train
        self.config, self.run, self.ranks, self.device = whole.config, run, ranks, device
        cuts = cut_blocks(len(whole.blocks), run.parallel.stages)
        stages = {
            number: DecoderStage(whole, cuts[number]) for number in own_stages(ranks, run.parallel)
        }
        # A plain dict: these stages must not be submodules, because the blocks below are, under the
        # names that they have in the whole model.
        self.calls = {number: StageCall(stage, run, device) for number, stage in stages.items()}
        self.depths = [depth for stage in stages.values() for depth in stage.depths]
        self.blocks = nn.ModuleDict({str(depth): whole.blocks[depth] for depth in self.depths})
        self.positions = whole.positions
        for stage in stages.values():
            if stage.first:
                self.embed = whole.embed
            if stage.last:
                self.norm, self.unembed = whole.norm, whole.unembed
        self.schedules: dict[tuple[int, ...], Any] = {}

    def moe_layers(self) -> list[MoE]:
        """Return the MoE layers of this process, first to last."""
        return [layer for call in self.calls.values() for layer in call.stage.moe_layers()]

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        memory: StreamMemory | None = None,
        token_mask: Tensor | None = None,
        return_routings: bool = False,
    ) -> LanguageOutput:
        """Run all stages forward, without gradients, on (B, L) tokens and targets."""
        shape = tokens.shape
        schedule = self._schedule(1, *shape, training=False)
        mask = {} if token_mask is None else {"token_mask": token_mask}
        with torch.no_grad():
            return self._run(schedule, tokens, targets, [memory], return_routings, **mask)[0]

    def update(
        self,
        tokens: Tensor,
        targets: Tensor,
        memories: Sequence[StreamMemory | None],
        *,
        record: bool,
    ) -> list[LanguageOutput]:
        """Add the gradients of a batch (B, L), and return the output of each micro-batch."""
        parts = self.run.split
        shape = tokens.shape[0] // parts, tokens.shape[1]
        schedule = self._schedule(parts, *shape, training=True)
        outputs = self._run(schedule, tokens, targets, memories, record)
        reduce_gradients(*self.own_and_shared(), self.ranks)
        return outputs

    def _run(
        self,
        schedule: Any,
        tokens: Tensor,
        targets: Tensor,
        memories: Sequence[StreamMemory | None],
        record: bool,
        **masks: Tensor,
    ) -> list[LanguageOutput]:
        offset = 0
        for call in self.calls.values():
            after = offset + len(call.stage.blocks)
            call.begin([_of_blocks(one, offset, after) for one in memories], record=record)
            offset = after
        first = (tokens,) if 0 in self.calls else ()
        part = torch.arange(len(memories))
        with plain_errors():
            schedule.step(
                *first,
                target=targets if torch.is_grad_enabled() else None,
                return_outputs=False,
                part=part,
                tokens=tokens,
                targets=targets,
                **masks,
            )
        return [self._joined(number) for number in range(len(memories))]

    def _joined(self, number: int) -> LanguageOutput:
        """Return the output of a micro-batch, joined over the stages of this process."""
        outputs = [call.found.pop(number) for call in self.calls.values()]
        last = outputs[-1]
        hidden = tuple(one for out in outputs for one in out.memory.hidden)
        moments = tuple(
            one
            for out in outputs
            for one in (out.memory.moments or (None,) * len(out.memory.hidden))
        )
        memory = Memory(hidden, last.memory.mask, moments if any(moments) else ())
        routings: list[Routing] = [one for out in outputs for one in out.routings or ()]
        return last._replace(memory=memory, routings=tuple(routings))

    def _schedule(self, parts: int, rows: int, length: int, *, training: bool) -> Any:
        """Return the schedule for micro-batches of (rows, length) tokens; built once for each."""
        key = parts, rows, length, int(training)
        if key not in self.schedules:
            self.schedules[key] = build_schedule(
                {number: self._plan(call, rows, length) for number, call in self.calls.items()},
                num_stages=self.run.parallel.stages,
                micro_batches=parts,
                loss=partial(_loss, parts) if training else None,
                group=pipeline_group(self.ranks),
                device=self.device,
            )
        return self.schedules[key]

    def _plan(self, call: StageCall, rows: int, length: int) -> StagePlan:
        stage = call.stage
        x = stage.hidden_like(rows, length)
        tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
        losses = (torch.empty(1, dtype=x.dtype, device="meta").requires_grad_() for _ in range(2))
        inputs = (tokens,) if stage.first else stage.before.tensors(x)
        return StagePlan(call, inputs, tuple(losses) if stage.last else stage.after.tensors(x))

    def own_and_shared(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters that only these stages have, and those that all stages share."""
        named = dict(self.named_parameters())
        shared = [named.pop(SHARED)] if SHARED in named else []
        return list(named.values()), shared

    def clip_gradients(self, clip: float) -> Tensor:
        """Clip the gradients by their norm over all stages; return () the norm before."""
        return clip_gradients(*self.own_and_shared(), clip, self.ranks)

    def all_loads(self, loads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return (E,) loads of the MoE layers of all stages, zeros for those elsewhere."""
        kinds = self.config.sequence
        own = [depth for depth in self.depths if kinds[depth] == "moe"]
        found = [torch.zeros(self.config.num_experts, device=self.device)] * kinds.count("moe")
        for depth, load in zip(own, loads, strict=True):
            found[kinds[:depth].count("moe")] = load.to(found[0].dtype)
        return tuple(found)

    def whole_model(self) -> nn.Module:
        """Return the model of all stages on the CPU of rank 0, and this part elsewhere."""
        state = gather_stages(whole_state(self), self.ranks)
        if not self.ranks.first:
            return self
        with torch.device("meta"):
            found = build_model(self.config)
        found.load_state_dict({name: value.cpu() for name, value in state.items()}, assign=True)
        return found.eval()  # no optimizer step moves its statistics

    def load_whole(self, state: Mapping[str, Any]) -> None:
        """Load the part of this process from the state_dict of the whole model."""
        names = self.state_dict().keys()
        load_whole_state(self, {name: state[name] for name in names})

    def own_moments(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors without the optimizer's moments of other processes' parameters."""
        own = dict(self.named_parameters())

        def is_other(key: str) -> bool:
            kind, _, name = key.partition("/")
            return kind == "optimizer" and current_name(name.partition("/")[2]) not in own

        return {key: value for key, value in tensors.items() if not is_other(key)}


def _loss(parts: int, sent: tuple[Tensor, ...], target: Tensor) -> Tensor:
    """Return () the loss of a micro-batch, from the output of the last stage, which has it."""
    return (sent[0] + sent[1]).sum() / parts


def _of_blocks(memory: StreamMemory | None, first: int, end: int) -> Memory | None:
    """Return the memory of some of the blocks."""
    if memory is None:
        return None
    moments = memory.moments[first:end]
    return Memory(memory.hidden[first:end], memory.mask, moments if any(moments) else ())
