"""Wrong arguments are refused in one line that names the value and the fix.

T tokens, D features, C clusters.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import acmoe
from acmoe.ops.checks import check_dim
from acmoe.ops.statistics.dispersion import dispersion, dispersion_and_count
from acmoe.ops.statistics.optimum import optimal_weights
from acmoe.ops.statistics.prefix import PrefixMoments, prefix_dispersion
from acmoe.ops.statistics.scale import cluster_scale, scale_from_dispersion

X = torch.zeros(4, 2)
IDS = torch.tensor([0, 1, 2, 0])
FITTING: dict[str, Any] = {"x": X, "assignment": IDS, "num_clusters": 3}
X3 = X.view(2, 2, 2)
PREFIX: dict[str, Any] = {
    "x_BLD": X3,
    "assignment_BL": IDS.view(2, 2),
    "read_BLJ": IDS.view(2, 2, 1),
    "before": PrefixMoments.empty(2, 3, 2),
}

# argument, wrong value, what the message must name
TOKENS: list[tuple[str, Any, list[str]]] = [
    ("x", torch.zeros(4), ["(4,)", "(tokens, features)"]),
    ("x", torch.zeros(1, 2, 2, 2), ["(1, 2, 2, 2)", "(sequences, length, features)"]),
    ("x", torch.zeros(4, 2, dtype=torch.long), ["torch.int64", "floating-point"]),
    ("assignment", torch.zeros(3, dtype=torch.long), ["(3,)", "(4,)"]),
    ("assignment", torch.zeros(4, 1, dtype=torch.long), ["(4, 1)", "(4,)"]),
    ("assignment", torch.zeros(4), ["torch.float32", "integer"]),
    ("assignment", torch.zeros(4, dtype=torch.bool), ["torch.bool", "integer"]),
    ("assignment", torch.tensor([0, 3, 0, 0]), ["id 3", "[-1, 3)"]),
    ("assignment", torch.tensor([0, -2, 0, 0]), ["id -2", "[-1, 3)"]),
    ("assignment", torch.tensor([0, 200, 0, 0], dtype=torch.uint8), ["id 200", "[-1, 3)"]),
    ("num_clusters", 0, ["num_clusters=0", "at least 1"]),
    ("num_clusters", -1, ["num_clusters=-1", "at least 1"]),
    ("token_mask", torch.ones(3, dtype=torch.bool), ["(3,)", "(4,)"]),
    ("token_mask", torch.ones(4), ["torch.float32", "bool"]),
    ("token_mask", torch.ones(4, dtype=torch.long), ["torch.int64", "bool"]),
    ("measure", "MAD", ["'MAD'", "mad, variance, std, gini, iqr"]),
]
MOMENTS: list[tuple[str, Any, list[str]]] = [
    ("x_BLD", X, ["(4, 2)", "(sequences, length, features)"]),
    ("assignment_BL", IDS.view(2, 2) + 1, ["id 3", "[-1, 3)"]),
    ("assignment_BL", IDS, ["(4,)", "(2, 2)"]),
    ("read_BLJ", IDS.view(2, 2), ["(2, 2)", "clusters to read"]),
    ("read_BLJ", IDS.view(4, 1, 1), ["(4, 1, 1)", "clusters to read"]),
    ("read_BLJ", IDS.view(2, 2, 1) + 1, ["id 3", "[-1, 3)"]),
    ("read_BLJ", IDS.view(2, 2, 1) - 2, ["id -2", "[-1, 3)"]),
    ("before", PrefixMoments.empty(1, 3, 2), ["1 sequences", "empty(2, 3, 2)"]),
    ("before", PrefixMoments.empty(2, 3, 5), ["5 features", "empty(2, 3, 2)"]),
    ("measure", "gini", ["'gini'", "mad, variance, std"]),
    ("measure", "iqr", ["'iqr'", "mad, variance, std"]),
    ("measure", "spread", ["'spread'", "mad, variance, std"]),
    ("token_mask", torch.ones(2, 2), ["torch.float32", "bool"]),
]
STRENGTHS: list[tuple[Any, list[str]]] = [
    (0.0, ["strength=0.0", "positive"]),
    (-1.0, ["strength=-1.0", "positive"]),
    (math.inf, ["strength=inf", "finite"]),
    (math.nan, ["strength=nan", "finite"]),
    (torch.tensor(-2.0), ["-2.0", "positive"]),
    (torch.tensor([[1.0], [0.0]]), ["0.0", "positive"]),
    (torch.tensor([[1.0], [math.nan]]), ["nan", "finite"]),
    (torch.tensor([[1.0], [math.inf]]), ["inf", "finite"]),
    (torch.ones(2), ["(2,)", "(2, 1)"]),
    (torch.ones(3, 1), ["(3, 1)", "(2, 1)"]),
    (torch.ones(2, 5), ["(2, 5)", "(2, 1)"]),
    (torch.ones(1, 2, 1), ["(1, 2, 1)", "(2, 1)"]),
]
DISPERSIONS: list[tuple[Any, list[str]]] = [
    (torch.tensor([[1.0, -0.5]]), ["-0.5", "at least 0"]),
    (torch.tensor([[1.0, math.nan]]), ["nan", "finite"]),
    (torch.tensor([[1.0, math.inf]]), ["inf", "finite"]),
    (torch.tensor([[1, 2]]), ["torch.int64", "floating-point"]),
    (torch.zeros(2, 0), ["(2, 0)", "at least one feature"]),
    (torch.tensor(1.0), ["()", "(clusters, features)"]),
]


def refused(naming: list[str], function: Callable[..., Any], **arguments: Any) -> None:
    with pytest.raises(acmoe.UserError) as caught:
        function(**arguments)
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in message
    for part in naming:
        assert re.search(re.escape(part), message), f"{part!r} is missing from: {message}"


@pytest.mark.parametrize("function", [dispersion, dispersion_and_count, cluster_scale])
@pytest.mark.parametrize(("argument", "value", "naming"), TOKENS)
def test_tokens_asked_wrongly_are_refused(
    function: Callable[..., Any], argument: str, value: Any, naming: list[str]
) -> None:
    function(**FITTING)
    refused(naming, function, **{**FITTING, argument: value})


@pytest.mark.parametrize(("argument", "value", "naming"), MOMENTS)
def test_prefixes_asked_wrongly_are_refused(argument: str, value: Any, naming: list[str]) -> None:
    prefix_dispersion(**PREFIX)
    refused(naming, prefix_dispersion, **{**PREFIX, argument: value})


@pytest.mark.parametrize(("strength", "naming"), STRENGTHS)
def test_a_strength_must_be_positive_finite_and_one_a_cluster(
    strength: Any, naming: list[str]
) -> None:
    s_CD = torch.ones(2, 5)
    optimal_weights(s_CD, 1.0)
    refused(naming, optimal_weights, dispersion=s_CD, strength=strength)
    refused(
        naming, scale_from_dispersion, dispersion=s_CD, count=torch.ones(2) * 9, strength=strength
    )


@pytest.mark.parametrize(("value", "naming"), DISPERSIONS)
def test_a_dispersion_must_be_finite_and_not_negative(value: Any, naming: list[str]) -> None:
    refused(naming, optimal_weights, dispersion=value, strength=1.0)


@pytest.mark.parametrize("name", ["clusters", "", "Cluster"])
def test_an_unknown_normalisation_is_refused(name: str) -> None:
    naming = [repr(name), "cluster, feature, global"]
    refused(naming, cluster_scale, **FITTING, normalize=name)
    refused(naming, scale_from_dispersion, dispersion=X, count=torch.ones(4), normalize=name)


@pytest.mark.parametrize("shape", [(4, 3), (4,), (1, 1, 4, 2)])
def test_tokens_of_another_width_are_refused(shape: tuple[int, ...]) -> None:
    check_dim(X, 2)
    refused([str(shape), "(tokens, 2)"], check_dim, x=torch.zeros(shape), dim=2)


def test_public_functions_refuse_too() -> None:
    refused(["'MAD'"], acmoe.dispersion, **FITTING, measure="MAD")
    refused(["id 9"], acmoe.cluster_scale, **{**FITTING, "assignment": IDS + 9 - IDS})
    refused(["-1.0"], acmoe.optimal_weights, dispersion=X, strength=-1.0)
