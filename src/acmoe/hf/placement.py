"""Choose the routers of a model that become adaptive."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from acmoe.errors import UserError, check
from acmoe.hf.discovery import RouterStack


def adaptive_routers(
    stacks: Sequence[RouterStack], *, skip: int, layers: Sequence[int] | None
) -> list[set[int]]:
    """Return the depths of the adaptive routers of each stack, counted from 0 among its routers.

    Routers that do not choose by their input stay plain, unless `layers` names one: this raises.
    """
    longest = max(len(stack.routers) for stack in stacks)
    wanted = _after(skip, longest) if layers is None else _named(layers, longest)
    found = [_adaptable(stack, wanted, all_must=layers is not None) for stack in stacks]
    if not any(found):
        given = f"skip={skip}" if layers is None else f"layers={[*layers]}"
        remedy = "use skip=1" if layers is None and longest > 1 else "two MoE layers are needed"
        raise UserError(
            f"{given} leaves no adaptive router among {longest} MoE layers, of which the first is "
            f"always plain; {remedy}"
        )
    return found


def _after(skip: int, longest: int) -> set[int]:
    """Return all depths but the first `skip`, and never the first one."""
    check(
        isinstance(skip, int) and not isinstance(skip, bool) and skip >= 0,
        f"skip={skip!r}; it must be a whole number, 0 or more",
    )
    return set(range(max(skip, 1), longest))


def _named(layers: Iterable[int], longest: int) -> set[int]:
    check(
        isinstance(layers, list | tuple | range),
        f"layers={layers!r}; pass a list of MoE depths, such as [1, 2, 3]",
    )
    for depth in layers:
        check(
            isinstance(depth, int) and not isinstance(depth, bool) and 1 <= depth < longest,
            f"layers holds depth {depth!r}; among {longest} MoE layers (counted from 0) an "
            f"adaptive one is at 1 to {longest - 1}",
        )
    return set(layers)


def _adaptable(stack: RouterStack, wanted: set[int], *, all_must: bool) -> set[int]:
    """Return the wanted depths of a stack whose routers choose by their input.

    all_must: raise a UserError for a wanted router that does not.
    """
    depths = {depth for depth in wanted if depth < len(stack.routers)}
    fixed = sorted(depth for depth in depths if not stack.routers[depth].adaptable)
    check(
        not fixed or not all_must,
        f"layers holds depth {fixed and fixed[0]}, whose router does not choose by its input; "
        "leave it out",
    )
    depths -= set(fixed)
    _check_sizes(stack, depths)
    return depths


def _check_sizes(stack: RouterStack, depths: set[int]) -> None:
    """Raise a UserError if an adaptive router and the one before it differ in size."""
    for depth, (before, router) in enumerate(pairwise(stack.routers), 1):
        sizes = [(one.num_experts, one.dim) for one in (before, router)]
        check(
            depth not in depths or sizes[0] == sizes[1],
            f"{before.name} has {sizes[0][0]} experts over {sizes[0][1]} features and "
            f"{router.name} {sizes[1][0]} over {sizes[1][1]}; name layers=[...] whose sizes equal "
            "those of the MoE layer before",
        )
