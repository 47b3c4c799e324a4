"""A router of your own, compared with the plain one over paired seeds.

    python examples/own_study.py --seeds 0 1 2
    python examples/own_study.py --summarise

The options are those of `acmoe study`; a run takes half a minute on two CPU cores. `--list` shows
the runs, `--steps 20` makes them short. The results go to runs/study/tempered.jsonl, the tables to
runs/study/tempered.md.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import acmoe
from acmoe.cli import main
from acmoe.lab.study.cell import Cell
from acmoe.lab.study.grids.grid import Conditions
from acmoe.lab.study.grids.nano import nano_text_cells
from acmoe.lab.study.materials import Materials
from acmoe.lab.study.metrics import BITS
from acmoe.lab.study.registry import STUDIES
from acmoe.lab.study.size import Size
from acmoe.lab.study.study import ROUTER_METRICS, Study
from acmoe.routing.build import new_router
from acmoe.routing.losses import common_losses
from acmoe.routing.router import flat, flat_mask
from acmoe.routing.topk import init_embeddings, select


@dataclass(frozen=True, kw_only=True)
class TemperedConfig(acmoe.CustomConfig):
    name: ClassVar[str] = "tempered"
    start: float = 1.0  # initial value of each expert's factor


class TemperedRouter(acmoe.Router):
    """The plain router with a learned factor on each expert's affinity."""

    def __init__(self, config: TemperedConfig, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.config = config
        self.embedding = nn.Parameter(torch.empty(self.num_experts, self.dim))
        self.factor = nn.Parameter(torch.full((self.num_experts,), config.start))
        init_embeddings(self.embedding, "uniform")

    def decide(
        self, x: Tensor, *, token_mask: Tensor | None = None, token_ids: Tensor | None = None
    ) -> acmoe.Routing:
        affinity = flat(x) @ self.embedding.to(x.dtype).T * self.factor.to(x.dtype)
        expert_ids, gate = select(affinity, self.top_k, "auto")
        # The balance loss of the model's config: without it the comparison would not be fair.
        mask = flat_mask(token_mask)
        loss = common_losses(self.losses, affinity, expert_ids, mask, group=self.loss_group)
        return acmoe.Routing(expert_ids, gate, affinity, loss)


new_router.register(TemperedConfig, TemperedRouter)


def grid(materials: Materials, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """Return the runs: a small language model on text that comes with Python, with each router."""
    routers: Conditions = {
        "smoe": "smoe",
        "tempered": TemperedConfig(),
        "adaptive-tempered": acmoe.AdaptiveConfig(base=TemperedConfig(), statistics="batch"),
    }
    return nano_text_cells("tempered", routers, materials, size, seeds)


# The comparisons are written down before anything runs.
STUDIES["tempered"] = Study(
    name="tempered",
    question="Does a learned factor for each expert help, and does M help beside it?",
    grid=grid,
    reads_data=False,
    seeds=5,
    comparisons=(("tempered", "smoe"), ("adaptive-tempered", "tempered")),
    compared=BITS[:3],
    descriptive=ROUTER_METRICS,
    curve_label="validation bits per byte",
)

if __name__ == "__main__":  # workers of the study import this file again
    main(["study", "tempered", *sys.argv[1:]])
