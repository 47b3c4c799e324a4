"""EleutherAI's lm-evaluation-harness scores an exported run as `acmoe evaluate` does."""

import json
import os

import pytest

from acmoe.config.text.evaluate import EvaluateConfig
from acmoe.evaluate.language import evaluate
from acmoe.evaluate.run import open_run
from tiny_runs import byte_corpus, tiny_run, trained

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("transformers")

TASK = """
task: acmoe_text
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: bits_per_byte
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("statistics", ["running", "prefix"])
def test_bits_per_byte_are_those_of_acmoe_evaluate(statistics, tmp_path, monkeypatch):
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from acmoe.hf.models.export import export_run

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setitem(os.environ, name, "1")
    mode = f"model.router.statistics={statistics}"
    folder = trained(tiny_run(byte_corpus(tmp_path), mode), tmp_path / "run")
    export_run(folder, tmp_path / "hf")
    run = open_run(folder)
    text = bytes(run.corpus()["test"].tolist())
    # The first byte is not scored by `acmoe evaluate`: it is the harness's prefix token.
    row = {"text": text[1:].decode()}
    (tmp_path / "text.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "tasks").mkdir()
    task = TASK.format(file=tmp_path / "text.jsonl")
    (tmp_path / "tasks" / "acmoe_text.yaml").write_text(task)
    predictions = len(text) - 1
    rows = next(number for number in range(5, 60) if predictions % number == 0)
    for batch in (1, rows):
        # One window for the whole text, or as many as `acmoe evaluate` has rows.
        model = HFLM(
            pretrained=str(tmp_path / "hf"),
            device="cpu",
            dtype="float32",
            batch_size=1,
            max_length=predictions // batch,
            prefix_token_id=text[0],
        )
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=["acmoe_text"],
            task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
            bootstrap_iters=0,
        )
        measured = found["results"]["acmoe_text"]["bits_per_byte,none"]
        expected = evaluate(run, EvaluateConfig(split="test", batch=batch)).figure().value
        print(statistics, batch, predictions // batch, measured, expected)
        assert measured == pytest.approx(expected, abs=1e-4)
