"""The code of docs/huggingface.md runs as it stands."""

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of packages that are not ours
def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("peft", "accelerate"):
        pytest.importorskip(package, reason=f"needs {package}: pip install {package}")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
        # The page says of every block but the first that it measures statistics, or trains them.
        if "model" in names:
            buffers = names["model"].named_buffers()
            weights = [one for name, one in buffers if name.endswith("statistics.weight")]
            assert weights and all(one.any() for one in weights)
