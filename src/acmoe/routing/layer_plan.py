"""The layer plan of a network: the router of each of its MoE layers."""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

from acmoe.config.routing import (
    AdaptiveConfig,
    RandomConfig,
    RouterConfig,
    base_router,
    router_config,
)
from acmoe.errors import UserError, check

PLACEMENTS = ("full", "skip-1", "skip-2", "alternating", "back-half")


class LayerPlan(NamedTuple):
    """One MoE layer's router, and the router of the next layer, if that one rescales."""

    router: RouterConfig
    next_router: AdaptiveConfig | RandomConfig | None


def adaptive_depths(placement: str | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the depths (from 0) of the adaptive layers among `num_layers` MoE layers.

    The first MoE layer is never adaptive: no layer before it has formed clusters.

    >>> adaptive_depths("skip-1", 6), adaptive_depths("back-half", 9)
    ((2, 3, 4, 5), (4, 5, 6, 7, 8))
    """
    check(num_layers >= 1, f"num_layers={num_layers}; it must be at least 1")
    if not isinstance(placement, str):
        for depth in placement:
            check(
                isinstance(depth, int) and 1 <= depth < num_layers,
                f"placement holds depth {depth}; among {num_layers} MoE layers (counted from 0) an "
                f"adaptive one is at 1 to {num_layers - 1}",
            )
        return tuple(sorted(set(placement)))
    starts = {"full": 1, "skip-1": 2, "skip-2": 3, "back-half": num_layers // 2}
    if placement == "alternating":
        return tuple(range(1, num_layers, 2))
    if placement not in starts:
        raise UserError(
            f"placement={placement!r} is unknown; choose one of {', '.join(PLACEMENTS)} or a list "
            "of depths"
        )
    return tuple(range(max(1, starts[placement]), num_layers))


def plan_layers(
    router: str | RouterConfig,
    placement: str | Sequence[int],
    num_layers: int,
    *,
    plain: str | RouterConfig | None = None,
) -> list[LayerPlan]:
    """Return the plan of every MoE layer, from the first to the last.

    The layers at `placement` have the rescaling router (adaptive or random), the others its base
    router; the layer before a rescaling one computes the statistics for it. Any other router is
    the same in all layers. A named placement must leave a rescaling layer; the empty list is
    allowed.

    plain: the router of the layers outside `placement`, in place of the base router; `router` may
    then be any. The published models have SMoEConfig(bias=True) there.
    """
    config = router_config(router)
    depths = adaptive_depths(placement, num_layers)
    if plain is not None:
        outside = router_config(plain)
        check(
            not isinstance(outside, AdaptiveConfig | RandomConfig),
            f"plain={outside.name!r} rescales its input, which needs the clusters of a layer "
            "before; choose a router without a scale, such as 'smoe'",
        )
    else:
        outside = base_router(config)
    if not isinstance(config, AdaptiveConfig | RandomConfig):
        return [
            LayerPlan(config if depth in depths else outside, None) for depth in range(num_layers)
        ]
    check(
        bool(depths) or not isinstance(placement, str),
        f"placement={placement!r} among num_layers={num_layers} MoE layers leaves none for "
        f"router={config.name!r}; use {_remedy(num_layers)}, or router={config.base.name!r}",
    )
    return [
        LayerPlan(
            config if depth in depths else outside,
            config if depth + 1 in depths else None,
        )
        for depth in range(num_layers)
    ]


def _remedy(num_layers: int) -> str:
    return "placement='full'" if num_layers > 1 else "two MoE layers or more"


def place(
    router: str | RouterConfig, placement: str | Sequence[int], num_layers: int
) -> list[LayerPlan]:
    """Call `plan_layers`, whose old name this is."""
    warnings.warn(
        "acmoe.place is now called acmoe.plan_layers; the old name goes with version 0.3",
        FutureWarning,
        stacklevel=2,
    )
    return plan_layers(router, placement, num_layers)
