"""Evaluation against one pass with explicit probabilities, in float64.

N tokens of the stream, V symbols.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from acmoe.config.routing import AdaptiveConfig
from acmoe.config.text.data import ContaminationConfig
from acmoe.config.text.evaluate import EvaluateConfig
from acmoe.config.text.language import language_router
from acmoe.data.text.contaminate import contaminate
from acmoe.data.text.corpus import load_corpus
from acmoe.errors import UserError
from acmoe.evaluate.language import evaluate, score_stream
from acmoe.evaluate.run import open_run
from acmoe.models.checkpoint import save
from acmoe.models.registry import build_model
from acmoe.models.text.decoder import LanguageModel
from acmoe.routing.statistics.override import override_statistics
from slow_cases import mostly_slow
from tiny_runs import MODEL, byte_corpus, records, tiny_run, trained, word_corpus


def model_of(router: object = "smoe", **changes: object) -> LanguageModel:
    torch.manual_seed(1)
    config = replace(MODEL, dropout=0.0, **changes)  # type: ignore[arg-type]
    config = replace(config, router=language_router(router, config))  # type: ignore[arg-type]
    return LanguageModel(config).double().eval()


def explicit_nats(model: LanguageModel, inputs: np.ndarray, targets: np.ndarray) -> float:
    """-log p of each target, from the softmax over all symbols, the whole text in one forward."""
    with torch.no_grad():
        logits_NV = model(torch.from_numpy(inputs[None, :-1].astype(np.int64))).logits[0]
    total = 0.0
    for row_V, target in zip(logits_NV.tolist(), targets[1:].tolist(), strict=True):
        highest = max(row_V)
        total -= row_V[target] - highest - math.log(sum(math.exp(v - highest) for v in row_V))
    return total / (len(inputs) - 1)


@mostly_slow(
    ("router", "block"),
    [(router, block) for router in ("smoe", "adaptive") for block in (7, 16, 1000)],
    keep={0, 4, 5},
)
def test_every_token_is_scored_once_with_its_memory(
    router: str, block: int, tmp_path: Path
) -> None:
    corpus = load_corpus(byte_corpus(tmp_path, lines=150))
    model = model_of(router)
    report = evaluate(model, EvaluateConfig(batch=1, block=block), corpus=corpus)
    figure = report.figure()
    expected = explicit_nats(model, corpus["test"], corpus["test"])
    assert figure.tokens == len(corpus["test"]) - 1
    assert figure.loss == pytest.approx(expected, rel=1e-12)
    assert figure.value == pytest.approx(expected / math.log(2), rel=1e-12)
    assert report.metric == "bits per byte"


def test_rows_of_unequal_length_are_each_scored_to_their_end(tmp_path: Path) -> None:
    stream = np.asarray(load_corpus(byte_corpus(tmp_path))["test"][:51])  # 50 predictions
    model = model_of("adaptive")
    # Three rows of 17, 17 and 16 predictions; each begins without memory.
    rows = [stream[0:18], stream[17:35], stream[34:51]]
    nats = sum(explicit_nats(model, row, row) * (len(row) - 1) for row in rows)
    score = score_stream(model, stream, batch=3, block=5)
    assert score.tokens == 50
    assert score.loss == pytest.approx(nats / 50, rel=1e-12)


def test_perplexity_of_words_counts_ends_of_line(tmp_path: Path) -> None:
    corpus = load_corpus(word_corpus(tmp_path))
    model = model_of(vocab_size=corpus.vocabulary.size)
    report = evaluate(model, EvaluateConfig(batch=1), corpus=corpus)
    expected = explicit_nats(model, corpus["test"], corpus["test"])
    # 40 lines of 11 words and their ends, less the first token.
    assert report.figure().tokens == 40 * 12 - 1
    assert report.metric == "perplexity"
    assert report.figure().value == pytest.approx(math.exp(expected), rel=1e-12)


def test_contaminated_words_are_input_and_target_contaminated_bytes_input_alone(
    tmp_path: Path,
) -> None:
    texts = ((byte_corpus(tmp_path, lines=150), "bytes"), (word_corpus(tmp_path), "words"))
    for folder, kind in texts:
        corpus = load_corpus(folder)
        model = model_of(vocab_size=corpus.vocabulary.size)
        config = EvaluateConfig(batch=1, contamination=ContaminationConfig(rate=0.2, seed=3))
        report = evaluate(model, config, corpus=corpus)
        swapped = np.asarray(contaminate(corpus, "test", config.contamination).inputs)
        assert (swapped != corpus["test"]).any()
        targets = swapped if kind == "words" else np.asarray(corpus["test"])
        expected = explicit_nats(model, swapped, targets)
        assert report.figure(contaminated=True).loss == pytest.approx(expected, rel=1e-12)
        assert report.contamination is not None and report.contamination.changed > 0
        assert report.to_json()["contamination_config"] == {
            "rate": 0.2,
            "seed": 3,
            "early_stop": True,
            "targets": "corrupted" if kind == "words" else "clean",
        }
        assert "contamination_config" not in evaluate(model, corpus=corpus).to_json()


def test_two_models_meet_the_same_corruption(tmp_path: Path) -> None:
    corpus = load_corpus(byte_corpus(tmp_path))
    config = EvaluateConfig(contamination=ContaminationConfig(seed=5))
    first = evaluate(model_of("smoe"), config, corpus=corpus)
    stored = {path: path.read_bytes() for path in corpus.folder.rglob("contaminated/*/*")}
    second = evaluate(model_of("adaptive"), config, corpus=corpus)
    assert first.contamination == second.contamination
    assert stored == {path: path.read_bytes() for path in corpus.folder.rglob("contaminated/*/*")}
    assert len(stored) == 3  # a manifest, and one array for each of valid and test


def test_each_mode_asked_for_gives_its_own_figure(tmp_path: Path) -> None:
    corpus = load_corpus(byte_corpus(tmp_path, lines=150))
    model = model_of("adaptive")
    report = evaluate(
        model, EvaluateConfig(statistics=("batch", "running"), batch=4, block=8), corpus=corpus
    )
    batch, running = report.figure(statistics="batch"), report.figure(statistics="running")
    assert (batch.statistics, running.statistics) == ("batch", "running")
    # An untrained running average is M = I: the plain router.
    plain = model_of("smoe")
    assert plain.load_state_dict(model.state_dict(), strict=False).missing_keys == []
    same = evaluate(plain, EvaluateConfig(batch=4, block=8), corpus=corpus).figure()
    assert running.loss == pytest.approx(same.loss, rel=1e-12)
    assert batch.loss != pytest.approx(same.loss, rel=1e-6)
    with override_statistics(model, eval_statistics="batch"):
        again = score_stream(model, corpus["test"], batch=4, block=8)
    assert batch.loss == again.loss
    # Batch statistics depend on the batch, which therefore stands in the report.
    wider = evaluate(model, EvaluateConfig(statistics=("batch",), batch=2, block=8), corpus=corpus)
    assert (wider.batch, wider.block) == (2, 8)
    assert wider.figure().loss != pytest.approx(batch.loss, rel=1e-9)


def test_modes_of_a_router_without_statistics_are_refused(tmp_path: Path) -> None:
    corpus = load_corpus(byte_corpus(tmp_path))
    with pytest.raises(UserError, match="router='smoe' takes no statistics"):
        evaluate(model_of("smoe"), EvaluateConfig(statistics=("batch",)), corpus=corpus)
    with pytest.raises(UserError, match="statistics holds 'batch' twice; give it once"):
        EvaluateConfig(statistics=("batch", "running", "batch"))


def test_a_mode_the_model_was_not_built_for_is_refused(tmp_path: Path) -> None:
    corpus = load_corpus(byte_corpus(tmp_path))
    passes: list[str] = []  # the error comes before the first pass over the text
    with pytest.raises(UserError, match="statistics_of"):
        evaluate(
            model_of("adaptive"),
            EvaluateConfig(statistics=("batch", "prefix")),
            corpus=corpus,
            progress=lambda stage, done, total: passes.append(stage),
        )
    assert passes == []


def test_measures_of_routing_are_those_of_the_recorded_choices(tmp_path: Path) -> None:
    corpus = load_corpus(byte_corpus(tmp_path))
    model = model_of(AdaptiveConfig(statistics="batch"))
    report = evaluate(model, EvaluateConfig(routing=True, batch=1, block=10_000), corpus=corpus)
    tokens = torch.from_numpy(np.asarray(corpus["test"])[None, :-1].astype(np.int64))
    with torch.no_grad():
        routings = model(tokens, return_routings=True).routings
    assert routings is not None and len(report.figure().layers) == 3
    for layer, routing in zip(report.figure().layers, routings, strict=True):
        counts = np.bincount(routing.expert_ids.flatten().numpy(), minlength=4)
        assert layer.load == pytest.approx(tuple(100 * counts / counts.sum()))
        assert layer.load_balance == pytest.approx(np.std(100 * counts / counts.sum()))
    first, second = (routing.affinity.argmax(-1) for routing in routings[:2])
    same_before, same_now = first[:, None] == first, second[:, None] == second
    n = len(first)
    expected = (same_before != same_now).sum().item() / (n * (n - 1))
    assert report.figure().layers[1].instability == pytest.approx(expected)
    assert report.figure().layers[0].instability is None


def test_a_model_without_moe_layers_has_no_routing_to_measure(tmp_path: Path) -> None:
    corpus, model = load_corpus(byte_corpus(tmp_path)), model_of(layers=("ffn",))
    assert evaluate(model, EvaluateConfig(), corpus=corpus).figure().layers == ()
    with pytest.raises(UserError, match="the model has no MoE layer to measure; leave it out"):
        evaluate(model, EvaluateConfig(routing=True), corpus=corpus)


def test_padding_enters_no_measure_of_routing(tmp_path: Path) -> None:
    stream = np.asarray(load_corpus(byte_corpus(tmp_path))["test"][:48])
    model = model_of("smoe")
    score = score_stream(model, stream, batch=3, block=12, routing=True)  # rows of 16, 16, 15
    for layer in score.layers:
        # 47 predictions of two experts each: shares are whole multiples of 100 / 94.
        parts = [share * 94 / 100 for share in layer.load]
        assert sum(parts) == pytest.approx(94)
        assert parts == pytest.approx([round(part) for part in parts])


def test_a_run_is_scored_at_its_best_checkpoint(tmp_path: Path) -> None:
    overrides = ("steps=12", "eval_every=4", "checkpoint_every=4", "eval_tokens=none")
    folder = trained(tiny_run(byte_corpus(tmp_path, lines=150), *overrides), tmp_path / "run")
    run = open_run(folder)
    valid = [record for record in records(folder) if record["kind"] == "valid"]
    best = min(valid, key=lambda record: record["loss"])
    report = evaluate(folder, EvaluateConfig(split="valid", batch=2), device="cpu")
    assert report.step == best["step"]
    assert report.figure().loss == pytest.approx(best["loss"], rel=1e-9)
    last = evaluate(run, EvaluateConfig(split="valid", batch=2, which="last"), device="cpu")
    assert last.step == 12
    assert json.loads(json.dumps(report.to_json()))["figures"][0]["statistics"] == "running"
    save(model_of("smoe"), run.checkpoint("last"))  # a checkpoint of another run
    with pytest.raises(UserError, match=r"step-00000012 holds another model than its run's config"):
        open_run(folder).model("last")


@pytest.mark.parametrize("block", [0, 2**31, 10**30])
def test_a_block_that_no_array_holds_is_refused(block: int) -> None:
    with pytest.raises(UserError, match=f"^block={block}; it must be at least 1 and less than 2"):
        EvaluateConfig(block=block)
    assert EvaluateConfig(block=2**31 - 1).block == 2**31 - 1


def test_evaluation_changes_neither_the_model_nor_the_random_stream(tmp_path: Path) -> None:
    corpus = load_corpus(byte_corpus(tmp_path))
    model = model_of("random").train()  # draws a scale in every call
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(9)
    expected = torch.rand(2)
    torch.manual_seed(9)
    first = evaluate(model, EvaluateConfig(seed=1), corpus=corpus).figure().loss
    assert torch.equal(torch.rand(2), expected)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert evaluate(model, EvaluateConfig(seed=1), corpus=corpus).figure().loss == first
    assert evaluate(model, EvaluateConfig(seed=2), corpus=corpus).figure().loss != first


def test_a_vocabulary_that_does_not_fit_is_refused_with_the_fix(tmp_path: Path) -> None:
    corpus = load_corpus(byte_corpus(tmp_path))
    with pytest.raises(UserError, match=r"set model.vocab_size=256"):
        evaluate(model_of(vocab_size=255), corpus=corpus)


@pytest.mark.parametrize(
    ("files", "message"),
    [((), "is no run"), (("config.json",), "damaged"), (("config.json", "x"), "damaged")],
)
def test_a_folder_that_is_no_run_is_refused(
    files: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).write_text("{")
    with pytest.raises(UserError, match=message):
        evaluate(tmp_path)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@mostly_slow(
    "router",
    [
        "smoe",
        AdaptiveConfig(statistics="batch"),
        AdaptiveConfig(statistics="batch", statistics_of="current"),
    ],
    ids=["smoe", "previous", "current"],
    keep=(2,),
)
def test_recording_the_routing_changes_no_loss(router: object, device: str) -> None:
    torch.manual_seed(1)
    config = replace(MODEL, dim=64, hidden=64)
    config = replace(config, router=language_router(router, config))  # type: ignore[arg-type]
    model = build_model(config).to(device)
    stream = np.random.default_rng(0).integers(0, config.vocab_size, 700, dtype=np.uint16)
    plain, recorded = (
        score_stream(
            *(model, stream),
            batch=4,
            block=config.block,
            precision="fp32" if device == "cpu" else "bf16",
            routing=routing,
        )
        for routing in (False, True)
    )
    assert plain.loss == recorded.loss
    assert (len(plain.layers), len(recorded.layers)) == (0, config.num_moe_layers)
