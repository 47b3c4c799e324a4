"""One or two MoE layers of this library in a residual stream, and a linear readout.

T tokens, D features, C clusters (as many as experts), O outputs.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from acmoe.config.routing import LossConfig
from acmoe.experts.moe import MoE
from acmoe.lab.study.synthetic.task import SyntheticConfig, SyntheticTask
from acmoe.ops.statistics.scale import scale_from_dispersion
from acmoe.routing.layer_plan import LayerPlan, plan_layers
from acmoe.routing.rescaling import RescalingRouter
from acmoe.routing.router import Router
from acmoe.routing.state import RoutingState, clusters_of


class Pass(NamedTuple):
    """The result of a forward pass, with the inputs of each layer."""

    prediction: Tensor  # (T, O)
    aux_loss: Tensor  # ()
    inputs: tuple[Tensor, ...]  # (T, D) for each layer
    states: tuple[RoutingState, ...]  # for each layer


class SyntheticModel(nn.Module):
    """h + MoE(h), once or twice. Only the last layer's router rescales its tokens.

    A single layer has no previous layer that forms clusters, so its router makes two passes. The
    first, by its base router with M = I, assigns each token to a cluster; the second routes with M.
    Both passes use the same embeddings, so this is one step of the alternation between assignment
    and weights that minimises the paper's clustering criterion.
    """

    between: Tensor  # (D, D)
    true_scale: Tensor  # (C, D)

    def __init__(self, config: SyntheticConfig, task: SyntheticTask) -> None:
        super().__init__()
        self.oracle = config.oracle
        dim, experts = config.clusters.dim, config.clusters.num_clusters
        plans = [LayerPlan(config.router, None)]
        if config.layers > 1:
            plans = plan_layers(config.router, "full", config.layers)
        self.layers = nn.ModuleList(
            MoE(
                dim=dim,
                hidden=config.hidden,
                num_experts=experts,
                top_k=config.top_k,
                router=one.router,
                next_router=one.next_router,
                losses=LossConfig(balance=config.balance),
            )
            for one in plans
        )
        self.norms = nn.ModuleList(
            nn.LayerNorm(dim) if config.norm else nn.Identity() for _ in plans
        )
        self.readout = nn.Linear(dim, config.outputs)
        self.register_buffer("between", task.between_DD.float())
        many_C = torch.full((experts,), float(config.batch))
        true_CD = scale_from_dispersion(task.stds(config.layers - 1), many_C)
        self.register_buffer("true_scale", true_CD.float())

    def forward(self, x_TD: Tensor, cluster_T: Tensor) -> Pass:
        """Predict (T, O) outputs; only an oracle uses the true clusters `cluster_T`."""
        first = self.moe(0)
        state = RoutingState.identity(
            num_tokens=len(x_TD), num_clusters=first.num_experts, dim=first.dim, device=x_TD.device
        )
        inputs, states = [], []
        for depth, norm in enumerate(self.norms):
            if depth == 1:
                x_TD = x_TD @ self.between.mT
            h_TD = norm(x_TD)
            if len(self.layers) == 1:
                state = assign_by_base(self.moe(0).router, h_TD, state)
            if depth == len(self.layers) - 1:
                state = self.with_oracle(state, cluster_T)
            inputs.append(h_TD)
            states.append(state)
            y_TD, state = self.moe(depth)(h_TD, state)
            x_TD = x_TD + y_TD
        return Pass(self.readout(x_TD), state.aux_loss, tuple(inputs), tuple(states))

    def moe(self, depth: int) -> MoE:
        """Return the MoE layer at that depth."""
        layer = self.layers[depth]
        assert isinstance(layer, MoE)
        return layer

    def with_oracle(self, state: RoutingState, cluster_T: Tensor) -> RoutingState:
        """Replace measured scales, and with `cluster` also assignments, by the true ones."""
        if self.oracle == "none":
            return state
        if self.oracle == "cluster":
            own_TJ = cluster_T[:, None].to(state.assignment)
            return state._replace(assignment=own_TJ, scale=self.true_scale)
        num_clusters = len(self.true_scale)
        pair_T = state.assignment[:, 0] * num_clusters + cluster_T
        table_CC = torch.bincount(pair_T, minlength=num_clusters**2).view(num_clusters, -1)
        return state._replace(scale=self.true_scale[table_CC.argmax(-1)])


def assign_by_base(router: Router, x_TD: Tensor, state: RoutingState) -> RoutingState:
    """Assign tokens to clusters by the base of a rescaling router; other routers need none."""
    if not isinstance(router, RescalingRouter):
        return state
    with torch.no_grad():
        affinity_TE = router.base(x_TD, state).affinity
    assignment_TJ, membership_TJ = clusters_of(affinity_TE, router.mix)
    return state._replace(assignment=assignment_TJ, membership=membership_TJ)
