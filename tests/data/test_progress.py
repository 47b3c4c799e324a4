"""A long job shows a bar for each of its stages."""

import io
from pathlib import Path

from rich.console import Console

from acmoe.data.progress import progress_bars
from acmoe.data.text.prepare import prepare


def test_a_bar_is_drawn_for_each_file_and_reaches_its_end(tmp_path: Path) -> None:
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("some words\n")
    screen = io.StringIO()
    with progress_bars(Console(file=screen, force_terminal=True, width=100)) as progress:
        prepare("words", tmp_path, tmp_path / "out", progress=progress)
    text = screen.getvalue()
    assert all(name in text for name in ("train.txt", "valid.txt", "test.txt"))
    assert "100%" in text
