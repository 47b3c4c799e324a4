"""What a process that has not imported `acmoe.lab` says about variants.

test_old_spellings.py calls this in a new process. It imports the variants itself.
"""

import importlib
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import acmoe
from acmoe.config.serialize import from_document
from acmoe.config.text.train import RunConfig, override_run


def refusal(call: Callable[[], object]) -> str | None:
    try:
        call()
    except acmoe.UserError as error:
        return str(error)
    return None


def answer(sender: Connection, plain: Any, variant: Any, named: Any) -> None:
    """Send what configs, models and settings answer, and what the command line imports."""
    run = from_document(plain, RunConfig, "config.json")
    found: dict[str, Any] = {
        "plain": type(run.model.router).__name__,
        "variant": refusal(lambda: from_document(variant, RunConfig, "config.json")),
        "named": refusal(lambda: from_document(named, RunConfig, "config.json")),
        "python": refusal(lambda: acmoe.AdaptiveConfig(power=0.5)),
        "router": refusal(lambda: acmoe.create_model("switch-nano", router="adaptive-variant")),
        "setting": refusal(lambda: override_run(run, ("model.router.power=0.5",))),
        "lab": [name for name in sys.modules if name.startswith("acmoe.lab")],
    }
    importlib.import_module("acmoe.cli")
    found["command"] = "acmoe.lab.variants" in sys.modules
    sender.send(found)
