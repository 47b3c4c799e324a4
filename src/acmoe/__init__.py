"""Adaptive Clustering Mixture-of-Experts: route each token in the space where its cluster is tight.

>>> import torch, acmoe
>>> moe = acmoe.MoE(dim=8, hidden=16, num_experts=4, top_k=2, router="adaptive")
>>> y, state = moe(torch.randn(5, 8))

MoE, MoEFFN, MoEStack, SoftMoE      layers, and containers that pass the routing state along
build_router, AdaptiveConfig, ...   routers alone, and their options
create_model, load, save            the paper's models
attach, calibrate, detach           adaptive routers in models of transformers (needs acmoe[hf])
dispersion, cluster_scale           the equations of the paper as functions
"""

import importlib
from typing import TYPE_CHECKING, Any

from acmoe import starting as _starting  # noqa: F401, before the imports that take seconds
from acmoe.config.routing import (
    AdaptiveConfig,
    CosineConfig,
    CustomConfig,
    ExpertChoiceConfig,
    HashConfig,
    LossConfig,
    MetricConfig,
    RandomConfig,
    SMoEConfig,
    SoftConfig,
    StableConfig,
    ThresholdConfig,
)
from acmoe.errors import UserError
from acmoe.experts.moe import MoE
from acmoe.experts.soft import SoftMoE
from acmoe.experts.stack import MoEFFN, MoEStack
from acmoe.fast import accelerate as _accelerate
from acmoe.models.checkpoint import load, save
from acmoe.models.registry import AFTER_BUILD as _AFTER_BUILD
from acmoe.models.registry import create_model, list_models
from acmoe.ops.statistics.dispersion import dispersion
from acmoe.ops.statistics.optimum import optimal_weights
from acmoe.ops.statistics.scale import cluster_scale
from acmoe.routing.adaptive import AdaptiveRouter
from acmoe.routing.build import build_router
from acmoe.routing.layer_plan import LayerPlan, adaptive_depths, place, plan_layers
from acmoe.routing.process_group import set_statistics_group
from acmoe.routing.router import Router
from acmoe.routing.state import Routing, RoutingState
from acmoe.routing.statistics.override import override_statistics
from acmoe.routing.statistics.step import fold_statistics

if TYPE_CHECKING:  # at run time by __getattr__
    from acmoe.hf.attach import attach as attach
    from acmoe.hf.attach import detach as detach
    from acmoe.hf.calibrate import calibrate as calibrate

__version__ = "0.2.0.dev0"

# Models are created with their fast runner, which steps aside wherever a module was changed.
# ACMOE_FAST=never, or acmoe.fast.restore(model), keeps to the plain one.
_AFTER_BUILD.append(_accelerate)

__all__ = [
    "AdaptiveConfig",
    "AdaptiveRouter",
    "CosineConfig",
    "CustomConfig",
    "ExpertChoiceConfig",
    "HashConfig",
    "LayerPlan",
    "LossConfig",
    "MetricConfig",
    "MoE",
    "MoEFFN",
    "MoEStack",
    "RandomConfig",
    "Router",
    "Routing",
    "RoutingState",
    "SMoEConfig",
    "SoftConfig",
    "SoftMoE",
    "StableConfig",
    "ThresholdConfig",
    "UserError",
    "adaptive_depths",
    "build_router",
    "cluster_scale",
    "create_model",
    "dispersion",
    "fold_statistics",
    "list_models",
    "load",
    "optimal_weights",
    "override_statistics",
    "place",
    "plan_layers",
    "save",
    "set_statistics_group",
]

# Names that need transformers, imported where they are first used. They are not in __all__:
# `from acmoe import *` works without transformers.
_IN_HF = ("attach", "calibrate", "detach")


def __getattr__(name: str) -> Any:
    if name not in _IN_HF:
        raise AttributeError(f"module 'acmoe' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module("acmoe.hf"), name)
    except ImportError as error:
        raise UserError(
            f"acmoe.{name} needs transformers 5.17 or later ({error}); run pip install 'acmoe[hf]'"
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_IN_HF})
