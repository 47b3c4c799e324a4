"""M fades to the identity during training: the option `fade_steps`.

T tokens, D features, C clusters.
"""

import copy
import math
from dataclasses import replace

import pytest
import torch
from filled_layers import see
from variant_cases import taker

import acmoe
from acmoe import SMoEConfig, fold_statistics
from acmoe.config.text.language import LanguageConfig
from acmoe.evaluate.run import open_corpus
from acmoe.lab.study.cells.scale_statistics import model_scale_statistics
from acmoe.lab.variants import VariantConfig
from acmoe.models.registry import build_model
from acmoe.train.run import train
from acmoe.train.text import TextTrainer
from tiny_runs import QUIET, byte_corpus, records, tiny_run

MODEL = LanguageConfig(
    vocab_size=64, dim=16, heads=2, hidden=8, repeats=3, span=8, block=8, dropout=0.0, num_experts=3
)
GATE = SMoEConfig(bias=True)
FADING = VariantConfig(base=GATE, statistics="batch", statistics_of="previous", fade_steps=3)
# Cluster 0: mean absolute deviations (1, 16). Cluster 1 has one token, so its scale is 1.
TOKENS = torch.tensor([[1.0, 16.0], [-1.0, -16.0], [5.0, 5.0]])
CLUSTERS = torch.tensor([0, 0, 1])


def faded(share):
    """M of cluster 0 at that exponent: 16^-share beside 1, over the mean of the two."""
    weights = [1.0, 16.0**-share]
    return [2 * weight / sum(weights) for weight in weights]


def drawn(seed):
    return torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(seed))


def backward(model, seed):
    tokens = drawn(seed)
    found = model(tokens[:, :-1], tokens[:, 1:])
    (found.loss + found.aux_loss).backward()
    return found


def steps_of(model):
    """The counted steps of every layer that measures a scale."""
    return [value.item() for name, value in model.named_buffers() if name.endswith("fade.step")]


def test_m_in_the_middle_is_that_of_the_roots_of_s():
    # Exponents 1, 1/2, 0: (32, 2) / 17, then (8, 2) / 5, then ones, to the bit.
    assert faded(1) == pytest.approx([32 / 17, 2 / 17])
    assert faded(0.5) == pytest.approx([8 / 5, 2 / 5])
    statistics = taker(clusters=2, dim=2, statistics="batch", fade_steps=2)
    for wanted in ([32 / 17, 2 / 17], [8 / 5, 2 / 5], [1.0, 1.0], [1.0, 1.0]):
        found = see(statistics, TOKENS, CLUSTERS)
        assert found[0].tolist() == pytest.approx(wanted, rel=1e-6)
        assert found[1].tolist() == [1.0, 1.0]
        fold_statistics(statistics)
        fold_statistics(statistics)  # no forward has come since: it counts nothing
    assert torch.equal(found, torch.ones(2, 2))


def test_the_running_average_fades_as_well():
    statistics = taker(clusters=2, dim=2, momentum=0.0, fade_steps=4)
    see(statistics, TOKENS, CLUSTERS)
    fold_statistics(statistics)  # the average is this batch's from now on, at step 1
    for step in range(1, 6):
        found = see(statistics, TOKENS, CLUSTERS)
        assert found[0].tolist() == pytest.approx(faded(max(0.0, 1 - step / 4)), rel=1e-6)
        assert torch.equal(see(copy.deepcopy(statistics).eval(), TOKENS, CLUSTERS), found)
        fold_statistics(statistics)


def test_the_weight_multiplies_the_power():
    statistics = taker(clusters=2, dim=2, statistics="batch", fade_steps=2, power=0.5)
    see(statistics, TOKENS, CLUSTERS)
    fold_statistics(statistics)
    found = see(statistics, TOKENS, CLUSTERS)
    assert found[0].tolist() == pytest.approx(faded(0.25), rel=1e-6)  # (4, 2) / 3
    assert found[0].tolist() == pytest.approx([4 / 3, 2 / 3], rel=1e-6)


def test_optimizer_steps_count_and_forwards_do_not():
    torch.manual_seed(0)
    model = build_model(replace(MODEL, router=FADING)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        assert steps_of(model) == [float(step)] * 2  # the last of three layers measures nothing
        for micro_batch in range(2):
            backward(model, micro_batch)
        with torch.no_grad():
            model.eval()(drawn(9)[:, :-1])
        model.train()
        assert steps_of(model) == [float(step)] * 2
        optimizer.step()
    optimizer.step()  # no training forward came before
    assert steps_of(model) == [3.0, 3.0]


@pytest.mark.parametrize("checkpointed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_undisturbed_one_to_the_bit(checkpointed):
    def made():
        torch.manual_seed(0)
        model = build_model(replace(MODEL, router=FADING)).train()
        model.checkpoint_blocks = checkpointed
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def run(model, optimizer, seeds):
        for seed in seeds:
            optimizer.zero_grad()
            found = backward(model, seed)
            optimizer.step()
        return found.loss

    whole, part, resumed = made(), made(), made()
    loss = run(*whole, range(4))
    run(*part, range(2))
    for new, old in zip(resumed, part, strict=True):
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    assert steps_of(resumed[0]) == [2.0, 2.0]
    assert torch.equal(run(*resumed, range(2, 4)), loss)
    for name, value in whole[0].state_dict().items():
        assert torch.equal(resumed[0].state_dict()[name], value), name


def plain_weights(model):
    """The state_dict of the plain model with the weights of an adaptive one."""
    return {
        name.replace("router.base.", "router."): value.clone()
        for name, value in model.state_dict().items()
        if "statistics" not in name
    }


def test_faded_it_is_the_plain_model_to_the_bit():
    torch.manual_seed(0)
    models = [build_model(replace(MODEL, router=router)).train() for router in (FADING, GATE)]
    model, plain = models
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        plain.load_state_dict(plain_weights(model))
        for each in models:
            each.zero_grad()
        losses = [backward(each, step).loss for each in models]
        gradients = [
            torch.cat([p.grad.flatten() for p in each.parameters() if p.grad is not None])
            for each in models
        ]
        # Three steps fade: the fourth update is the first with M = I.
        assert torch.equal(*losses) == torch.equal(*gradients) == (step == 3)
        optimizer.step()
    assert [scale.rms_log for scale in model_scale_statistics(model)] == [0.0, 0.0]
    plain.load_state_dict(plain_weights(model))
    for mode in ("batch", "running"):
        with acmoe.override_statistics(model, eval_statistics=mode), torch.no_grad():
            logits = [each.eval()(drawn(7)[:, :-1]).logits for each in models]
        assert torch.equal(*logits)


def test_a_checkpoint_has_the_count_and_a_cast_keeps_it_exact():
    assert set(taker().state_dict()) == {"dispersion", "weight"}
    statistics = taker(fade_steps=5)
    assert set(statistics.state_dict()) == {"dispersion", "weight", "fade.step"}
    assert statistics.bfloat16().fade.step.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's
def test_a_compiled_layer_reads_the_present_weight():
    torch.manual_seed(0)
    moe = acmoe.MoE(dim=4, hidden=8, num_experts=3, top_k=2, router=replace(FADING, fade_steps=2))
    x = torch.randn(40, 4)
    torch._dynamo.reset()
    for layer in (copy.deepcopy(moe), moe):
        if layer is moe:
            layer.compile(fullgraph=True, backend="aot_eager")
        scales = []
        for _ in range(3):
            state = acmoe.RoutingState.identity(num_tokens=40, num_clusters=3, dim=4)
            scales.append(layer(x, state)[1].scale)
            fold_statistics(layer)
        assert torch.equal(scales[2], torch.ones(3, 4))
        ratio = scales[0].log()[:, :1] - scales[0].log()  # of features, without the mean
        half = scales[1].log()[:, :1] - scales[1].log()
        torch.testing.assert_close(2 * half, ratio, rtol=1e-4, atol=1e-5)
        assert ratio.abs().max() > 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_a_captured_update_fades(compiled, tmp_path):
    options = [
        *("device=cuda", "model.dropout=0", "model.router=adaptive-variant"),
        *("model.router.statistics=batch", "model.router.fade_steps=30", f"compile={compiled}"),
        *("steps=60", "log_every=3", "lr=0.0078125", "warmup=4", "schedule=constant"),
    ]
    corpus = byte_corpus(tmp_path, lines=60)
    losses = []
    for graph in ("false", "true"):
        config = tiny_run(corpus, f"graph={graph}", *options)
        train(config, tmp_path / graph, console=QUIET)
        losses.append([line["loss"] for line in records(tmp_path / graph)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    trainer = TextTrainer(config, open_corpus(config.data), torch.device("cuda"))
    for step in range(1, 13):
        trainer.update(step, record=False)
    assert trainer.graph is not None and trainer.graph.captured
    assert set(steps_of(trainer.model)) == {12.0}
    distances = [scale.rms_log for scale in model_scale_statistics(trainer.model)]
    for step in range(13, 31):
        trainer.update(step, record=False)
    assert all(0 < distance < math.inf for distance in distances)
    assert {scale.rms_log for scale in model_scale_statistics(trainer.model)} == {0.0}
