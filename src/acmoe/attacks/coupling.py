"""Find what makes the images of a batch influence each other in evaluation."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from acmoe.config.images.attack import AnyAttack, AutoAttackConfig
from acmoe.config.routing import AdaptiveConfig
from acmoe.errors import check
from acmoe.experts.moe import MoE
from acmoe.routing.baselines import ExpertChoiceRouter


def coupled_by(model: nn.Module) -> dict[str, str]:
    """Return what couples the images of a batch in evaluation mode, and the remedy for each.

    An empty result means that the logits of an image do not depend on the other images, except for
    the rounding of sums. Modules of other libraries are assumed not to couple images, but for a
    batch normalisation without running averages.
    """
    found: dict[str, str] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(module, MoE) and module.capacity_factor is not None:
            found[f"an expert capacity of {module.capacity_factor:g}"] = "capacity=none"
        if isinstance(config, AdaptiveConfig) and config.modes.evaluation == "batch":
            found["batch statistics"] = "statistics=running"
        if isinstance(module, ExpertChoiceRouter):
            found["experts that choose among all tokens of the batch"] = "another router"
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            found["a batch normalisation without running averages"] = "track_running_stats"
    return found


def check_independent(model: nn.Module, attack: AnyAttack) -> None:
    """Refuse AutoAttack on a model whose images influence each other, unless it is allowed."""
    if not isinstance(attack, AutoAttackConfig) or attack.allow_coupled:
        return
    found = coupled_by(model)
    check(
        not found,
        f"autoattack assumes that images do not influence each other; {' and '.join(found)} couple "
        f"them, and it would look weaker than it is: use {' and '.join(found.values())}, or "
        "allow_coupled",
    )
