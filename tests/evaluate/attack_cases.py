"""A short attack on the images of LABELS."""

from dataclasses import replace
from pathlib import Path

from torch import nn

from acmoe.config.images.attack import PGDConfig, attack_config
from acmoe.evaluate.images.attack import AttackReport, evaluate_attack
from vision_cases import PLAIN, random_images

SWEEP = replace(attack_config("pgd", eps=(0.02, 0.1)), attack=PGDConfig(steps=2), batch=8)
LABELS = [n % 10 for n in range(30)]


def sweep(model: nn.Module, folder: Path | None) -> AttackReport:
    return evaluate_attack(model, random_images(LABELS), PLAIN, SWEEP, folder=folder)
