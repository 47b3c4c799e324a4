"""`hotswap_adapter` of PEFT brings the statistics of the adapter that it puts in."""

from pathlib import Path

import pytest
import torch
from attached import ids, logits, statistics
from small_models import build
from torch import Tensor, nn

import acmoe
from acmoe import AdaptiveConfig

peft = pytest.importorskip("peft", reason="needs peft: pip install peft")
from peft.utils.hotswap import (  # noqa: E402  # names that are bound before a model is attached
    hotswap_adapter,
    hotswap_adapter_from_state_dict,
)

CONFIG = AdaptiveConfig(momentum=0.5)


def attached() -> nn.Module:
    return acmoe.attach(build("mixtral"), CONFIG)


def saved(folder: Path, seed: int) -> Tensor:
    """Save an adapter with statistics of its own, and return the model's logits."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = acmoe.calibrate(peft.get_peft_model(attached(), config), [ids(4, 24, seed)])
    model.save_pretrained(folder)
    return logits(model.eval(), input_ids=ids())


def test_the_statistics_are_swapped_with_the_weights(tmp_path: Path) -> None:
    first, second = (saved(tmp_path / name, seed) for seed, name in enumerate("ab"))
    model = peft.PeftModel.from_pretrained(attached(), tmp_path / "a").eval()
    assert torch.equal(logits(model, input_ids=ids()), first)
    hotswap_adapter(model, str(tmp_path / "b"), adapter_name="default", torch_device="cpu")
    assert torch.equal(logits(model, input_ids=ids()), second)


def test_weights_of_no_file_leave_the_statistics(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        saved(tmp_path / name, seed)
    model = peft.PeftModel.from_pretrained(attached(), tmp_path / "a").eval()
    before = [one.dispersion.clone() for one in statistics(model)]
    tensors = {key: torch.zeros_like(p) for key, p in model.named_parameters() if "lora" in key}
    config = model.peft_config["default"]
    hotswap_adapter_from_state_dict(model, tensors, "default", config)
    after = [one.dispersion for one in statistics(model)]
    assert all(map(torch.equal, before, after))
