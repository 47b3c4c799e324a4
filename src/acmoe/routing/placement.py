"""Which MoE layers of a network are adaptive: a function from depth to router."""

from collections.abc import Sequence
from typing import NamedTuple

from acmoe.config.routing import AdaptiveConfig, RandomConfig, RouterConfig, router_config
from acmoe.errors import UserError, check

PLACEMENTS = ("full", "skip-1", "skip-2", "alternating", "back-half")


class Placed(NamedTuple):
    """One MoE layer's router, and the router of the next layer that reads its statistics."""

    router: RouterConfig
    emit: AdaptiveConfig | RandomConfig | None


def adaptive_depths(placement: str | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Depths (from 0) of the adaptive layers among `num_layers` MoE layers.

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
                f"adaptive one stands at 1 to {num_layers - 1}",
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


def place(
    router: str | RouterConfig, placement: str | Sequence[int], num_layers: int
) -> list[Placed]:
    """The router of every MoE layer, from the first to the last.

    A rescaling router (adaptive, random) stands where `placement` says, its base router elsewhere,
    and the layer before each emits what it reads. Any other router stands everywhere.
    """
    config = router_config(router)
    depths = adaptive_depths(placement, num_layers)
    if not isinstance(config, AdaptiveConfig | RandomConfig):
        return [Placed(config, None)] * num_layers
    return [
        Placed(
            config if depth in depths else config.base,
            config if depth + 1 in depths else None,
        )
        for depth in range(num_layers)
    ]
