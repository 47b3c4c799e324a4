"""Fuzz targets of configs: JSON documents for every config class, and `a.b=c` overrides."""

from typing import Any

from hypothesis import strategies as st

from acmoe.config.images.attack import attack_config
from acmoe.config.images.data import AugmentConfig, ImageDataConfig, ImageEvaluateConfig
from acmoe.config.images.train import override_vision_run
from acmoe.config.overrides import keys, override
from acmoe.config.routing import (
    AdaptiveConfig,
    CosineConfig,
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
from acmoe.config.serialize import decode, encode, from_document
from acmoe.config.text.data import ContaminationConfig, PrepareConfig
from acmoe.config.text.evaluate import EvaluateConfig
from acmoe.config.text.finetune import finetune_config
from acmoe.config.text.train import RunConfig, override_run
from acmoe.lab.study.synthetic.task import SyntheticConfig
from acmoe.lab.variants.config import VariantConfig
from acmoe.recipes import recipe
from faults.fuzz.common import CHANGES, JSON, TEXTS, Target, allowed, changed
from tiny_runs import MODEL
from tiny_vision_runs import SOFT, SWIN, tiny_vision_run

LANGUAGE = recipe("switch-nano")
SWIN_RUN, SOFT_RUN = tiny_vision_run(), tiny_vision_run(soft=True)
CONFIGS: tuple[Any, ...] = (
    *(LANGUAGE, SWIN_RUN, SOFT_RUN, MODEL, SWIN, SOFT),
    *(AdaptiveConfig(), RandomConfig(), SMoEConfig(), MetricConfig(), CosineConfig()),
    *(StableConfig(), ThresholdConfig(), HashConfig(), ExpertChoiceConfig(), SoftConfig()),
    *(LossConfig(), VariantConfig(), finetune_config("sst2", "clean"), EvaluateConfig()),
    *(PrepareConfig(), ContaminationConfig(), ImageDataConfig(), AugmentConfig()),
    *(ImageEvaluateConfig(), SyntheticConfig()),
    *(attack_config(name) for name in ("fgsm", "pgd", "spsa", "autoattack")),
)


def _decode(value: tuple[int, list[Any]]) -> None:
    number, changes = value
    config = CONFIGS[number % len(CONFIGS)]
    allowed(lambda: decode(changed(encode(config), changes), type(config), "config.json"))


def _document(value: Any) -> None:
    allowed(lambda: from_document(value, RunConfig, "config.json"))
    allowed(lambda: from_document({"format": 1, "config": value}, RunConfig, "config.json"))


KEYS = sorted({key for run in (LANGUAGE, SWIN_RUN, SOFT_RUN) for key in keys(run)})
PAIRS = st.lists(
    st.builds("{}={}".format, st.sampled_from(KEYS), JSON | TEXTS)
    | st.builds("{}.{}={}".format, st.sampled_from(KEYS), TEXTS, TEXTS)
    | st.builds("{}={}".format, TEXTS, TEXTS)
    | TEXTS,
    min_size=1,
    max_size=3,
)


def _override(pairs: list[str]) -> None:
    allowed(lambda: override_run(LANGUAGE, pairs))
    allowed(lambda: override_vision_run(SWIN_RUN, pairs))
    allowed(lambda: override_vision_run(SOFT_RUN, pairs))
    allowed(lambda: override(AdaptiveConfig(), pairs))


TARGETS = (
    Target("configs", st.tuples(st.integers(0, len(CONFIGS) - 1), CHANGES), _decode),
    Target("config documents", JSON, _document),
    Target("overrides", PAIRS, _override),
)
