"""The origin of a routing state: what the layer before computed, and for which router.

`RoutingState.origin` is an empty int8 tensor whose shape is (0, *codes). Codes are

    ()                            nothing came before, or the state was made by hand
    (NOTHING,)                    no clusters: the layer before was built with next_router=None
    (CLUSTERS, detach)            clusters and ones, for a router that reads no scale
    (CLUSTERS, detach, 1)         the same, with zeros for clusters after the last chosen one
    (SCALES, detach, *scale_codes)   clusters and their scales (config/scale_codes.py)

A shape survives clone, .to(device), pytree, checkpointing, compilation and a send to another
pipeline stage, and the host reads it without waiting for a device.
"""

from dataclasses import MISSING, fields

import torch
from torch import Tensor

from acmoe.config.routing import AdaptiveConfig, RandomConfig
from acmoe.config.scale_codes import CLUSTERS, CODED, NOTHING, SCALES, other_options
from acmoe.errors import UserError
from acmoe.ops.empty import no_elements

NextRouter = AdaptiveConfig | RandomConfig


def new_origin(codes: tuple[int, ...], like: Tensor) -> Tensor:
    """Return the empty int8 tensor of shape (0, *codes) on the device of `like`."""
    return no_elements((0, *codes), torch.int8, like)


def origin_shape(next_router: NextRouter | None) -> tuple[int, ...]:
    """Return the shape of the origin of a state made for the router of that config."""
    return (0, NOTHING) if next_router is None else next_router.origin_shape


def holds_nothing(origin: Tensor) -> bool:
    """Return True if the state is the identity, from a layer that no adaptive layer follows."""
    return tuple(origin.shape[1:]) == (NOTHING,)


def origin_codes(next_router: NextRouter | None) -> tuple[int, ...]:
    """Return the codes of a state made for the router of that config."""
    return origin_shape(next_router)[1:]


def changed_origin(origin: Tensor, *, assignment: bool, scale: bool) -> Tensor:
    """Return the origin of a state after its assignment or scale was replaced.

    A state without clusters becomes one with clusters if it gets an assignment. A state with a new
    scale of its clusters counts as made by hand: it is not checked.
    """
    codes = tuple(origin.shape[1:])
    if assignment and codes == (NOTHING,):
        codes = (CLUSTERS, 1)
    if scale and codes != (NOTHING,):
        codes = ()
    return new_origin(codes, origin)


def check_origin(origin: Tensor, reader: NextRouter) -> None:
    """Raise a UserError if the router of that config cannot use a state of this origin."""
    codes, wanted = tuple(origin.shape[1:]), origin_codes(reader)
    if codes in ((), wanted):
        return
    problem = _problem(codes, wanted, reader)
    if problem is not None:
        raise UserError(
            f"{problem}; build the layer before with next_router={describe(reader)}, or let "
            "acmoe.MoEStack or acmoe.plan_layers plan the layers"
        )


def _problem(codes: tuple[int, ...], wanted: tuple[int, ...], reader: NextRouter) -> str | None:
    """Return why a state with these codes does not fit the reader, or None if it does."""
    if codes[0] == NOTHING:
        return (
            f"router={reader.name!r} got a state without clusters, from a layer with "
            "next_router=None"
        )
    if wanted[0] == SCALES and codes[0] == CLUSTERS:
        return (
            "statistics_of='previous' got a state without scales, from a layer whose next_router "
            "takes none of the previous layer"
        )
    if wanted[0] == CLUSTERS:
        if reader.mix == 1 or codes[1] == wanted[1]:
            return None
        return f"detach={not codes[1]} here, and the layer before handed on detach={bool(codes[1])}"
    assert isinstance(reader, AdaptiveConfig)
    given, own = _in_words(codes), _in_words(wanted)
    different = [name for name in own if given.get(name) != own[name]]
    if not different:
        rest = ", ".join(other_options(reader)) or "strength, floor, eps, clamp or the like"
        return f"the layer before measured scales with other options than this router ({rest})"
    theirs = ", ".join(f"{name}={given.get(name)!r}" for name in different)
    ours = ", ".join(f"{name}={own[name]!r}" for name in different)
    return f"the layer before measured scales with {theirs}, this router reads {ours}"


def _in_words(codes: tuple[int, ...]) -> dict[str, object]:
    """Return the fields that the codes of a state with scales name one by one."""
    found: dict[str, object] = {"detach": bool(codes[1])}
    for (name, choices), code in zip(CODED.items(), codes[2:-1], strict=True):
        found[name] = choices[code]
    return found


def describe(config: NextRouter) -> str:
    """Return the config as one writes it: its class and the fields that are not the default."""
    changed = [
        f"{one.name}={value!r}"
        for one in fields(config)
        if (value := getattr(config, one.name)) != one.default or one.default is MISSING
    ]
    return f"{type(config).__name__}({', '.join(changed)})"
