"""Exports of the other kinds of runs: finetuned classifiers, words, image models."""

from dataclasses import replace

import pytest
import torch

from acmoe.config.images.data import ImageEvaluateConfig
from acmoe.config.text.finetune import finetune_config
from acmoe.data.images.augment import normalize
from acmoe.data.images.pixels import centre_crop
from acmoe.data.text.sentences import load_sentences
from acmoe.errors import UserError
from acmoe.evaluate.images.run import evaluate_image_run
from acmoe.evaluate.run import open_corpus, open_image_run, open_run
from acmoe.models.capacity import override_capacity
from acmoe.train.finetune import finetune
from tiny_runs import QUIET, byte_corpus, tiny_run, trained, word_corpus
from tiny_vision_runs import tiny_vision_run, trained_images

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from PIL import Image
from transformers import AutoModelForImageClassification, AutoTokenizer, pipeline

from acmoe.hf.models.export import export_run
from acmoe.hf.models.restore import restore_run

pytestmark = pytest.mark.slow

TASK = "sentence\tlabel\n" + "".join(
    f"film {n} is {'good' if n % 2 else 'poor'}\t{n % 2}\n" for n in range(48)
)


@pytest.mark.parametrize("form", ["clean", "paper"])
def test_a_finetuned_classifier_is_as_accurate_as_in_its_run(form, tmp_path):
    run = open_run(trained(tiny_run(byte_corpus(tmp_path), "steps=6"), tmp_path / "run"))
    data = tmp_path / "task"
    data.mkdir()
    for split in ("train", "dev", "test"):
        (data / f"{split}.tsv").write_text(TASK)
    config = replace(finetune_config("sst2", form), epochs=2, lr=1e-2, device="cpu")
    report = finetune(run, config, data, console=QUIET)
    export_run(report.folder, tmp_path / "hf")
    classify = pipeline("text-classification", model=str(tmp_path / "hf"))
    rows = load_sentences("sst2", data)["test"]
    # The paper's classifier reads padding, so batches must be those of the run: 16 in order.
    found = classify([text for text, _ in rows], batch_size=16, padding=True)
    right = sum(answer["label"] == str(row.label) for answer, row in zip(found, rows, strict=True))
    assert 100 * right / len(rows) == pytest.approx(report.test_accuracy)
    card = (tmp_path / "hf" / "README.md").read_text()
    assert f"| dev accuracy | {report.dev_accuracy:.4f} |" in card
    with pytest.raises(UserError, match="finetuned classifier"):
        restore_run(tmp_path / "hf", tmp_path / "back")


def test_a_run_on_words_has_its_words(tmp_path):
    corpus = word_corpus(tmp_path)
    config = tiny_run(corpus, "data.name=words", "steps=4", "eval_every=4")
    vocabulary = open_corpus(config.data).vocabulary
    model = replace(config.model, vocab_size=vocabulary.size)
    run = open_run(trained(replace(config, model=model), tmp_path / "run"))
    export_run(run.folder, tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "the red cat number 3\nsaw an elephant"
    ids = vocabulary.encode(text).tolist()
    assert tokenizer(text).input_ids == ids
    assert tokenizer.decode(ids) == vocabulary.decode(ids)
    new = run.model().generate([ids], 5, temperature=0)[0].tolist()
    generate = pipeline("text-generation", model=str(tmp_path / "hf"))
    found = generate(text, max_new_tokens=5, do_sample=False, return_tensors=True)
    assert found[0]["generated_token_ids"] == ids + new


@pytest.mark.parametrize("soft", [False, True])
def test_an_image_run_goes_there_and_back(soft, tmp_path):
    options = ("ema=0.5",) if soft else ()
    run = open_image_run(trained_images(tiny_vision_run(*options, soft=soft), tmp_path / "run"))
    export_run(run.folder, tmp_path / "hf", ema=soft)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "hf")
    state = run.model(ema=soft).state_dict()
    assert all(torch.equal(loaded.model.state_dict()[name], state[name]) for name in state)
    images = run.images()["test"]
    classify = pipeline("image-classification", model=str(tmp_path / "hf"))
    config = ImageEvaluateConfig(split="test")
    before = evaluate_image_run(run, config, ema=soft, device="cpu").report
    found = classify([Image.fromarray(images.pixels(n)) for n in range(40)], top_k=1)
    assert {answer[0]["label"] for answer in found} <= set(images.classes)
    restore_run(tmp_path / "hf", tmp_path / "back")
    back = open_image_run(tmp_path / "back")
    after = evaluate_image_run(back, config, device="cpu").report
    assert after == before
    hits = sum(
        answer[0]["label"] == images.classes[images.labels[n]] for n, answer in enumerate(found)
    )
    with torch.no_grad():
        ours = hits_of(run.model(ema=soft), images, run.config.data)
    assert hits == ours


def hits_of(model, images, data):
    """Count the images, of the first 40, that the library's own model classifies correctly."""
    hits = 0
    with override_capacity(model, None):
        for number in range(40):
            cut = centre_crop(images.pixels(number), resize=data.shorter_side, size=data.size)
            x = normalize(torch.tensor(cut).permute(2, 0, 1)[None], *data.normalization)
            hits += int(model(x).logits.argmax()) == int(images.labels[number])
    return hits
