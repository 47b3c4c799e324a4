"""A model that gives NaN or infinity has no accuracy and no loss: it is refused, with its batch."""

import ast
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import acmoe
from acmoe.config.images.attack import FGSMConfig, attack_config
from acmoe.config.images.data import ImageEvaluateConfig
from acmoe.config.text.evaluate import EvaluateConfig
from acmoe.data.text.corpus import load_corpus
from acmoe.errors import NonFiniteError
from acmoe.evaluate.host_sum import HostSum
from acmoe.evaluate.images.accuracy import evaluate_images
from acmoe.evaluate.images.attack import evaluate_attack
from acmoe.evaluate.images.shift import evaluate_shift
from acmoe.evaluate.language import evaluate, score_stream
from acmoe.models.text.decoder import LanguageModel
from acmoe.storage.strict_json import json_text
from tiny_runs import MODEL, byte_corpus
from vision_cases import PLAIN, Linear, random_images, seeded_model

LABELS = [n % 10 for n in range(30)]


class BrokenFrom(nn.Module):
    """Gives one logit of infinity in call `call`, from 1, and in later ones; finite ones before."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.model, self.call, self.calls = Linear(10, 8), call, 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        logits: Tensor = self.model(images)
        if self.calls < self.call:
            return logits
        return logits.index_fill(1, torch.tensor([3]), torch.inf)


def broken_model(token: int) -> LanguageModel:
    """A language model in which every token after `token` has a loss that is no number."""
    torch.manual_seed(0)
    model = LanguageModel(replace(MODEL, dropout=0.0))
    with torch.no_grad():
        model.embed.weight[token] = torch.inf
    return model


def test_the_batch_of_a_text_with_a_bad_loss_is_named() -> None:
    # 49 predictions in blocks of 16; token 37 is read in the third of four blocks.
    stream = np.zeros(50, dtype=np.int64)
    stream[37] = 5
    with pytest.raises(NonFiniteError, match=r"^the loss of batch 3 of 4 is not finite; score an"):
        score_stream(broken_model(5), stream, batch=1, block=16)
    stream[37] = 6
    assert math.isfinite(score_stream(broken_model(5), stream, batch=1, block=16).loss)


def test_an_evaluation_names_corpus_split_and_statistics(tmp_path: Path) -> None:
    corpus = load_corpus(byte_corpus(tmp_path, lines=60))
    with pytest.raises(
        NonFiniteError, match=r"valid, statistics .*: the loss of batch 1 of"
    ) as bad:
        evaluate(broken_model(ord(":")), EvaluateConfig(split="valid"), corpus=corpus)
    assert str(bad.value).startswith(corpus.title) and "\n" not in str(bad.value)


def test_the_first_bad_value_of_a_sum_is_known_across_reads() -> None:
    total = HostSum()
    for number in range(1, 601):  # read 256 at a time
        total.add(torch.tensor(math.inf if number in (301, 302) else 1.0))
    assert total.total() == math.inf and total.first_bad == 301


def test_the_batch_of_images_with_a_bad_logit_is_named() -> None:
    config = ImageEvaluateConfig(batch=8)
    with pytest.raises(NonFiniteError, match=r"not all finite in batch 3 of 4 of .*, test, stat"):
        evaluate_images(BrokenFrom(3), random_images(LABELS), PLAIN, config)
    assert evaluate_images(BrokenFrom(5), random_images(LABELS), PLAIN, config).figures


def test_a_shifted_set_has_no_accuracy_of_a_broken_model() -> None:
    shifted = random_images([n % 3 for n in range(25)], classes=("n2", "n5", "n7"))
    names = tuple(f"n{number}" for number in range(10))
    config = ImageEvaluateConfig(batch=5)
    with pytest.raises(NonFiniteError, match="not all finite in batch 2 of 5"):
        evaluate_shift(BrokenFrom(2), "imagenet-a", shifted, PLAIN, config, classes=names)


def test_a_broken_batch_never_enters_the_journal_of_an_attack(tmp_path: Path) -> None:
    config = replace(attack_config("fgsm", eps=(0.1,)), attack=FGSMConfig(), batch=8)
    # Each batch asks three times: clean, gradient, attacked. Call 6 is the second batch's last.
    with pytest.raises(NonFiniteError, match=r"^fgsm, eps .*, batch 2 of 4 of .*, test: the model"):
        evaluate_attack(BrokenFrom(6), random_images(LABELS), PLAIN, config, folder=tmp_path)
    (journal,) = tmp_path.rglob("*.jsonl")
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [line["batch"] for line in lines if "batch" in line and "eps" in line] == [0]


class CountReads(TorchDispatchMode):
    """Counts how often the host reads a number of a tensor, which waits for a GPU."""

    reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.reads += func in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.is_nonzero.default,
        )
        return func(*args, **(kwargs or {}))


def test_accuracy_reads_the_device_as_often_for_four_batches_as_for_fifteen() -> None:
    model, counts = seeded_model(lambda: Linear(10, 8)), []
    for batch in (8, 2):
        with CountReads() as mode:
            evaluate_images(model, random_images(LABELS), PLAIN, ImageEvaluateConfig(batch=batch))
        counts.append(mode.reads)
    assert counts[0] == counts[1]


def test_json_has_null_where_a_number_is_not_finite() -> None:
    text = json_text({"a": [math.nan, 1.5], "b": (math.inf,), "c": {"d": -math.inf}}, indent=None)
    assert text == '{"a": [null, 1.5], "b": [null], "c": {"d": null}}'


def test_no_command_prints_json_by_another_way() -> None:
    for file in sorted((Path(acmoe.__file__).parent / "cli").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            assert not (isinstance(node, ast.Attribute) and node.attr in ("dumps", "dump")), file
