"""Routers to compare the adaptive one with, one per file. Most can also be its base."""

from acmoe.routing.baselines.cosine import CosineRouter
from acmoe.routing.baselines.expert_choice import ExpertChoiceRouter
from acmoe.routing.baselines.hashing import HashRouter
from acmoe.routing.baselines.random_scale import RandomRouter
from acmoe.routing.baselines.stable import StableRouter
from acmoe.routing.baselines.threshold import ThresholdRouter

__all__ = [
    "CosineRouter",
    "ExpertChoiceRouter",
    "HashRouter",
    "RandomRouter",
    "StableRouter",
    "ThresholdRouter",
]
