import json

import pytest

from acmoe.errors import UserError
from acmoe.lab.theory import Check, all_confirmed, run_checks, to_json
from acmoe.lab.theory.noise_sweep import check_previous_assignment
from acmoe.lab.theory.optimum import check_kkt


@pytest.fixture(scope="module")
def checks() -> list[Check]:
    return run_checks(seed=0)


def test_every_measurement_agrees_with_its_second_derivation(checks):
    assert [check.name for check in checks if not check.confirmed] == []
    assert all_confirmed(checks)


def test_the_statements_that_fail_as_printed_are_these(checks):
    assert [check.name for check in checks if check.holds_as_printed is False] == [
        "Lemma on alpha, tied dispersions",
        "Lemma 2, three clusters or other noise",
        "Proposition 1, scale from clean tokens",
        "Proposition 1, by Monte Carlo",
        "Proposition 2, rotated covariance",
        "Proposition 2, the clusters of Lemma 1",
        "Lemma on eigenvalues",
    ]


def test_proposition_2_holds_aligned_mostly_holds_rotated_and_never_for_separated_clusters(checks):
    share = {c.name: c.figures["share_that_holds"] for c in checks if "Proposition 2" in c.name}
    assert share["Proposition 2, aligned covariance"] == 1
    assert 0.5 < share["Proposition 2, rotated covariance"] < 0.95
    assert share["Proposition 2, the clusters of Lemma 1"] == 0


def test_names_are_unique_and_every_row_is_complete(checks):
    assert len({check.name for check in checks}) == len(checks)
    for check in checks:
        assert all((check.statement, check.setting, check.measured, check.note, check.figures))
        assert check.verdict.startswith("fails as printed") == (check.holds_as_printed is False)
        assert check.verdict.startswith("holds") == (check.holds_as_printed is True)


def test_json_holds_every_figure(checks):
    content = json.loads(to_json(checks))
    assert content["confirmed"] is True
    assert [row["name"] for row in content["checks"]] == [check.name for check in checks]
    assert content["checks"][0]["figures"] == dict(checks[0].figures)


def test_equal_seeds_give_equal_rows_and_other_seeds_other_numbers():
    for verify in (check_kkt, check_previous_assignment):
        assert verify(5) == verify(5)
    assert check_previous_assignment(5).figures != check_previous_assignment(6).figures


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(UserError, match=f"seed={seed}"):
        run_checks(seed=seed)
