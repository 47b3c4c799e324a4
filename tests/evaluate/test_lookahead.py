"""Training and evaluation say where a token's experts depend on later tokens, and only there."""

from pathlib import Path

import pytest
import torch
from rich.console import Console

from acmoe.config.text.train import override_run
from acmoe.evaluate.lookahead import lookahead_in_scores, lookahead_in_training
from acmoe.models.registry import build_model
from acmoe.train.run import train
from command import acmoe
from tiny_runs import byte_corpus, tiny_run, trained

CURRENT = "model.router.statistics_of=current"


def looks_ahead(*overrides: str) -> bool:
    """Change the last token of each text; compare the experts of the tokens before it."""
    config = override_run(tiny_run(Path()), overrides).model
    torch.manual_seed(0)
    model = build_model(config)
    tokens = torch.randint(config.vocab_size, (4, 16))
    model(tokens, tokens).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()  # measures the running averages
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % config.vocab_size
    model.eval()
    before, after = (earlier_gates(model, ids) for ids in (tokens, changed))
    return not torch.allclose(before, after, atol=1e-5)


@torch.no_grad()
def earlier_gates(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the affinities and gates of all layers for the tokens before the last one."""
    torch.manual_seed(1)  # a random router draws the same scales for both texts
    parts = [
        part.view(*tokens.shape, -1)[:, :-1]
        for routing in model(tokens, return_routings=True).routings
        for part in (routing.affinity, routing.gate)
    ]
    return torch.cat(parts, -1)


@pytest.mark.parametrize(
    ("overrides", "mode"),
    [
        *[((f"model.router={name}",), "none") for name in ("smoe", "cosine", "hash", "metric")],
        *[((f"model.router={name}",), "none") for name in ("threshold", "stable", "random")],
        (("model.router=expert-choice",), "none"),
        (("model.router=random", "model.router.base=expert-choice"), "none"),
        (("model.router.base=expert-choice",), "running"),
        ((), "running"),
        (("model.router.statistics=batch",), "batch"),
        (("model.router.statistics=batch", CURRENT), "batch"),
        (("model.router.statistics=sequence",), "sequence"),
        (("model.router.statistics=prefix",), "prefix"),
        (("model.router.statistics=batch", "model.router.eval_statistics=running"), "running"),
    ],
)
def test_a_score_has_a_note_where_an_earlier_routing_changes_with_the_last_token(
    overrides: tuple[str, ...], mode: str
) -> None:
    router = override_run(tiny_run(Path()), overrides).model.router
    assert bool(lookahead_in_scores(router, [mode])) == looks_ahead(*overrides)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("model.router=smoe",), ""),
        ((), ""),
        (("model.router=expert-choice",), "router=expert-choice: experts choose among all"),
        (("model.router.statistics=batch",), "other rows of the forward pass; as in validation"),
        (
            ("model.router.statistics=batch", "model.router.eval_statistics=running"),
            "statistics=batch: a token's experts depend on later tokens and other rows of the "
            "forward pass; validation has statistics=running",
        ),
        (("model.router.eval_statistics=batch",), "eval_statistics=batch: in validation"),
    ],
)
def test_training_says_once_that_a_run_looks_ahead(
    tmp_path: Path, overrides: tuple[str, ...], says: str
) -> None:
    log = tmp_path / "log"
    config = tiny_run(byte_corpus(tmp_path), "steps=2", *overrides)
    with log.open("w") as file:
        train(config, tmp_path / "run", console=Console(file=file, width=80))
    lines = [line for line in log.read_text().splitlines() if "later tokens" in line]
    assert [says in line for line in lines] == ([True] if says else [])


def test_evaluation_says_which_scores_look_ahead_beside_its_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tiny_run(byte_corpus(tmp_path), "steps=2"), tmp_path / "run")
    assert acmoe("evaluate", run, "--statistics", "batch", "running", "--json") == 0
    shown = capsys.readouterr()
    assert "later tokens" not in shown.out
    (line,) = [line for line in shown.err.splitlines() if "later tokens" in line]
    assert line.startswith("statistics=batch: ") and "--statistics running" in line
    assert acmoe("evaluate", run) == 0
    assert "later tokens" not in capsys.readouterr().err


def test_a_base_that_looks_ahead_is_not_said_to_be_causal_with_other_statistics() -> None:
    pairs = ("model.router.base=expert-choice", "model.router.statistics=batch")
    router = override_run(tiny_run(Path()), pairs).model.router
    for lines in (lookahead_in_training(router), lookahead_in_scores(router, ["batch"])):
        assert len(lines) == 1 and "router=expert-choice" in lines[0]
