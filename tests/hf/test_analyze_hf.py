"""`acmoe analyze --hf PATH --text FILE` and the page of such an analysis."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_configs import FAMILIES
from small_models import build, config
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from acmoe.analyze.analysis import analyze
from acmoe.analyze.draw import save_figures
from acmoe.analyze.hf_text import HuggingFaceConfig
from acmoe.analyze.huggingface import sample_folder
from acmoe.hf.checkpoints.load import load_tokenizer, tokenize
from command import acmoe

TEXT = "".join(
    f"A router reads token {n % 7}.\nIt sends it to two experts, and the next layer asks again.\n"
    for n in range(30)
)
SPECIAL = ["[PAD]", "[BOS]", "[EOS]", "[UNK]"]


def word_tokenizer(folder: Path) -> None:
    """A tokenizer of words that puts [BOS] before a text."""
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator([TEXT], trainers.WordLevelTrainer(special_tokens=SPECIAL))
    words.post_processor = processors.TemplateProcessing(
        single="[BOS] $A", special_tokens=[("[BOS]", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="[BOS]", pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf") / "tiny-mixtral"
    build("mixtral").save_pretrained(path)
    word_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "routers.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_a_model_on_disk_is_measured_and_shown(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "tiny-mixtral"
    shutil.copytree(folder, model)
    options = ("--text", text, "--max-tokens", 70, "--device", "cpu", "--no-figures")
    assert acmoe("analyze", "--hf", model, *options) == 0
    printed = capsys.readouterr().out
    assert "the first 70 tokens of routers.txt" in printed
    assert "std in points" in printed
    out = model / "analysis"
    assert {path.name for path in out.iterdir()} == {"analysis.json", "routing.json"}
    found = json.loads((out / "analysis.json").read_text())
    assert found["step"] is None
    assert [layer["tokens"] for layer in found["layers"]] == [70] * 4

    assert acmoe("report", model) == 0
    page = (model / "report.html").read_text(encoding="utf-8")
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    (run,) = data["runs"]
    assert (run["name"], run["state"], run["router"]) == (
        *("tiny-mixtral", "analyzed"),
        "MixtralTopKRouter",
    )
    assert run["train"] == run["valid"] == {}
    assert [row["load"] for row in run["routing"]["measures"]] == [
        layer["load"]["share"] for layer in found["layers"]
    ]
    (sample,) = data["samples"]
    assert sample["tokens"][:6] == ["A", " router", " reads", " token", " 0", "."]
    shown = run["routing"]["layers"]
    sampled = sample_folder(folder, HuggingFaceConfig(text=text, tokens=70, device="cpu"))
    for layer, record in zip(shown, sampled.own.layers, strict=True):
        assert layer["first"] == record.first.tolist()
        assert layer["ids"] == record.expert_ids.tolist()
    settings = {row["key"]: row["values"][0] for row in data["settings"]}
    assert settings["model.model_type"] == '"mixtral"'


def test_the_pages_show_the_pieces_of_the_text_and_their_experts(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Any] = {}
    for name in ("save_load", "save_instability", "save_tsne", "save_colored_text"):

        def remember(*given: Any, _name: str = name, **named: Any) -> tuple[()]:
            drawn[_name] = (given, named)
            return ()

        monkeypatch.setattr(f"acmoe.analyze.draw.{name}", remember)
    sampled = sample_folder(folder, HuggingFaceConfig(text=text, tokens=20, device="cpu"))
    save_figures(sampled, analyze(sampled), tmp_path)
    (pieces, pages, _), named = drawn["save_colored_text"]
    assert "".join(pieces) == TEXT[: len("".join(pieces))]
    assert len(pieces) == 20
    assert named["title"] == "First choices: tiny-mixtral"
    assert list(pages) == ["MoE layer 1", "MoE layer 3", "MoE layer 4"]
    for depth, first in zip((0, 2, 3), pages.values(), strict=True):
        assert torch.equal(first, sampled.own.layers[depth].first)
    assert set(drawn) == {"save_load", "save_instability", "save_tsne", "save_colored_text"}


@pytest.mark.slow
def test_figures_are_drawn_as_of_a_run(folder: Path, text: Path, tmp_path: Path) -> None:
    options = ("--text", text, "--max-tokens", 9, "--out", tmp_path, "--device", "cpu")
    assert acmoe("analyze", "--hf", folder, *options) == 0
    names = {path.name for path in tmp_path.iterdir()}
    drawn = ("load", "instability", "tsne", "colored_text")
    figures = {f"{name}.{kind}" for name in drawn for kind in ("png", "svg")}
    assert names == {"analysis.json", "routing.json", *figures}


def test_json_is_what_was_written_and_layers_are_chosen(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--text", text, "--tokens", 60, "--no-figures", "--out", tmp_path, "--json")
    assert acmoe("analyze", "--hf", folder, *options, "--layers", 2, 4) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "analysis.json").read_text())
    kept = [layer["plain"] is not None for layer in printed["layers"]]
    assert kept == [False, True, False, True]
    assert {path.name for path in tmp_path.iterdir()} == {"analysis.json", "routing.json"}


def test_rows_begin_with_the_start_token_which_is_not_counted(folder: Path, text: Path) -> None:
    found = sample_folder(folder, HuggingFaceConfig(text=text, tokens=300, batch=2, device="cpu"))
    assert found.own.block == 128  # 127 tokens after [BOS]
    words = tokenize(load_tokenizer(folder), TEXT)
    assert words.start == SPECIAL.index("[BOS]")
    assert found.own.token_ids.tolist() == words.ids[:300]
    assert "".join(words.pieces) == TEXT.rstrip("\n")  # no token holds the last line end
    # 300 = 2 x 127 + 46 tokens, and each is predicted from [BOS] or the one before it.
    model, nats = build("mixtral"), 0.0
    for at in (0, 127, 254):
        row = torch.tensor([[1, *words.ids[at : min(at + 127, 300)]]])
        with torch.no_grad():
            logits = model(row).logits.double().log_softmax(-1)
        nats -= float(logits[0, :-1].gather(1, row[0, 1:, None]).sum())
    assert found.own.loss == pytest.approx(nats / 300, abs=1e-5)


def test_bytes_are_read_if_asked_for(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"\x03\x05\x04\x09")
    options = {"text": tmp_path / "b.txt", "raw_bytes": True, "device": "cpu"}
    found = sample_folder(folder, HuggingFaceConfig(**options))
    assert found.own.token_ids.tolist() == [3, 5, 4, 9]


@pytest.fixture
def mistake(folder: Path, text: Path, tmp_path: Path, request: pytest.FixtureRequest):
    """Options that cannot work, by name."""
    broken = tmp_path / "model"
    given = ["--hf", broken, "--text", text]
    match request.param:
        case "no folder":
            pass
        case "no model":
            broken.mkdir()
        case "dense":
            sizes = {"vocab_size": 99, "hidden_size": 8, "intermediate_size": 8}
            heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
            MistralForCausalLM(MistralConfig(**sizes, **heads)).save_pretrained(broken)
            word_tokenizer(broken)
        case "no tokenizer":
            broken.mkdir()
            for path in folder.iterdir():
                if path.is_file() and not path.name.startswith("tokenizer"):
                    shutil.copy(path, broken)
        case "encoder-decoder":
            config(FAMILIES["switch_transformers"]).save_pretrained(broken)
        case "damaged weights":
            shutil.copytree(folder, broken)
            (broken / "model.safetensors").write_bytes(b"")
        case "lost weights":
            shutil.copytree(folder, broken)
            weights = load_file(broken / "model.safetensors")
            del weights["model.layers.2.block_sparse_moe.gate.weight"]
            save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
        case "no text":
            given = ["--hf", folder]
        case "no such text":
            given = ["--hf", folder, "--text", tmp_path / "missing.txt"]
        case "a run too":
            given = [tmp_path, "--hf", folder, "--text", text]
        case "for runs only":
            given = ["--hf", folder, "--text", text, "--contaminate", 0.1]
        case "no run":
            given = []
        case "text of a run":
            given = [tmp_path, "--text", text]
        case "statistics":
            given = ["--hf", folder, "--text", text, "--statistics", "batch"]
        case "large bytes":
            given = ["--hf", folder, "--text", text, "--bytes"]
    return given


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("no folder", "is no folder; models are read from disk"),
        ("no model", "config.json is missing"),
        ("dense", "MistralForCausalLM has no MoE router"),
        ("no tokenizer", "has no tokenizer"),
        ("encoder-decoder", "is an encoder-decoder (switch_transformers)"),
        ("damaged weights", "cannot be read: Error while deserializing"),
        ("lost weights", "lacks 1 weights of MixtralForCausalLM, such as model.layers.2.mlp.gate"),
        ("no text", "give --text FILE"),
        ("no such text", "missing.txt is no file"),
        ("a run too", "RUN="),
        ("for runs only", "contaminate=0.1 does not apply to --hf"),
        ("no run", "no run given"),
        ("text of a run", "it is for --hf PATH"),
        ("statistics", "the model has no adaptive router"),
        ("large bytes", "outside the model's vocabulary"),
    ],
    indirect=["mistake"],
)
def test_a_mistake_is_one_line(
    mistake: list[object], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert acmoe("analyze", *mistake) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert says in printed.err
    assert printed.err.count("leave it out") < 2


def test_without_transformers_the_extra_is_named(
    folder: Path,
    text: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "acmoe.hf.checkpoints", None)
    assert acmoe("analyze", "--hf", folder, "--text", text) == 2
    assert "pip install 'acmoe[hf]'" in capsys.readouterr().err


def test_a_model_without_an_analysis_is_no_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert acmoe("report", folder, "--out", tmp_path / "page.html") == 2
    assert f"acmoe analyze --hf {folder} --text FILE" in capsys.readouterr().err
