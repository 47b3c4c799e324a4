"""Finetuned sentence classifiers behind transformers: the logits of the library's classifier."""

import pytest
import torch
from hf_cases import language_model, same_state

from acmoe.config.text.finetune import FinetuneConfig
from acmoe.data.text.sentence_batches import SentenceBatch
from acmoe.errors import UserError
from acmoe.train.finetune.classifier import Classifier, pad_left

pytest.importorskip("transformers")

from transformers import AutoModelForSequenceClassification

from acmoe.hf import AcmoeConfig, AcmoeForSequenceClassification

LENGTHS = (4, 7)


def batch():
    """Two sentences padded on the right."""
    tokens = torch.randint(256, (2, 7), generator=torch.Generator().manual_seed(4))
    mask = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
    last = torch.tensor(LENGTHS) - 1
    return SentenceBatch(tokens.masked_fill(~mask, 0), mask, last, torch.tensor([2, 0]))


@pytest.mark.parametrize("form", ["clean", "paper"])
def test_the_logits_are_those_of_the_finetuned_classifier(form, tmp_path):
    finetuning = FinetuneConfig(task="sst2", form=form, epochs=1, lr=1e-3)
    classifier = Classifier(language_model(), 3, finetuning).eval()
    config = AcmoeConfig.of(classifier.backbone.config, head=form, num_labels=3)
    ours = AcmoeForSequenceClassification(config, classifier.backbone, classifier.head).eval()
    ours.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert same_state(loaded, ours)
    sentences = batch()
    left = pad_left(sentences)
    given = sentences if form == "clean" else left
    with torch.no_grad():
        expected = classifier(given)
        mask = given.token_mask.long()
        found = loaded(given.tokens, attention_mask=mask, labels=given.labels)
    assert torch.equal(found.logits, expected)
    loss = torch.nn.functional.cross_entropy(expected, given.labels)
    assert float(found.loss) == pytest.approx(float(loss), rel=1e-6)
    if form == "clean":
        with torch.no_grad():  # padding on the other side changes nothing
            other = loaded(left.tokens, attention_mask=left.token_mask.long()).logits
        torch.testing.assert_close(other, expected)
    else:
        with pytest.raises(UserError, match="pads on the left"):
            loaded(sentences.tokens, attention_mask=sentences.token_mask.long())
    with torch.no_grad():
        states = loaded(given.tokens, attention_mask=mask, output_hidden_states=True).hidden_states
    last = (torch.arange(2), given.token_mask.long().cumsum(-1).argmax(-1))
    assert torch.equal(loaded.head(states[-1][last]), expected)
    with pytest.raises(UserError, match="leave position_ids out"):
        loaded(given.tokens, attention_mask=mask, position_ids=torch.ones(2, 7))
    with pytest.raises(UserError, match=r"input_ids holds id 300; ids must lie in \[0, 256\)"):
        loaded(torch.full((1, 2), 300))
    with pytest.raises(UserError, match=r"labels holds id 3; ids must lie in \[0, 3\)"):
        loaded(given.tokens, attention_mask=mask, labels=torch.tensor([2, 3]))
