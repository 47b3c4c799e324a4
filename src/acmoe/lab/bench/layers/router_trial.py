"""The layers of `acmoe bench router`: their statistics modes, inputs and states, and their check.

T tokens, D features, C clusters.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.config.routing import AdaptiveConfig, RouterConfig, SMoEConfig
from acmoe.errors import check
from acmoe.experts.moe import MoE
from acmoe.lab.bench.harness.options import ShapesConfig
from acmoe.lab.bench.implementations.check import TOLERANCE, compare, reference
from acmoe.lab.bench.implementations.ours import plain_state
from acmoe.lab.bench.implementations.weights import (
    Weights,
    draw_inputs,
    draw_tokens,
    draw_weights,
)
from acmoe.lab.bench.shapes import Shape
from acmoe.ops.route.rescaled import rows_of
from acmoe.ops.sort import sort_rows
from acmoe.ops.sort.order import no_order, worth_sorting
from acmoe.ops.statistics.prefix import PrefixMoments, Prior
from acmoe.ops.statistics.prefix.op import measure_prefix_scale
from acmoe.ops.statistics.scale import cluster_scale
from acmoe.routing.origin import new_origin, origin_codes
from acmoe.routing.state import RoutingState
from acmoe.routing.statistics.average import scale_options
from acmoe.routing.token_scale import own_rows

AnyLayer = Callable[..., tuple[Tensor, RoutingState]]

PLAIN = "plain"
# Router configs by the name of the row. In training, every mode measures the statistics of all
# tokens, to update its running averages.
MODES: dict[str, RouterConfig] = {
    PLAIN: SMoEConfig(),
    "batch": AdaptiveConfig(statistics="batch"),
    "running": AdaptiveConfig(statistics="running"),
    "current": AdaptiveConfig(statistics="batch", statistics_of="current"),
    "prefix": AdaptiveConfig(statistics="prefix"),
    "sequence": AdaptiveConfig(statistics="sequence"),
}
IN_SEQUENCES = ("prefix", "sequence")  # modes that measure each sequence by itself
# Modes that decode. The others are not causal.
INFERENCE = (PLAIN, "running", "prefix")


class Trial(NamedTuple):
    """Weights, tokens, and the routing state that a previous layer would have passed on."""

    shape: Shape
    weights: Weights
    x: Tensor  # (T, D), or (B, L, D) in sequences
    cotangent: Tensor  # shaped as x
    state: RoutingState

    def in_sequences(self, length: int) -> "Trial":
        """Return the trial with the tokens in sequences of this length, or in one if they are few.

        Raises a UserError if the tokens do not fill the last sequence.
        """
        tokens, dim = self.x.shape
        length = min(length, tokens)
        check(
            tokens % length == 0,
            f"{tokens} tokens are no sequences of length={length}; give a divisor of {tokens}",
        )
        x_BLD = self.x.detach().view(-1, length, dim).requires_grad_(self.x.requires_grad)
        return self._replace(x=x_BLD, cotangent=self.cotangent.view(x_BLD.shape))


def draw_trial(shape: Shape, config: ShapesConfig, device: torch.device) -> Trial:
    generator = torch.Generator(device).manual_seed(config.seed)
    dtype = config.torch_dtype(device)
    weights = draw_weights(shape, generator=generator, dtype=dtype)
    x_TD = draw_inputs(shape, weights, generator=generator, dtype=dtype).requires_grad_()
    cotangent_TD = draw_tokens(shape, generator=generator, dtype=dtype)
    C, size = shape.num_experts, (shape.tokens, 1)
    assignment_TJ = torch.randint(C, size, generator=generator, device=device)
    scale_CD = torch.rand(C, shape.dim, generator=generator, device=device) + 0.5
    order = no_order(x_TD)
    if worth_sorting(shape.tokens, C):
        order = sort_rows(assignment_TJ, C, cluster=assignment_TJ[:, 0]).order
    state = RoutingState(
        assignment_TJ,
        torch.ones(size, device=device),
        scale_CD / scale_CD.mean(-1, keepdim=True),
        torch.zeros((), device=device),
        order,
    )
    return Trial(shape, weights, x_TD, cotangent_TD, state)


def as_timed(mode: str, trial: Trial) -> Trial:
    """Return the trial with the state that the layer before passes on to one of this mode.

    Between plain layers it is `plain_state`; an adaptive one gets a scale `with_equal_choices`.
    """
    if mode == PLAIN:
        return trial._replace(state=plain_state(trial.shape, trial.x.device))
    trial, config = with_equal_choices(trial), MODES[mode]
    assert isinstance(config, AdaptiveConfig)
    origin = new_origin(origin_codes(config), trial.state.origin)
    return trial._replace(state=trial.state._replace(origin=origin))


def with_equal_choices(trial: Trial) -> Trial:
    """Return the trial with one factor a cluster as scale: the plain router's experts are chosen.

    A factor multiplies all affinities of a token, so that both layers have the same rows in the
    same tiles, and the difference of their times is the router's. Other choices are other tiles,
    for which the experts' kernels may take more or less time. The router with statistics of the
    current layer measures a scale of its own, and chooses others.
    """
    scale_CD = trial.state.scale
    factor_CD = scale_CD[:, :1].expand_as(scale_CD).contiguous()
    return trial._replace(state=trial.state._replace(scale=factor_CD))


def check_mode(
    layer: AnyLayer,
    mode: str,
    trial: Trial,
    *,
    forward: bool = False,
    prior: Prior | None = None,
) -> None:
    """Raise WrongResultError unless output and gradient are those of the reference.

    forward: check the output alone, of a call without gradients. prior: the running averages that
    the layer shrinks prefix statistics towards, if it has any yet.
    """
    with torch.set_grad_enabled(not forward):
        y, _ = layer(trial.x, trial.state)
    grad = None if forward else torch.autograd.grad(y, trial.x, trial.cotangent)[0].flatten(0, -2)
    wanted = reference(
        *(trial.x.flatten(0, -2), trial.cotangent.flatten(0, -2), trial.weights, trial.shape),
        scale_TD=_scale_of(mode, trial, prior),
        forward=forward,
    )
    compare(y.flatten(0, -2), grad, wanted).require(TOLERANCE[trial.x.dtype])


def prior_of(moe: MoE) -> Prior | None:
    """Return the running averages of a router with statistics of its own tokens, if it has any."""
    statistics = getattr(moe.router, "statistics", None)
    return None if statistics is None else statistics.prior


def _scale_of(mode: str, trial: Trial, prior: Prior | None) -> Tensor | None:
    """Return the scale by which the router of this mode multiplies its tokens, (T, D)."""
    if mode == PLAIN:
        return None
    own_T, C = trial.state.assignment[:, 0], trial.shape.num_experts
    x = trial.x.detach().double()
    if mode == "current":
        return cluster_scale(x, own_T, C)[own_T]
    if mode == "sequence":
        own_BL = own_T.view(x.shape[:-1])
        return rows_of(*own_rows(cluster_scale(x, own_BL, C), trial.state, x))
    if mode == "prefix":
        config = MODES[mode]
        assert isinstance(config, AdaptiveConfig)
        D = x.shape[-1]
        unknown = Prior(x.new_zeros(C, D), x.new_zeros(C), config.prior_tokens)
        before = PrefixMoments.empty(x.shape[0], C, D, device=x.device, dtype=x.dtype)
        scale_BLJD, _ = measure_prefix_scale.definition(
            *(x, own_T.view(*x.shape[:-1], 1), before, prior or unknown, scale_options(config)),
            measure=config.measure,
        )
        return scale_BLJD.flatten(0, -2)
    return trial.state.scale[own_T]
