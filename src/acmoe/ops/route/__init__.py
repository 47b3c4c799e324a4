"""Token-to-expert routing: affinity, top-k and gate."""

from acmoe.ops.route import op as _kernels  # noqa: F401, registers them
from acmoe.ops.route.reference import Route, route
from acmoe.ops.route.tokens import ScaledTokens

__all__ = ["Route", "ScaledTokens", "route"]
