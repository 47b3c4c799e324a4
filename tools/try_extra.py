"""Use what one extra is for; tools/extras.py runs this file in an environment that has no other.

python -I tools/try_extra.py hf
"""

import io
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

import acmoe

ROOT = Path(__file__).resolve().parents[1]


def none() -> None:
    """Without extras, what needs one names it in the error."""
    from acmoe.analyze.figures.canvas import write_figure
    from acmoe.data.hub import hub_library
    from acmoe.data.images.pixels import pillow
    from acmoe.lab.study.ray_cluster import ray_library

    here = Path()
    for extra, call in {
        "hf": lambda: acmoe.attach,
        "vision": pillow,
        "plots": lambda: write_figure(lambda figure: None, here, "none"),
        "data": hub_library,
        "ray": ray_library,
    }.items():
        try:
            call()
        except acmoe.UserError as error:
            assert f"acmoe[{extra}]" in str(error), error
        else:
            raise AssertionError(f"what needs the extra {extra} works without it")


def hf() -> None:
    """attach and detach on a tiny Mixtral: a fresh attach changes no logit."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads)).eval()
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        plain = model(tokens).logits
        acmoe.attach(model)
        attached = model(tokens).logits
    assert torch.equal(plain, attached)
    acmoe.detach(model)


def vision() -> None:
    """The digits of scikit-learn, and a PNG file read back."""
    from PIL import Image

    from acmoe.data.images.digits import load_digit_splits
    from acmoe.data.images.pixels import decode

    splits = load_digit_splits(size=8)
    assert len(splits.train) + len(splits.valid) + len(splits.test) == 1797
    file = io.BytesIO()
    Image.new("RGB", (3, 2), (10, 20, 30)).save(file, "PNG")
    pixels = decode(file.getvalue(), "a PNG file")
    assert pixels.shape == (2, 3, 3) and pixels[0, 0].tolist() == [10, 20, 30]


def plots() -> None:
    """A figure in both formats; scikit-learn is there for silhouettes and t-SNE."""
    from acmoe.analyze.figures.convergence import save_curves

    with tempfile.TemporaryDirectory() as folder:
        curves = {"smoe": ([1, 2], [2.0, 1.0]), "adaptive": ([1, 2], [2.0, 0.5])}
        png, svg = save_curves(curves, Path(folder), metric="loss", title="two runs")
        assert png.read_bytes().startswith(b"\x89PNG") and "<svg" in svg.read_text()
    assert find_spec("sklearn")


def data() -> None:
    """The hub's library, and figures for TensorBoard."""
    from acmoe.data.hub import hub_library
    from acmoe.train.metrics_log import Board

    assert callable(hub_library().load_dataset)
    with tempfile.TemporaryDirectory() as folder:
        board = Board(Path(folder))
        board.open(0)
        board.write({"kind": "train", "step": 1, "loss": 1.0})
        assert list(Path(folder).glob("events*"))


def text() -> None:
    """The old name of `data`."""
    data()


def examples() -> None:
    """Every script of examples/ runs to its end."""
    for script in sorted((ROOT / "examples").glob("*.py")):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, str(script)], check=True, cwd=folder)


def ray() -> None:
    """Two cells of a study on a Ray that starts on this machine."""
    cells = ("--only", "smoe", "adaptive-previous", "--settings", "layers 2", "--seeds", "0")
    with tempfile.TemporaryDirectory() as folder:
        command = ("study", "synthetic", *cells, "--steps", "2", "--engine", "ray")
        where = ("--out", f"{folder}/results.jsonl", "--device", "cpu")
        subprocess.run([sys.executable, "-m", "acmoe", *command, *where], check=True, cwd=folder)
        records = (Path(folder) / "results.jsonl").read_text().splitlines()
        assert records and all('"status": "done"' in record for record in records), records


def titan() -> None:
    """The overrides make a DeepSeek-V3 adaptive; its statistics move."""
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.deepseek_v3 import model_registry

    config = model_registry("debugmodel").model
    names = [f"acmoe.adapters.titan.{name}" for name in ("adaptive_block", "final_norm")]
    apply_overrides(OverrideConfig(imports=names), config)
    layer = config.layers[-1].moe.build()
    layer.init_states()
    x, cluster = torch.randn(1, 32, layer.statistics.dim), torch.zeros(1, 32, dtype=torch.int64)
    layer.train()._rescale(x, cluster)
    acmoe.fold_statistics(layer)
    assert layer.statistics.weight[0] == 32 and (layer.statistics.average_scale()[0] != 1).any()


def docs() -> None:
    """The pages are built into site/, and their links checked."""
    subprocess.run([sys.executable, "tools/build_docs.py"], check=True, cwd=ROOT)
    assert (ROOT / "site" / "index.html").is_file()


def dev() -> None:
    """Linter, types and tests of configs, on the installed package."""
    python = [sys.executable, "-m"]
    subprocess.run([*python, "ruff", "check", "src"], check=True, cwd=ROOT)
    subprocess.run([*python, "mypy", "--version"], check=True, cwd=ROOT)
    subprocess.run([*python, "pytest", "-q", "tests/config"], check=True, cwd=ROOT)


if __name__ == "__main__":
    assert Path(acmoe.__file__).is_relative_to(sys.prefix), acmoe.__file__
    globals()[sys.argv[1]]()
