"""The layers of `acmoe bench router`: their statistics modes, inputs and states, and their check.

T tokens, D features, C clusters.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from acmoe.config.routing import AdaptiveConfig, RouterConfig, SMoEConfig
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
from acmoe.ops.sort import sort_rows
from acmoe.ops.sort.order import no_order, worth_sorting
from acmoe.ops.statistics.scale import cluster_scale
from acmoe.routing.origin import new_origin, origin_codes
from acmoe.routing.state import RoutingState

AnyLayer = Callable[..., tuple[Tensor, RoutingState]]

PLAIN = "plain"
# Router configs by the name of the row. In training, `running` measures statistics as well, to
# update its running averages.
MODES: dict[str, RouterConfig] = {
    PLAIN: SMoEConfig(),
    "batch": AdaptiveConfig(statistics="batch"),
    "running": AdaptiveConfig(statistics="running"),
    "current": AdaptiveConfig(statistics="batch", statistics_of="current"),
}
INFERENCE = (PLAIN, "running")  # the others are not causal, so they cannot be used for decoding


class Trial(NamedTuple):
    """Weights, tokens, and the routing state that a previous layer would have passed on."""

    shape: Shape
    weights: Weights
    x: Tensor  # (T, D)
    cotangent: Tensor  # (T, D)
    state: RoutingState


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


def check_mode(layer: AnyLayer, mode: str, trial: Trial, *, forward: bool = False) -> None:
    """Raise WrongResultError unless output and gradient are those of the reference.

    forward: check the output alone, of a call without gradients.
    """
    with torch.set_grad_enabled(not forward):
        y_TD, _ = layer(trial.x, trial.state)
    grad_TD = None if forward else torch.autograd.grad(y_TD, trial.x, trial.cotangent)[0]
    wanted = reference(
        *(trial.x, trial.cotangent, trial.weights, trial.shape),
        scale_TD=_scale_of(mode, trial),
        forward=forward,
    )
    compare(y_TD, grad_TD, wanted).require(TOLERANCE[trial.x.dtype])


def _scale_of(mode: str, trial: Trial) -> Tensor | None:
    """Return the scale by which the router of this mode multiplies its tokens, (T, D)."""
    if mode == PLAIN:
        return None
    own_T = trial.state.assignment[:, 0]
    if mode == "current":
        return cluster_scale(trial.x.detach().double(), own_T, trial.shape.num_experts)[own_T]
    return trial.state.scale[own_T]
