"""Keep running statistics with the adapters of PEFT.

A file of adapters holds only weights that were trained, while the statistics have moved too. So
they are written beside the adapters, and loaded with them: where transformers itself puts adapters
into a model (`StatisticsBeside`, `follow_transformers`), and where a `PeftModel` is around the
model (`follow_peft`).

A folder may be used again. Saving an adapter without statistics removes the file of an earlier one.
A program that does not import acmoe leaves it, so the file holds a digest of its adapter's weights,
and is not loaded with others.
"""

import functools
import hashlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import safetensors
import torch
from huggingface_hub import _CACHED_NO_EXIST, try_to_load_from_cache
from torch import Tensor, nn
from transformers.integrations import PeftAdapterMixin
from transformers.utils import cached_file

from acmoe.errors import UserError, first_line
from acmoe.hf.checkpoints.hotswap import follow_hotswap
from acmoe.hf.checkpoints.statistics import (
    FILE,
    averages_of,
    has_statistics,
    load_statistics,
    write_statistics,
)

LOG = logging.getLogger("acmoe")
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # PEFT loads the first that exists
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "token")
FOLLOWED = "_acmoe_follows"  # attribute of a method that was wrapped here


class StatisticsBeside:
    """Base of model classes whose statistics are saved with their adapters."""

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Save the model. Where it has adapters of PEFT, transformers saves these alone; the
        statistics are then written beside them."""
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)  # type: ignore[misc]
        if getattr(self, "_hf_peft_config_loaded", False) and is_main_process:
            save_beside(self, [save_directory])

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """Return all modules; PEFT, which may be imported late, looks for its places among them."""
        if not torch.compiler.is_compiling():
            follow_peft()
        return super().named_modules(*args, **kwargs)  # type: ignore[misc]


def save_beside(model: Any, directories: Iterable[str | os.PathLike[str]]) -> None:
    """Write the statistics of a model to the folders of its adapters, whose weights are there.

    If it has none, or they cannot be written, remove what an earlier adapter left there.
    """
    found = has_statistics(model)
    for path in (Path(directory) / FILE for directory in directories):
        try:
            if found:
                write_statistics(model, path, adapter=_digest(path.parent) or "")
                continue
        except UserError as error:  # the adapters are saved, and training must go on
            LOG.warning("the statistics were not saved with the adapters: %s", error)
        path.unlink(missing_ok=True)


def _digest(directory: Path) -> str | None:
    """Return a digest of the weights of the adapter in a folder; None if there is no such file."""
    for path in (directory / name for name in WEIGHTS):
        if path.is_file():
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
    return None


def _is_of_another(path: Path) -> bool:
    """Return True if the statistics in a file were saved with other weights than lie beside it."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            digest = (file.metadata() or {}).get("adapter")
    except safetensors.SafetensorError:  # reading the tensors raises, and says what to do
        return False
    return bool(digest) and digest != _digest(path.parent)


def load_beside(model: Any, directory: Path, adapter: str) -> None:
    """Load the statistics that lie beside an adapter, if any; warn if the model has none."""
    if not (directory / FILE).is_file():
        return
    if _is_of_another(directory / FILE):
        LOG.warning(
            "%s was saved with another adapter than the one beside it, and is not loaded; delete "
            "it, or call acmoe.hf.load_statistics(model, %r) if they belong together",
            *(directory / FILE, str(directory)),
        )
    elif has_statistics(model):
        before = averages_of(model)
        load_statistics(model, directory)
        LOG.info("loaded the running statistics in %s", directory / FILE)
        if _replaced(before, averages_of(model)):
            _say_shared(model, adapter)
    else:
        LOG.warning(
            "%s was trained with adaptive routers, and the model has plain ones; call "
            "acmoe.attach(model, ...) as in training, then acmoe.hf.load_statistics(model, %r)",
            *(directory, str(directory)),
        )


def _replaced(before: list[tuple[Tensor, Tensor]], after: list[tuple[Tensor, Tensor]]) -> bool:
    """Return True if averages that a batch had moved are now others; offloaded ones are unknown."""
    return any(
        not old[1].is_meta and bool(old[1].any()) and not all(map(torch.equal, old, new))
        for old, new in zip(before, after, strict=True)
    )


def _say_shared(model: Any, adapter: str) -> None:
    """Warn that the statistics of the adapter just loaded hold for the others as well."""
    others = sorted({*getattr(model, "peft_config", ())} - {adapter})
    if others:
        LOG.warning(
            "a model has one set of running statistics: it is now that of adapter %r, and %s would "
            "be computed with it too; call acmoe.hf.load_statistics(model, folder) when you switch",
            *(adapter, " and ".join(map(repr, others))),
        )


def follow_transformers() -> None:
    """Have every model of transformers load statistics with an adapter; a plain one warns."""
    if not hasattr(PeftAdapterMixin.load_adapter, FOLLOWED):
        PeftAdapterMixin.load_adapter = _loading(PeftAdapterMixin.load_adapter, "peft_model_id")


def follow_peft() -> None:
    """Have `PeftModel` save and load statistics with adapters, if PEFT has been imported.

    A `PeftModel` tells the model inside nothing of its files, so two of its methods are wrapped.
    They do as before for models without statistics.
    """
    peft = sys.modules.get("peft")
    kind = getattr(peft, "PeftModel", None)  # None while PEFT is being imported
    if kind is None or hasattr(kind.save_pretrained, FOLLOWED):
        return
    kind.save_pretrained = _saving(kind.save_pretrained)
    kind.load_adapter = _loading(kind.load_adapter, "model_id")
    follow_hotswap(_load_from)


def _load_from(
    model: nn.Module, place: str | os.PathLike[str], options: dict[str, Any], adapter: str
) -> None:
    """Load the statistics saved beside an adapter, in a folder or in a repository of the hub."""
    directory = _folder_of(model, place, options)
    if directory is not None:
        load_beside(model, directory, adapter)


def _folder_of(
    model: nn.Module, place: str | os.PathLike[str], options: dict[str, Any]
) -> Path | None:
    """Return the folder of an adapter, in the cache of the hub if `place` is a repository there.

    The statistics are then downloaded. None: the repository has none, or cannot be reached.
    """
    subfolder = options.get("subfolder") or ""
    if Path(place).is_dir():
        return Path(place) / subfolder
    known = {name: options[name] for name in HUB_OPTIONS if options.get(name) is not None}
    try:
        found, failure = _downloaded(str(place), subfolder, known), ""
    except OSError as error:  # the adapter itself is loaded
        found, failure = None, first_line(error)
    if failure and has_statistics(model):
        LOG.warning(
            "the statistics of %s were not loaded: %s; download the repository, then call "
            "acmoe.hf.load_statistics(model, folder)",
            *(place, failure),
        )
    return found


def _downloaded(repository: str, subfolder: str, options: dict[str, Any]) -> Path | None:
    """Download the statistics of a repository and return their folder; None: it has none.

    Raises an OSError if the hub cannot be asked.
    """
    file = cached_file(
        repository,
        FILE,
        subfolder=subfolder,
        **options,
        _raise_exceptions_for_missing_entries=False,
    )
    if file is not None:
        return Path(file).parent
    # `file` is None, too, if the hub does not answer. The cache remembers files that the hub lacks.
    name = f"{subfolder}/{FILE}" if subfolder else FILE
    place = {key: options[key] for key in ("cache_dir", "revision") if key in options}
    if try_to_load_from_cache(repository, name, **place) is not _CACHED_NO_EXIST:
        raise OSError("the hub does not answer, and its cache lacks them")
    return None


def _hub_options(given: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the options that chose an adapter's files, among the arguments of `load_adapter`.

    `from_pretrained` of transformers passes its own in `load_config`.
    """
    of_model = getattr(given.get("load_config"), "download_kwargs", None) or {}
    return {**of_model, **kwargs, **(given.get("adapter_kwargs") or {})}


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


def _loading(load: Callable[..., Any], folder: str) -> Callable[..., Any]:
    """Wrap a method that loads an adapter; `folder` is the name of the argument that has its place.

    There are no statistics where the adapter is given as tensors.
    """
    signature = inspect.signature(load)

    @functools.wraps(load)
    def load_adapter(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = load(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        place = given.get(folder)
        if isinstance(place, str | os.PathLike):
            options = _hub_options(given, kwargs)
            _load_from(self, place, options, given.get("adapter_name") or "default")
        return found

    setattr(load_adapter, FOLLOWED, True)
    return load_adapter
