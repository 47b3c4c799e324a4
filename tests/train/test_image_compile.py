"""compile=true in training of image classifiers."""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from acmoe.config.images.train import VisionRunConfig
from acmoe.data.images.load import load_images
from acmoe.fast.compiled import compile_blocks
from acmoe.train import trainer as trainer_module
from acmoe.train.images import ImageTrainer
from tiny_vision_runs import tiny_vision_run

# The compiler looks at the gradients of tensors that have none.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def losses(config: VisionRunConfig) -> list[float]:
    """Return the losses of a plain step, a recorded one, a validation and a step after it."""
    torch.manual_seed(0)
    trainer = ImageTrainer(config, load_images(config.data), torch.device("cpu"))
    found = [float(trainer.update(step, record=step == 2).loss) for step in (1, 2)]
    found += [trainer.validate().loss, float(trainer.update(3, record=False).loss)]
    trainer.close()
    return found


def test_compiled_updates_lose_what_plain_ones_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    # The tracing is the part that can fail; machine code would take minutes.
    traced = partial(compile_blocks, backend="eager")
    monkeypatch.setattr(trainer_module, "compile_blocks", traced)
    torch.compiler.reset()
    counters.clear()
    plain = losses(tiny_vision_run(soft=True, router="smoe"))
    assert counters["stats"]["unique_graphs"] == 0
    compiled = losses(tiny_vision_run("compile=true", soft=True, router="smoe"))
    # A dense block and one with experts. Recorded steps and validation are not compiled for.
    graphs = counters["stats"]["unique_graphs"]
    assert 2 <= graphs <= 3 and not counters["graph_break"]
    assert compiled == pytest.approx(plain, rel=1e-5)
