"""The data sets of a study before they are prepared, to check a command's options at once.

To list the cells of a study, its data sets need not even be there.
"""

from pathlib import Path

import numpy as np

from acmoe.data.images.arrays import open_array_splits
from acmoe.lab.study.materials import MEGABYTE, Images, Materials, Text
from acmoe.storage.writable import check_can_fill

UNREAD = ""  # in place of the fingerprint of data that were not read


class PlannedMaterials(Materials):
    """Checks the folders, of data sets to read and to write, and prepares nothing.

    Cells made of it have the names, settings and sizes of a study's cells, but digests of their
    own. Texts have the largest vocabulary that they can have.
    """

    def bytes(self, megabytes: float) -> Text:
        self._folder("enwiki15-bytes")
        return self._text("bytes", f"bytes-{megabytes:g}", 256)

    def stdlib(self, megabytes: float) -> Text:
        text = self._text("stdlib", f"stdlib-{megabytes:g}", 256)
        return text._replace(limit=int(megabytes * MEGABYTE))

    def digits(self) -> str:
        return UNREAD

    def words(self, parts: int, vocabulary: int) -> Text:
        self._word_files(parts)
        return self._text("words", f"words-{parts}-{vocabulary}", vocabulary)

    def images(self) -> Images:
        """Return the size of the first image, on which the checks of models depend."""
        source, out = self._folder("imagenette"), self.work / "imagenette"
        check_can_fill(out)
        train = open_array_splits(out if out.is_dir() else source)["train"]
        return Images(out, len(train.pixels(0)), int(np.max(train.labels)) + 1, UNREAD)

    def other_bytes(self, text: Text, tokens: int) -> Path:
        self._folder("enwik8-prefix")
        return self.work / "planned"

    def other_words(self, text: Text) -> Path:
        self._folder("wikitext103")
        return self.work / "planned"

    def tasks(self, names: tuple[str, ...]) -> Path:
        for name in names:
            self._folder(name)
        return self.work

    def _text(self, name: str, folder: str, vocab_size: int) -> Text:
        check_can_fill(self.work / folder)
        return Text(name, self.work / folder, vocab_size, UNREAD)


class UnreadMaterials(PlannedMaterials):
    """Stands for data sets that nobody reads; neither `data` nor `work` need exist.

    Images have the size of the recorded runs.
    """

    def images(self) -> Images:
        return Images(self.work / "imagenette", 112, 10, UNREAD)

    def _folder(self, name: str) -> Path:
        return self.data / name

    def _word_files(self, parts: int) -> list[Path]:
        return []

    def _text(self, name: str, folder: str, vocab_size: int) -> Text:
        return Text(name, self.work / folder, vocab_size, UNREAD)
