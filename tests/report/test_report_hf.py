"""A model of transformers on the page, from what `acmoe analyze --hf` wrote; without the model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from acmoe.analyze.analysis import analyze
from acmoe.analyze.record import LayerRecord, RoutingRecord
from acmoe.analyze.sampling import HuggingFaceModel, Sampled
from acmoe.errors import UserError
from acmoe.report.content import report_data
from acmoe.report.huggingface import save_routing
from acmoe.report.routing import RoutingReader
from acmoe.report.runs import find_runs
from run_facts import HOSTILE

PIECES = ("A", " b", "\n", "", "\tc", HOSTILE, "d", "e")
IDS = [[0], [1], [1], [0], [2], [2], [1], [0]]


def layer(cluster: torch.Tensor) -> LayerRecord:
    ids_NK = torch.tensor(IDS)
    return LayerRecord(
        input=torch.zeros(0, 4),
        scaled=torch.zeros(0, 4),
        affinity=torch.zeros(8, 3).scatter(1, ids_NK, 1.0),
        expert_ids=ids_NK,
        gate=torch.full((8, 1), float("nan")),
        cluster=cluster,
        scale=torch.ones(3, 4),
        scale_varies=False,
        adaptive=False,
        grid=None,
        rows=torch.zeros(0, dtype=torch.long),
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a model whose two layers route alike, with its analysis inside."""
    first = torch.tensor(IDS)[:, 0]
    record = RoutingRecord(
        kind="tokens",
        layers=(layer(torch.full((8,), -1)), layer(first)),
        token_ids=torch.arange(8),
        pixels=None,
        labels=None,
        predicted=None,
        loss=1.25,
        statistics="none",
        batch=1,
        block=8,
        sample="8 tokens",
    )
    run = HuggingFaceModel(
        name="tiny", router="TinyRouter", title="a text", pieces=PIECES, settings={"layers": 2}
    )
    sampled = Sampled(run=run, step=None, own=record, compared={}, disturbed=None)
    folder = tmp_path / "tiny" / "analysis"
    folder.mkdir(parents=True)
    save_routing(sampled, analyze(sampled), folder)
    return folder.parent


def data_of(*folders: Path, tokens: int = 64) -> dict[str, Any]:
    return report_data(find_runs(folders), RoutingReader(tokens=tokens, device="cpu"))


def test_a_model_alone(model: Path) -> None:
    data = data_of(model)
    (run,) = data["runs"]
    assert (run["name"], run["router"], run["state"]) == ("tiny", "TinyRouter", "analyzed")
    assert run["best"] is None
    assert run["notes"] == []
    routing = run["routing"]
    assert routing["step"] is None
    # Experts 0, 1 and 2 have 3, 3 and 2 of 8 tokens; the second layer repeats the first.
    assert [one["load"] for one in routing["measures"]] == [[37.5, 37.5, 25.0]] * 2
    assert [one["instability"] for one in routing["measures"]] == [None, 0]
    assert [one["first"] for one in routing["layers"]] == [[one[0] for one in IDS]] * 2
    assert routing["layers"][0]["gate"] == [[None]] * 8
    (sample,) = data["samples"]
    assert sample["tokens"][:5] == ["A", " b", "\u23ce", "\u2205", "\u21e5c"]
    assert sample["breaks"] == [2]
    assert {row["key"] for row in data["settings"]} == {
        *("model.router.name", "model.layers", "sample.loss")
    }
    assert "Not finished" not in " ".join(data["reading"]["cannot"])


def test_as_many_tokens_as_were_asked_for(model: Path) -> None:
    data = data_of(model, tokens=2)
    assert data["samples"][0]["tokens"] == ["A", " b"]
    assert data["samples"][0]["breaks"] == []
    (run,) = data["runs"]
    assert all(len(one["ids"]) == len(one["cluster"]) == 2 for one in run["routing"]["layers"])
    assert run["routing"]["measures"][0]["load"] == [37.5, 37.5, 25.0]  # of all tokens


def test_a_model_beside_runs_and_in_a_folder_of_models(
    model: Path, two_runs: tuple[Path, Path]
) -> None:
    data = data_of(*two_runs, model)
    assert [run["state"] for run in data["runs"]] == ["finished", "finished", "analyzed"]
    assert all(run["routing"] is not None for run in data["runs"])
    assert data["runs"][2]["difference"] is None
    assert len(data["samples"]) == 2
    assert find_runs([model.parent]) == [model / "analysis"]
    assert find_runs([model / "analysis"]) == [model / "analysis"]


def test_the_tokens_of_each_expert_are_there_unless_the_file_is_older(model: Path) -> None:
    first, second = data_of(model)["runs"][0]["routing"]["by_expert"]
    assert first == second
    # The gates of other people's routers are unknown; affinities are one for the chosen expert.
    assert (first["total"], first["got"], first["ranked"]) == (8, [3, 3, 2], "affinity")
    assert [[place for place, *_ in top] for top in first["top"]] == [[0, 3, 7], [1, 2, 6], [4, 5]]
    *example, after = first["top"][1][1]
    assert example == [2, 1.0, "A b", "\u23ce"]
    assert after.startswith("\u2205\u21e5c</script>") and after.endswith("d")  # four tokens
    path = model / "analysis" / "routing.json"
    document = json.loads(path.read_text())
    del document["by_expert"]
    path.write_text(json.dumps(document))
    (run,) = data_of(model)["runs"]
    assert run["routing"]["by_expert"] is None
    assert run["notes"] == []


def test_a_damaged_file_is_named(model: Path) -> None:
    path = model / "analysis" / "routing.json"
    document = json.loads(path.read_text())
    del document["layers"]
    path.write_text(json.dumps(document))
    (run,) = data_of(model)["runs"]
    assert run["routing"] is None
    assert "routing.json is damaged (KeyError('layers'))" in run["notes"][0]
    path.write_text("{}")
    with pytest.raises(UserError, match="was not written by acmoe analyze --hf"):
        data_of(model)
