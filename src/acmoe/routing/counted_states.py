"""Count the training calls of adaptive layers that got no state from a layer before.

`y, _ = moe(x)` in every block raises no error, but each layer then counts as the first one, and
routes as its base router. A warning says so after PATIENCE calls without a single state.

Compiled code does not run the counter: torch.compile counts a call once, when it traces the call.
After that, every step of an optimizer that trains adaptive layers counts as one more call of each
traced layer.
"""

import logging

from acmoe.ops.dispatch import log_once
from acmoe.ops.statistics.over_ranks import world_size

PATIENCE = 100  # training calls without a state before the warning
_FIRST_STAGE = "; all is well if it is the only one in the first stage of a pipeline"


class Calls:
    """The training calls of adaptive layers in this process."""

    without = 0  # calls that got no state, before the first that got one
    traced = 0  # the number of these calls that torch.compile has traced
    passed = False  # True: a call got a state


def count_call(passed: bool, traced: bool) -> None:
    """Count a call. passed: the call got a state; traced: torch.compile traces the call."""
    if not Calls.passed:
        Calls.passed = passed
        Calls.traced += traced and not passed
        _add(not passed)


# With this mark torch.compile counts once, while it traces, and leaves the call out of the graph.
# torch.compiler.assume_constant_result sets the same mark, but takes a second to import Dynamo.
count_call._dynamo_marked_constant = True  # type: ignore[attr-defined]


def count_step() -> None:
    """Count the compiled calls before an optimizer step."""
    if Calls.traced and not Calls.passed:
        _add(Calls.traced)


def _add(calls: int) -> None:
    Calls.without += calls
    if Calls.without >= PATIENCE:
        log_once(
            f"{PATIENCE} training calls of adaptive layers, and none got the state of a layer "
            "before it, so that all of them route as the plain router: pass it on, "
            "y, state = moe(x, state), or let acmoe.MoEStack do so (a single MoE layer has no "
            f"layer before it, and needs no adaptive router{_FIRST_STAGE * (world_size() > 1)})",
            logging.WARNING,
        )
