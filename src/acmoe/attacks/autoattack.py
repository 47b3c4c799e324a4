"""AutoAttack, run by its own package."""

import importlib
from typing import Any

from torch import Tensor

from acmoe.attacks.ball import Ball
from acmoe.attacks.coupling import check_independent
from acmoe.attacks.target import Target
from acmoe.config.images.attack import AutoAttackConfig
from acmoe.errors import UserError

SOURCE = "git+https://github.com/fra31/auto-attack"


def autoattack(
    target: Target, ball: Ball, labels: Tensor, config: AutoAttackConfig, *, seed: int
) -> Tensor:
    """Run the ensemble of the `autoattack` package on one batch, in the maximum norm.

    The package removes images from the batch once they are misclassified. Where the images of a
    batch influence each other, it would therefore attack other batches than the one that is scored;
    such a model is refused unless `config.allow_coupled`.
    """
    check_independent(target.model, config)
    adversary = _package().AutoAttack(
        target,
        norm="Linf",
        eps=ball.eps,
        version=config.version,
        seed=seed % (1 << 32),
        device=ball.x.device,
        verbose=False,
    )
    found = adversary.run_standard_evaluation(ball.x, labels, bs=len(ball.x))
    return ball.project(found.detach())


def _package() -> Any:
    try:
        return importlib.import_module("autoattack")
    except ImportError as error:
        raise UserError(
            f"attack=autoattack needs the autoattack package: pip install {SOURCE}"
        ) from error
