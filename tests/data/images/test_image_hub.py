"""Tables of the hub become image sets; what is missing is one clear line."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from acmoe.config.images.data import ImageDataConfig
from acmoe.data.images.hub import open_hub_splits
from acmoe.data.images.load import load_images
from acmoe.errors import UserError
from vision_cases import random_pixels


class Table:
    """Stands for a table of the `datasets` package: rows by number, columns by name."""

    def __init__(self, names: list[str] | None, **columns: list[Any]) -> None:
        self.columns = columns
        label = SimpleNamespace(names=names) if names else SimpleNamespace()
        self.features = {name: label if name == "label" else None for name in columns}

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            return self.columns[key]
        return {name: column[key] for name, column in self.columns.items()}


def install(monkeypatch: pytest.MonkeyPatch, **splits: Table) -> None:
    hub = ModuleType("datasets")
    hub.load_dataset = lambda name: splits  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", hub)


def pictures(count: int, seed: int = 0) -> list[Image.Image]:
    return [Image.fromarray(random_pixels((4, 4, 3), seed + n)) for n in range(count)]


def test_a_table_of_the_hub_is_an_image_set(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["cat", "dog"]
    install(
        monkeypatch,
        train=Table(names, image=pictures(3), label=[0, 1, 1]),
        validation=Table(names, image=pictures(2, seed=9), label=[1, 0]),
        test=Table(names, image=pictures(2), label=[-1, -1]),  # unlabelled: left out
    )
    splits = load_images(ImageDataConfig(name="hub", source="owner/pets", size=4))
    assert splits.classes == ("cat", "dog")
    assert splits.test.labels.tolist() == [1, 0]
    assert np.array_equal(splits.test.pixels(1), random_pixels((4, 4, 3), 10))
    assert splits.test.where(1) == "owner/pets (validation), image 1"


def test_classes_without_names_are_called_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, train=Table(None, img=pictures(3), label=[0, 2, 1]))
    assert open_hub_splits("owner/x")["train"].classes == ("0", "1", "2")


def test_other_tables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, train=Table(None, text=["a"], label=[0]))
    with pytest.raises(UserError, match="owner/x has columns text, label; none is known"):
        open_hub_splits("owner/x")
    install(monkeypatch, train=Table(None, image=pictures(1), caption=["a"]))
    with pytest.raises(UserError, match="has no labels in its split train"):
        open_hub_splits("owner/x")
    install(monkeypatch, test=Table(None, image=pictures(1), label=[0]))
    with pytest.raises(UserError, match="has no split train; it has test"):
        open_hub_splits("owner/x")
    install(
        monkeypatch,
        train=Table(["a", "b"], image=pictures(1), label=[0]),
        test=Table(["b", "a"], image=pictures(1), label=[0]),
    )
    with pytest.raises(UserError, match="have other classes than train"):
        open_hub_splits("owner/x")
    install(monkeypatch, train=Table(["a"], image=pictures(2), label=[0, 3]))
    with pytest.raises(UserError, match=r"owner/x \(train\) has label 3 at image 1"):
        open_hub_splits("owner/x")
    install(monkeypatch, train=Table(None, image=["no picture"], label=[0]))
    with pytest.raises(UserError, match="column 'image' holds no image"):
        open_hub_splits("owner/x")["train"].pixels(0)


def test_an_image_the_library_cannot_decode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Table):
        def __getitem__(self, key: int | str) -> Any:
            if isinstance(key, int):
                raise OSError("bad bytes\nmore")
            return super().__getitem__(key)

    install(monkeypatch, train=Broken(None, image=[None], label=[0]))
    with pytest.raises(UserError, match=r"\(train\), image 0 is no readable image \(bad bytes\)"):
        open_hub_splits("owner/x")["train"].pixels(0)


def test_a_missing_extra_or_network_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'acmoe\[data\]'"):
        open_hub_splits("owner/x")
    hub = ModuleType("datasets")

    def fails(name: str) -> None:
        raise ConnectionError(f"no route to {name}\nsecond line")

    hub.load_dataset = fails  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    with pytest.raises(UserError, match=r"could not fetch owner/x .*\(no route to owner/x\)"):
        open_hub_splits("owner/x")
