"""Warn where a plain class loads the checkpoint of an attached model.

The config of such a checkpoint makes plain classes refuse it (classes.py). With a plain config of
the user's, `from_pretrained(path, config=plain)`, transformers never reads that config, drops the
statistics as unexpected keys and returns the plain model.
"""

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from acmoe.hf.checkpoints.adapters import FOLLOWED
from acmoe.hf.checkpoints.classes import AdaptiveModel

LOG = logging.getLogger("acmoe")
STATISTICS = re.compile(r"\.adaptive\.(next_state|reader|blend)\.")
METHOD = "_adjust_missing_and_unexpected_keys"  # called once per model that has been loaded


def follow_loading() -> None:
    """Have every plain model of transformers warn if it drops statistics when it is loaded.

    The method is private: a version of transformers without it, or with other arguments, only
    reports unexpected keys.
    """
    adjust = getattr(PreTrainedModel, METHOD, None)
    if adjust is not None and not hasattr(adjust, FOLLOWED):
        setattr(PreTrainedModel, METHOD, _warning(adjust))


def _warning(adjust: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(adjust)
    def adjust_keys(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        found = [getattr(one, "unexpected_keys", ()) for one in (*args, *kwargs.values())]
        dropped = any(STATISTICS.search(key) for keys in found for key in keys)
        if dropped and not isinstance(self, AdaptiveModel):
            LOG.warning(
                "%s has plain routers, and its checkpoint was saved with adaptive ones: their "
                "statistics are dropped, and the routers choose other experts than in training; "
                "load it by AutoModelForCausalLM or its like without a plain config=, or, if only "
                "the body was attached, attach and save the whole model",
                type(self).__name__,
            )
        return adjust(self, *args, **kwargs)

    setattr(adjust_keys, FOLLOWED, True)
    return adjust_keys
