"""Keep running statistics with the adapters of PEFT.

A file of adapters holds only weights that were trained, while the statistics have moved too. So
they are written beside the adapters, and loaded with them: where transformers saves the adapters of
a model (`StatisticsBeside`), and where a `PeftModel` around the model does (`follow_peft`).
"""

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from acmoe.errors import UserError
from acmoe.hf.checkpoints.statistics import FILE, has_statistics, load_statistics, save_statistics

LOG = logging.getLogger("acmoe")
FOLLOWED = "_acmoe_follows"  # attribute of a method that `follow_peft` has put in


class StatisticsBeside:
    """Base of model classes whose statistics are saved and loaded with their adapters."""

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Save the model. Where it has adapters of PEFT, transformers saves these alone; the
        statistics are then written beside them."""
        super().save_pretrained(save_directory, **kwargs)  # type: ignore[misc]
        if getattr(self, "_hf_peft_config_loaded", False) and kwargs.get("is_main_process", True):
            save_beside(self, [save_directory])

    def load_adapter(self, peft_model_id: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Load an adapter, and the statistics that were saved beside it.

        There are none if the adapter is given as `peft_config` and `adapter_state_dict`.
        """
        found = super().load_adapter(peft_model_id, *args, **kwargs)  # type: ignore[misc]
        load_beside(self, peft_model_id)
        return found

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """Return all modules; PEFT, which may be imported late, looks for its places among them."""
        if not torch.compiler.is_compiling():
            follow_peft()
        return super().named_modules(*args, **kwargs)  # type: ignore[misc]


def save_beside(model: Any, directories: Iterable[str | os.PathLike[str]]) -> None:
    """Write the statistics of a model, if it has any, to the folders of its adapters."""
    if not has_statistics(model):
        return
    try:
        for directory in directories:
            save_statistics(model, directory)
    except UserError as error:  # the adapters are saved, and training must go on
        LOG.warning("the statistics were not saved with the adapters: %s", error)


def load_beside(model: Any, directory: Any) -> None:
    """Load the statistics that lie beside an adapter, if any; warn if the model has none."""
    if not isinstance(directory, str | os.PathLike) or not (Path(directory) / FILE).is_file():
        return
    if has_statistics(model):
        load_statistics(model, directory)
        LOG.info("loaded the running statistics in %s", Path(directory) / FILE)
    else:
        LOG.warning(
            "%s was trained with adaptive routers, and the model has plain ones; call "
            "acmoe.attach(model, ...) as in training, then acmoe.hf.load_statistics(model, %r)",
            *(directory, str(directory)),
        )


def follow_peft() -> None:
    """Have `PeftModel` save and load statistics with adapters, if PEFT has been imported.

    A `PeftModel` tells the model inside nothing of its files, so two of its methods are wrapped.
    They do as before for models without statistics.
    """
    peft = sys.modules.get("peft")
    kind = getattr(peft, "PeftModel", None)  # None while PEFT is being imported
    if kind is None or getattr(kind.save_pretrained, FOLLOWED, False):
        return
    kind.save_pretrained = _saving(kind.save_pretrained)
    kind.load_adapter = _loading(kind.load_adapter)


def _saving(save: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(save)

    @functools.wraps(save)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        save(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        if given.get("is_main_process", True):
            names: Any = given.get("selected_adapters") or getattr(self, "peft_config", ())
            root = Path(given["save_directory"])
            save_beside(self, {root / name if name != "default" else root for name in names})

    setattr(save_pretrained, FOLLOWED, True)
    return save_pretrained


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(load)

    @functools.wraps(load)
    def load_adapter(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = load(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        folder = given["model_id"]
        if isinstance(folder, str | os.PathLike):
            folder = Path(folder) / (kwargs.get("subfolder") or "")
        load_beside(self, folder)
        return found

    return load_adapter
