"""Long runs: separation of clusters with and without M, and the table and figure of robustness."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from acmoe.analyze.record import LayerRecord, record_language
from acmoe.config.text.language import language_router
from acmoe.lab.study.cells.separation import (
    SEPARATION,
    layer_separation,
    separation,
    separation_means,
)
from acmoe.lab.study.registry import STUDIES
from acmoe.lab.study.results.report import draw
from acmoe.lab.study.results.summary import summarise
from acmoe.lab.study.results.tables import study_markdown
from acmoe.models.registry import build_model
from study_cases import record
from tiny_runs import MODEL

LONG = STUDIES["long"]


def layer(*, adaptive: bool) -> LayerRecord:
    """Four tokens at the corners of a rectangle, and M = diag(2, 1/2)."""
    x_ND = torch.tensor([[0.0, 0.0], [0.0, 2.0], [4.0, 0.0], [4.0, 2.0]])
    affinity_NE = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    return LayerRecord(
        input=x_ND,
        scaled=x_ND * torch.tensor([2.0, 0.5]),
        affinity=affinity_NE,
        expert_ids=affinity_NE.argmax(1, keepdim=True),
        gate=torch.ones(4, 1),
        cluster=torch.full((4,), -1),
        scale=torch.ones(2, 2),
        scale_varies=False,
        adaptive=adaptive,
        grid=None,
    )


def test_separation_of_four_tokens_by_hand():
    # Clusters 0 and 4 on the first axis: each token is 1 from its mean, the whole scatter is 4 * 5.
    # M makes that 4 * 1/4 of 4 * (16 + 1/4). Experts split the second axis instead.
    cluster_N = torch.tensor([0, 0, 1, 1])
    with_m = separation(layer(adaptive=True), cluster_N)
    assert [with_m[name] for name in SEPARATION] == pytest.approx([1 / 5, 1 / 65, 4 / 5, 64 / 65])
    without = separation(layer(adaptive=False), cluster_N)
    assert [without[name] for name in SEPARATION] == pytest.approx([1 / 5, 1 / 5, 4 / 5, 4 / 5])
    first = separation(layer(adaptive=True), None)
    assert (first["within_share"], first["within_share_scaled"]) == (None, None)
    assert separation_means({"a": [None, 1.0, 2.0], "b": [None]}) == {"a": 1.5}


@pytest.mark.parametrize("router", ["smoe", "adaptive"])
def test_a_cluster_is_the_first_expert_of_the_layer_before(router):
    torch.manual_seed(0)
    model = build_model(replace(MODEL, router=language_router(router, MODEL)))
    stream = np.random.default_rng(0).integers(0, 256, 300).astype(np.uint16)
    found = layer_separation(model, stream, tokens=256, precision="fp32")
    routed = record_language(model, stream, tokens=256, batch=8).layers
    assert ("within_share_scaled" in found) == (router == "adaptive")
    assert found["within_share"][0] is None
    for before, here, value in zip(routed[:-1], routed[1:], found["within_share"][1:], strict=True):
        if router == "adaptive":
            assert torch.equal(here.cluster, before.first)  # the clusters whose M scales the tokens
        # The scatter about the clusters' means, over that about the mean of all, token by token.
        x_ND, label_N = here.input.double().numpy(), before.first.numpy()
        within = [x_D - x_ND[label_N == c].mean(0) for x_D, c in zip(x_ND, label_N, strict=True)]
        assert value == pytest.approx((np.array(within) ** 2).sum() / x_ND.var(0).sum() / len(x_ND))


def line(condition, seed, metrics, curves=None):
    found = record(condition, seed, 0.0, study="long", setting="switch-enwik8, balance 0")
    return {**found, "metrics": metrics, "curves": curves or {}}


def test_the_table_of_robustness_counts_the_runs_of_each_figure():
    old = {"test": 1.0, "contaminated": 2.0}
    lines = [
        line("smoe", 0, old),
        line("smoe", 1, {"test": 3.0, "contaminated": 4.0, "enwik8 contaminated": 5.0}),
        line("adaptive-previous", 0, {"test": 1.1, "contaminated": 2.5}),
    ]
    page = study_markdown(summarise(LONG, lines), []).splitlines()
    (smoe,) = [one for one in page if one.startswith("| smoe | 2.0000 ± 1.4142 (2) |")]
    assert smoe.split(" | ")[2:] == [
        "not recorded",
        "3.0000 ± 1.4142 (2)",
        "not recorded",
        "not recorded",
        "5.0000 (1) |",
    ]
    (pair,) = [one for one in page if one.startswith("| adaptive-previous minus smoe |")]
    # One seed has both: 1.1 against 1.0, and 2.5 against 2.0.
    assert pair.split(" | ")[1:4] == ["+10.00% (1)", "not recorded", "+25.00% (1)"]
    bare = study_markdown(summarise(LONG, [line("smoe", 0, {"test": 1.0})]), [])
    assert "Robustness" not in bare


def test_the_figure_of_the_routing_shows_what_was_recorded(tmp_path):
    figures = pytest.importorskip("matplotlib.figure")
    curve = [[1, 0.5], [2, 0.25]]
    old = {name: curve for name in ("load_balance", "instability")}
    new = {**old, "within_share": curve, "within_share_scaled": [[1, 0.4], [2, 0.2]]}

    def panels(*lines):
        with mock.patch.object(figures.Figure, "savefig", autospec=True) as savefig:
            draw(summarise(LONG, lines), tmp_path)
        calls = [call.args for call in savefig.call_args_list if "routing" in call.args[1].name]
        return [] if not calls else calls[-1][0].axes

    plain, adaptive = (line(name, 0, {"test": 1.0}, old) for name in ("smoe", "adaptive-previous"))
    load, _, scatter = panels(plain, adaptive)
    assert (load.get_title(loc="left"), scatter.get_title(loc="left")) == (
        "n = 1, 1",
        "not recorded",
    )
    again = line("adaptive-previous", 1, {"test": 1.0}, new)
    load, _, scatter = panels(plain, adaptive, again)
    assert (load.get_title(loc="left"), scatter.get_title(loc="left")) == ("n = 1, 2", "n = 0, 1")
    assert [list(one.get_ydata()) for one in scatter.lines] == [[0.5, 0.25], [0.4, 0.2]]
    assert [one.get_linestyle() for one in scatter.lines] == ["-", "--"]
    assert panels(line("smoe", 0, {"test": 1.0})) == []
