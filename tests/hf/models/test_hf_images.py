"""Image classifiers and their preprocessing behind transformers."""

import numpy as np
import pytest
import torch
from hf_cases import same_state

import acmoe
from acmoe.config.images.data import ImageDataConfig
from acmoe.data.images.augment import normalize
from acmoe.data.images.pixels import centre_crop
from acmoe.errors import UserError
from acmoe.models.capacity import override_capacity

pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

from transformers import (  # noqa: E402, after importorskip
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    pipeline,
)

from acmoe.hf import (  # noqa: E402
    AcmoeConfig,
    AcmoeForImageClassification,
    AcmoeImageProcessor,
)

DATA = ImageDataConfig(name="folder", source="elsewhere", size=32)
PIXELS = np.random.default_rng(0).integers(0, 256, (50, 71, 3), dtype=np.uint8)


def expected_pixels():
    cut = centre_crop(PIXELS, resize=DATA.shorter_side, size=32)
    return normalize(torch.tensor(cut).permute(2, 0, 1)[None], *DATA.normalization)


@pytest.fixture(scope="module", params=["swin-nano", "softmoe-nano"])
def saved(request, tmp_path_factory):
    """A model, the same one behind transformers, and the folder it was saved in."""
    torch.manual_seed(0)
    model = acmoe.create_model(request.param, router="adaptive").eval()
    ours = AcmoeForImageClassification(AcmoeConfig.of(model.config), model).eval()
    folder = tmp_path_factory.mktemp("images")
    ours.save_pretrained(folder)
    AcmoeImageProcessor.of(DATA).save_pretrained(folder)
    return model, ours, folder


def test_the_processor_is_the_evaluation_transform(saved):
    processor = AutoImageProcessor.from_pretrained(saved[2])
    images = [Image.fromarray(PIXELS), PIXELS]
    found = processor(images, return_tensors="pt")["pixel_values"]
    assert torch.equal(found, expected_pixels().expand(2, -1, -1, -1))
    grey = processor(Image.fromarray(PIXELS[..., 0]), return_tensors="pt")["pixel_values"]
    assert grey.shape == (1, 3, 32, 32)
    with pytest.raises(UserError, match="do_resize=False"):
        processor(images, do_resize=False)


def test_loaded_all_bits_are_the_same(saved):
    model, ours, folder = saved
    loaded = AutoModelForImageClassification.from_pretrained(folder)
    assert same_state(loaded, ours)
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    labels = torch.tensor([1, 2, 3])
    with torch.no_grad(), override_capacity(model, None):  # as in `acmoe evaluate`
        expected = model(images, labels, return_routings=True)
    with torch.no_grad():
        found = loaded(images, labels=labels, output_router_logits=True)
        alone = loaded(images[:1]).logits
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss + expected.aux_loss)
    assert len(found.router_logits) == len(expected.routings)
    torch.testing.assert_close(alone, found.logits[:1])  # no image takes another's expert


def test_hidden_states_are_refused_also_where_the_config_asks_for_them(saved):
    loaded = AcmoeForImageClassification.from_pretrained(saved[2], output_hidden_states=True)
    with pytest.raises(UserError, match="output_hidden_states=True is not supported"):
        loaded(torch.zeros(1, 3, 32, 32))


def test_the_pipeline_names_the_classes(saved):
    model, _, folder = saved
    found = pipeline("image-classification", model=str(folder))(Image.fromarray(PIXELS), top_k=2)
    with torch.no_grad(), override_capacity(model, None):
        best = int(model(expected_pixels()).logits.argmax())
    assert found[0]["label"] == f"LABEL_{best}"


def test_an_image_model_is_no_language_model(saved):
    with pytest.raises(UserError, match="no language model"):
        AutoModelForCausalLM.from_pretrained(saved[2])
