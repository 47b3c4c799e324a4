"""Examples that read a run, attack images, and compare a router of their own."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from started import fork_server
from torch import nn
from torch.nn import functional

import acmoe
from acmoe.lab.study import pool
from acmoe.lab.study.registry import STUDIES

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)


def test_a_run_folder_is_read(tmp_path, capsys):
    """The run is that of version 0.1.0: four steps of an adaptive model with three MoE layers."""
    import read_run

    for name in ("language", "corpus"):
        shutil.copytree(ROOT / "tests" / "golden" / "0.1.0" / name, tmp_path / name)
    analysis = read_run.main(Path("language"), tokens=32)
    shown = capsys.readouterr().out
    assert "adaptive router, 8 steps" in shown
    assert "training loss 5.68 at first" in shown  # the first line of its metrics.jsonl
    assert "best checkpoint: step 4" in shown
    assert [round(sum(layer.load.share), 6) for layer in analysis.layers] == [100, 100, 100]
    assert [layer.scale is None for layer in analysis.layers] == [True, False, False]
    assert (tmp_path / "language" / "figures" / "load.png").is_file()


@pytest.mark.slow
def test_without_a_folder_a_tiny_run_is_trained_and_read():
    import read_run

    analysis = read_run.main(steps=10, tokens=64)
    assert analysis.step == 10
    assert read_run.main(steps=10, tokens=64) == analysis  # the second call only reads


class Linear(nn.Module):
    """A classifier whose attacks are known: logits are linear in the pixels."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3 * 8 * 8, 5)

    def forward(self, x):
        return self.linear(x.flatten(1))


def test_attacked_accuracies_are_those_of_an_attack_by_hand():
    pytest.importorskip("sklearn", reason="needs scikit-learn: pip install 'acmoe[vision]'")
    import vision_attack

    from acmoe.config.images.data import DIGITS_MEAN, DIGITS_STD
    from acmoe.data.images.digits import load_digit_splits

    images, labels = vision_attack.digits(load_digit_splits(size=8).test, first=5)
    assert images.shape[1:] == (3, 8, 8) and sorted(set(labels.tolist())) == [0, 1, 2, 3, 4]
    model = Linear()
    found = vision_attack.accuracies(model, (images, labels))

    def correct(pixels):
        logits = model((pixels - DIGITS_MEAN[0]) / DIGITS_STD[0])
        return logits, 100 * (logits.argmax(1) == labels).float().mean().item()

    x = (images / 255).requires_grad_()
    logits, clean = correct(x)
    (gradient,) = torch.autograd.grad(functional.cross_entropy(logits, labels), x)
    _, fgsm = correct((x + 8 / 255 * gradient.sign()).clamp(0, 1))
    assert found["clean"] == pytest.approx(clean, abs=0.01)
    assert found["fgsm"] == pytest.approx(fgsm, abs=0.01)
    assert found["pgd"] <= found["fgsm"] < found["clean"]


@pytest.mark.slow
def test_both_routers_learn_and_lose_accuracy_under_attack():
    pytest.importorskip("sklearn", reason="needs scikit-learn: pip install 'acmoe[vision]'")
    import vision_attack

    found = vision_attack.main(steps=60)
    assert set(found) == {"smoe", "adaptive"}
    for row in found.values():
        assert row["clean"] > 40  # by chance 20
        assert row["pgd"] < row["clean"]


SMALL = (
    *("eval_tokens=200", "model.dim=16", "model.hidden=16", "model.heads=2", "model.span=24"),
    *("--steps", "2", "--tokens", "512", "--megabytes", "0.2", "--seeds", "0"),
)
ONE = ("--only", "adaptive-tempered")


def check_record():
    (record,) = map(json.loads, Path("runs/study/tempered.jsonl").read_text().splitlines())
    assert (record["study"], record["condition"], record["status"]) == (
        *("tempered", "adaptive-tempered"),
        "done",
    )
    assert record["config"]["model"]["router"]["base"] == {"name": "tempered", "start": 1.0}


def test_a_router_of_one_s_own_is_compared_and_has_the_balance_loss(monkeypatch):
    monkeypatch.setitem(STUDIES, "tempered", None)  # to remove what the script adds to the table
    monkeypatch.delitem(sys.modules, "own_study", raising=False)
    monkeypatch.setattr(pool, "_SPAWN", fork_server())
    import own_study

    router = own_study.TemperedConfig()
    moe = acmoe.MoE(dim=4, hidden=4, num_experts=2, top_k=2, router=router)
    # With both of two experts chosen by every token: 0.01 * 2 * sum of 1/2 * P_e = 0.01.
    assert moe(torch.randn(6, 4))[1].aux_loss.item() == pytest.approx(0.01)
    with pytest.raises(SystemExit, match="0"):
        own_study.main(["study", "tempered", *SMALL, *ONE])
    check_record()


@pytest.mark.slow
def test_the_script_of_a_study_of_one_s_own_runs_as_a_command():
    """Its worker imports the script once more."""
    script = [sys.executable, str(ROOT / "examples" / "own_study.py")]
    subprocess.run([*script, *SMALL, *ONE], check=True)
    check_record()
