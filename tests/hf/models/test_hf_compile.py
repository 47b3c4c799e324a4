"""Our language model in one compiled graph: the same numbers as eager, and checks that hold."""

import copy
import logging

import pytest
import torch
from hf_cases import IMAGE_SIZES, language_model

import acmoe
from acmoe.ops import dispatch

pytest.importorskip("transformers")

from acmoe.hf import (
    AcmoeConfig,
    AcmoeForCausalLM,
    AcmoeForImageClassification,
    AcmoeForSequenceClassification,
)

pytestmark = [  # torch's own, while it compiles
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
IDS = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(1))
LEFT = torch.ones_like(IDS)
LEFT[0, :3] = 0
MASKS = {"none": None, "ones": torch.ones_like(IDS), "left": LEFT, "right": LEFT.flip(1)}
SLOW_MASKS = [pytest.param(one, marks=pytest.mark.slow) for one in ("none", "ones", "left")]
PAD = 256  # the first id after the vocabulary


def ours(statistics="running", **sizes):
    model = language_model(acmoe.AdaptiveConfig(statistics=statistics), dropout=0.0, **sizes)
    return AcmoeForCausalLM(AcmoeConfig.of(model.config), model)


def one_graph(model, backend="aot_eager"):
    torch.compiler.reset()
    return torch.compile(model, fullgraph=True, backend=backend)


@pytest.mark.parametrize("statistics", ["running", pytest.param("prefix", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["right", *SLOW_MASKS])
def test_training_steps_are_one_graph_and_those_of_the_eager_model(statistics, name):
    model = ours(statistics).train()
    twin = copy.deepcopy(model)
    for run, one in ((one_graph(model), model), (twin, twin)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(2):
            run(IDS, attention_mask=MASKS[name], labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = twin.state_dict()
    assert any("dispersion" in key for key in expected)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[key], atol=1e-6, rtol=1e-6, msg=key)


@pytest.mark.slow  # torch.compile takes seconds
def test_logits_are_those_of_the_eager_model_with_padding_on_either_side():
    model = ours().eval()
    compiled = one_graph(model)
    for mask in MASKS.values():
        real = torch.ones_like(IDS).bool() if mask is None else mask.bool()
        found, expected = (run(IDS, attention_mask=mask).logits[real] for run in (compiled, model))
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.slow  # torch.compile takes seconds
def test_padding_ids_need_an_attention_mask_in_compiled_code():
    model = ours().eval()
    padded = IDS.masked_fill(LEFT == 0, PAD)
    found = one_graph(model)(padded, attention_mask=LEFT).logits[LEFT.bool()]
    torch.testing.assert_close(found, model(padded).logits[LEFT.bool()])
    with pytest.raises(RuntimeError, match=r"the padding id 256; compiled code needs an attention"):
        one_graph(model)(padded)


def test_packed_texts_are_refused_in_compiled_code_too():
    usual = torch.arange(12)[None]
    compiled = one_graph(ours(repeats=1, placement=()).eval(), "eager")
    compiled(IDS, position_ids=usual)
    with pytest.raises(RuntimeError, match="texts cannot be packed into one row"):
        compiled(IDS, position_ids=usual % 6)


@pytest.mark.slow  # torch.compile takes seconds
def test_generate_calls_a_compiled_forward():
    model = ours().eval()
    options = {"attention_mask": LEFT, "max_new_tokens": 3, "do_sample": False}
    expected = model.generate(IDS, **options)
    torch.compiler.reset()
    model.forward = torch.compile(model.forward, backend="aot_eager")
    assert torch.equal(model.generate(IDS, **options), expected)


@pytest.mark.slow  # torch.compile takes seconds
@pytest.mark.parametrize("head", ["clean", "paper"])
def test_a_classifier_is_one_graph(head):
    backbone = language_model()
    config = AcmoeConfig.of(backbone.config, num_labels=3, head=head)
    model = AcmoeForSequenceClassification(config, backbone).eval()
    compiled = one_graph(model)
    for mask in (None, LEFT):
        found, expected = (run(IDS, attention_mask=mask).logits for run in (compiled, model))
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    if head == "paper":
        with pytest.raises(RuntimeError, match="the published form pads on the left"):
            compiled(IDS, attention_mask=LEFT.flip(1))


@pytest.mark.slow  # torch.compile takes seconds
def test_a_model_with_adapters_is_one_graph_and_says_once_what_it_runs(caplog):
    peft = pytest.importorskip("peft", reason="needs peft: pip install peft")
    torch.manual_seed(1)
    places = peft.LoraConfig(target_modules=["query", "unembed"], init_lora_weights=False)
    model = peft.get_peft_model(ours().eval(), places).train()
    twin = copy.deepcopy(model)
    dispatch._logged.clear()
    compiled = one_graph(model)
    with caplog.at_level(logging.INFO, "acmoe"):
        for run in (compiled, compiled, twin):
            run(input_ids=IDS, attention_mask=LEFT, labels=IDS).loss.backward()
    assert caplog.text.count("query is a peft.tuners.lora.layer.Linear, not a Linear") == 1
    gradients = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:  # two calls of the compiled model, one of the other
            torch.testing.assert_close(parameter.grad, 2 * gradients[name].grad)


@pytest.mark.slow  # torch.compile takes seconds
def test_an_image_classifier_is_one_graph():
    classifier = acmoe.create_model("swin-nano", router="adaptive", **IMAGE_SIZES).eval()
    model = AcmoeForImageClassification(AcmoeConfig.of(classifier.config), classifier).eval()
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(one_graph(model)(images).logits, model(images).logits)
