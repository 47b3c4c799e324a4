"""Training updates of a language model whose blocks lie on the processes of a pipeline."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from acmoe.config.text.train import RunConfig
from acmoe.data.text.corpus import Corpus
from acmoe.distributed.pipeline_gradients import gather_stages
from acmoe.distributed.ranks import ALONE, Ranks
from acmoe.errors import NonFiniteError
from acmoe.evaluate.language_report import Score
from acmoe.train.optim import check_router_sgd, router_matrices
from acmoe.train.text.pipeline import PipelinedDecoder
from acmoe.train.text.trainer import TextTrainer, new_model
from acmoe.train.update import Output, take_step


def text_trainer(
    config: RunConfig, corpus: Corpus, device: torch.device, ranks: Ranks = ALONE
) -> TextTrainer:
    """Return the trainer of a run, for one process or for one process of several."""
    pipelined = config.parallel.pipeline > 1 and ranks.mesh is not None
    return (PipelineTrainer if pipelined else TextTrainer)(config, corpus, device, ranks)


class PipelineTrainer(TextTrainer):
    """Updates of the stages of this process. All processes of the run must make every call.

    `state_tensors` and `whole_model` gather those of all stages, as one process would save them.
    """

    model: PipelinedDecoder  # type: ignore[assignment]  # it serves the calls of a LanguageModel

    def build(
        self, config: RunConfig, device: torch.device, ranks: Ranks
    ) -> tuple[nn.Module, float | None]:
        """Return the stages of this process; its routers may be none, and need no SGD then."""
        whole = new_model(config)
        check_router_sgd(whole, config.router_sgd)
        model = PipelinedDecoder(whole, config, ranks, device)
        return model, config.router_sgd if router_matrices(model) else None

    def run_micro_batches(self, record: bool) -> Sequence[Output]:
        """Run the micro-batches through the stages of all processes."""
        assert self.inputs is not None
        outputs = self.model.update(*self.inputs, self.memories, record=record)
        self.memories = [out.memory for out in outputs]
        return outputs

    def loads(self, outputs: Sequence[Output]) -> tuple[Tensor, ...]:
        """Return the loads of the MoE layers of all stages; zeros for those of other processes."""
        return self.model.all_loads(super().loads(outputs))

    def take_step(self, finite: Tensor) -> Tensor:
        """Update the weights; gradients are clipped by their norm over all stages."""
        if self.config.clip is not None:
            finite = finite & self.model.clip_gradients(self.config.clip).isfinite()
        return take_step(self.model, self.optimizer, clip=None, finite=finite)

    @property
    def depths(self) -> Sequence[int]:
        return self.model.depths

    def whole_model(self) -> nn.Module:
        return self.model.whole_model()

    def load_model(self, state: Mapping[str, Any]) -> None:
        self.model.load_whole(state)

    def state_tensors(self) -> dict[str, Tensor]:
        return gather_stages(super().state_tensors(), self.ranks)

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_state_tensors(self.model.own_moments(tensors))

    def score(self, score_all: Callable[..., Score], *, dealt: bool) -> Score:
        """Return the score on every process; only the last stage can compute it."""
        # Without a mesh it knows its share and communicates nothing.
        own = Ranks(rank=self.ranks.data_rank, size=self.ranks.data_size) if dealt else ALONE
        score, problem = None, None
        try:
            score = score_all(ranks=own)
        except NonFiniteError as error:
            problem = str(error)
        for found in self.ranks.gather(problem):
            if found is not None:
                raise NonFiniteError(found)
        assert score is not None
        total = self.ranks.add(score.loss)[0]  # only the last stage has a loss, others have zeros
        return score._replace(loss=total if dealt else total / self.ranks.data_size)
