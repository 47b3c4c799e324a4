"""`acmoe export`: a run for transformers, and back, bit by bit."""

import json

import pytest
import torch

from acmoe.cli import main
from acmoe.config.text.evaluate import EvaluateConfig
from acmoe.errors import UserError
from acmoe.evaluate.language import evaluate
from acmoe.evaluate.run import open_run
from acmoe.models import checkpoint
from acmoe.train.run import train
from tiny_runs import QUIET, byte_corpus, tiny_run, trained

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from acmoe.hf.models.export import export_run
from acmoe.hf.models.restore import restore_run

SHORT = ("steps=4", "eval_every=4", "checkpoint_every=2", "model.repeats=2")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of four steps, and its export by the command line."""
    base = tmp_path_factory.mktemp("export")
    folder = trained(tiny_run(byte_corpus(base, lines=60), *SHORT), base / "run")
    with pytest.raises(SystemExit) as stop:
        main(["export", str(folder), "--to", "hf", str(base / "hf"), "--shard-size", "20KB"])
    assert stop.value.code == 0
    return folder, base / "hf"


def test_the_exported_model_has_the_weights_and_text_of_the_run(run):
    folder, exported = run
    ours = open_run(folder)
    model = ours.model()
    loaded = AutoModelForCausalLM.from_pretrained(exported)
    state = model.state_dict()
    assert len(list(exported.glob("model-*.safetensors"))) > 1
    assert {name.removeprefix("model.") for name in loaded.state_dict()} == set(state)
    assert all(torch.equal(loaded.model.state_dict()[name], state[name]) for name in state)
    ids = ours.vocabulary().encode("line 7: ").tolist()
    assert AutoTokenizer.from_pretrained(exported)("line 7: ").input_ids == ids
    new = model.generate([ids], 6, temperature=0)[0].tolist()
    run_pipeline = pipeline("text-generation", model=str(exported))
    found = run_pipeline("line 7: ", max_new_tokens=6, do_sample=False)
    assert found[0]["generated_text"] == "line 7: " + ours.vocabulary().decode(new)


def test_the_card_has_the_figures_of_the_run(run):
    folder, exported = run
    card = (exported / "README.md").read_text()
    (record,) = open_run(folder).metrics("valid")
    assert f"| bits per byte | {record['bits_per_byte']:.4f} |" in card
    assert "| length of the run | 4 steps |" in card
    assert "license: apache-2.0" in card
    assert "AutoModelForCausalLM" in card


def test_the_run_comes_back_bit_by_bit(run, tmp_path, capsys):
    folder, exported = run
    with pytest.raises(SystemExit) as stop:
        main(["export", str(exported), "--to", "run", str(tmp_path / "back"), "--json"])
    assert stop.value.code == 0
    assert json.loads(capsys.readouterr().out)["step"] == 4
    before, after = open_run(folder), open_run(tmp_path / "back")
    state = before.model().state_dict()
    returned = after.model().state_dict()
    assert returned.keys() == state.keys()
    assert all(torch.equal(returned[name], state[name]) for name in state)
    assert after.config == before.config
    assert after.vocabulary() == before.vocabulary()
    assert after.metrics("train") == before.metrics("train")
    config = EvaluateConfig(split="test", batch=2)
    assert evaluate(after, config) == evaluate(before, config)
    with pytest.raises(UserError, match="holds weights only"):
        train(before.config, tmp_path / "back", console=QUIET)


def test_a_folder_that_is_not_empty_is_left_alone(run, tmp_path, capsys):
    folder, exported = run
    (tmp_path / "mine").write_text("x")
    for arguments in ([str(folder), "--to", "hf"], [str(exported), "--to", "run"]):
        with pytest.raises(SystemExit) as stop:
            main(["export", *arguments, str(tmp_path)])
        assert stop.value.code == 2
        error = capsys.readouterr().err
        assert "is not empty" in error
        assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("size", ["silly", "GB", "-1GB", "5"])
def test_a_size_of_shards_that_cannot_be_read_is_refused(run, tmp_path, size):
    with pytest.raises(UserError, match=f"--shard-size.* is '{size}'; give a number with KB, MB"):
        export_run(run[0], tmp_path / "new", max_shard_size=size)
    assert not (tmp_path / "new").exists()


def test_an_option_that_the_way_back_does_not_read_is_refused(run, tmp_path, capsys):
    for option in (["--shard-size", "1MB"], ["--which", "last"]):
        with pytest.raises(SystemExit) as stop:
            main(["export", str(run[1]), "--to", "run", str(tmp_path / "back"), *option])
        assert stop.value.code == 2
        assert "for --to hf" in capsys.readouterr().err


def test_weights_that_are_not_finite_are_not_exported(run, tmp_path, monkeypatch):
    base = tmp_path / "run"
    restore_run(run[1], base)
    broken = open_run(base)
    model = broken.model()
    with torch.no_grad():
        model.unembed.weight[3, 2] = float("nan")
    with monkeypatch.context() as unchecked:  # `save` refuses NaN; a program of others may not
        unchecked.setattr(checkpoint, "_check_loadable", lambda *_: None)
        checkpoint.save(model, broken.checkpoint())
    with pytest.raises(UserError, match=r"unembed\.weight holds NaN"):
        export_run(base, tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_model_that_was_no_run_does_not_become_one(run, tmp_path):
    AutoModelForCausalLM.from_pretrained(run[1]).save_pretrained(tmp_path / "trained")
    with pytest.raises(UserError, match="holds no exported run"):
        restore_run(tmp_path / "trained", tmp_path / "back")
