"""Checks that the configs of all models share."""

from numbers import Real

from acmoe.config.routing import RouterConfig
from acmoe.errors import check


def check_counts(config: object, *names: str) -> None:
    """Check that the fields of those names are integers of at least 1."""
    for name in names:
        value = getattr(config, name)
        check(
            isinstance(value, int) and value >= 1,
            f"{name}={value!r}; it must be an integer of at least 1",
        )


def check_shares(config: object, *names: str) -> None:
    """Check that the fields of those names lie in [0, 1)."""
    for name in names:
        value = getattr(config, name)
        check(0 <= value < 1, f"{name}={value}; it must lie in [0, 1)")


def check_capacity(factor: object, name: str = "capacity_factor") -> None:
    """Check that an expert's capacity is a positive number, or None; numpy's numbers are some."""
    number = isinstance(factor, Real) and not isinstance(factor, bool)
    check(
        factor is None or (number and factor > 0),  # type: ignore[operator]
        f"{name}={factor!r}; it must be a positive number, or None for dropless",
    )


def check_router_type(router: object) -> None:
    """Check that the router is given as a config, not by its name."""
    check(
        isinstance(router, RouterConfig),
        f"router={router!r} is no router config; pass acmoe.SMoEConfig(...) or another, or its name"
        " to acmoe.create_model",
    )


def check_heads(dim: int, heads: int) -> None:
    """Check that every head has the same number of features."""
    check(dim % heads == 0, f"dim={dim} does not split over heads={heads}; make it a multiple")


def check_top_k(top_k: int, num_experts: int) -> None:
    """Check that a token is not sent to more experts than there are."""
    check(
        top_k <= num_experts,
        f"top_k={top_k} exceeds num_experts={num_experts}; lower top_k",
    )
