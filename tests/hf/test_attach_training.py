"""Training an attached model: gradients, statistics at optimizer steps, blend, calibration."""

import copy
from typing import Any

import pytest
import torch
from attached import ids, logits, measured, statistics
from small_models import build, inputs
from torch import Tensor, nn

import acmoe
import acmoe.hf
from acmoe import AdaptiveConfig, UserError
from acmoe.hf.blend import Blend
from acmoe.hf.discovery import find_stacks
from acmoe.hf.parts import attached_parts
from slow_cases import mostly_slow


def gradients(model: nn.Module) -> Tensor:
    """Return the gradients of two forward passes in flight, the second of them with padding."""
    model.zero_grad()
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 6:] = 0
    losses = [
        model(ids(2, 8, seed), one, labels=ids(2, 8, seed), use_cache=False).loss
        for seed, one in ((1, None), (2, mask))
    ]
    (losses[0] + 2 * losses[1]).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    ("mode", "reentrant"),
    [
        ("running", False),
        ("prefix", True),
        pytest.param("running", True, marks=pytest.mark.slow),
        pytest.param("prefix", False, marks=pytest.mark.slow),
    ],
)
def test_checkpointing_gives_the_same_gradients_and_counts_once(mode: str, reentrant: bool) -> None:
    model = measured(statistics=mode).train()
    plain = gradients(model)
    pending = [(one.last_dispersion.clone(), one.last_count.clone()) for one in statistics(model)]
    for one in statistics(model):
        one.last_count.zero_()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert torch.equal(gradients(model), plain)
    again = [(one.last_dispersion, one.last_count) for one in statistics(model)]
    torch.testing.assert_close(again, pending, atol=0, rtol=0)


def test_saved_tensors_of_checkpoints_may_be_read_after_the_pass() -> None:
    """Tools that draw the graph of autograd do so: it repeats a layer, outside of any backward."""
    model = acmoe.attach(build("mixtral"), AdaptiveConfig(statistics="running")).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    nodes = [model(ids(2, 8), labels=ids(2, 8), use_cache=False).loss.grad_fn]
    for node in nodes:  # grows
        nodes += [one for one, _ in node.next_functions if one is not None and one not in nodes]
    names = [(node, name) for node in nodes for name in dir(node) if name.startswith("_saved_")]
    assert len([getattr(node, name) for node, name in names]) > 100


def test_a_router_whose_scores_are_computed_from_its_output_is_checkpointed() -> None:
    """Gemma 4 gives probabilities, whose logarithms are read: this must save no tensor."""
    model = measured("gemma4").train()
    plain = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert torch.equal(gradients(model), plain)


def test_layers_that_training_skips_at_random_are_refused() -> None:
    model, tokens = acmoe.attach(build("nllb_moe")), inputs("nllb_moe")
    assert model.model.encoder.layerdrop == 0.05
    logits(model, **tokens)
    with pytest.raises(UserError, match=r"model.encoder skips layers .*\(layerdrop=0.05\)"):
        model.train()(**tokens)
    model.get_submodule("model.encoder").layerdrop = 0.0
    with pytest.raises(UserError, match=r"get_submodule\('model.decoder'\).layerdrop = 0.0"):
        model(**tokens)
    model.get_submodule("model.decoder").layerdrop = 0.0
    model(**tokens)


def test_a_gradient_through_the_scale_survives_checkpointing_or_is_refused() -> None:
    fields = {"statistics": "batch", "eval_statistics": "running", "detach": False}
    model = measured(**fields).train()
    plain = gradients(model)
    detached = measured(**{**fields, "detach": True}).train()
    assert not torch.equal(gradients(detached), plain)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert torch.equal(gradients(model), plain)
    model.gradient_checkpointing_disable()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(UserError, match="'use_reentrant': False"):
        gradients(model)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.train()(input_ids=ids(), labels=ids()).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def averages(model: nn.Module) -> list[Tensor]:
    return [one.dispersion.clone() for one in statistics(model)]


def test_an_optimizer_moves_the_statistics_of_its_own_model_alone() -> None:
    model = acmoe.attach(build("mixtral"))
    twin = copy.deepcopy(model).train()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.0) for one in (model, twin)]
    twin(input_ids=ids(), labels=ids()).loss.backward()
    step(model, optimizers[0])
    assert all(found.any() for found in averages(model))
    assert not any(found.any() for found in averages(twin))
    optimizers[1].step()
    torch.testing.assert_close(averages(twin), averages(model), atol=0, rtol=0)


def test_blend_rises_by_itself_from_the_plain_to_the_adaptive_router() -> None:
    model = acmoe.attach(build("mixtral"), AdaptiveConfig(statistics="batch"), blend_steps=3)
    blends = [module for module in model.modules() if isinstance(module, Blend)]
    plain = logits(build("mixtral"), input_ids=ids())
    assert len(blends) == 3
    assert torch.equal(logits(model, input_ids=ids()), plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = []
    for _ in range(4):
        step(model, optimizer)
        acmoe.fold_statistics(model)  # a second update changes nothing
        seen.append([blend.value.item() for blend in blends])
    third = torch.tensor(1 / 3).item()
    assert seen[0] == [third] * 3
    assert seen[2:] == [[1.0] * 3, [1.0] * 3]
    whole = acmoe.attach(build("mixtral"), AdaptiveConfig(statistics="batch"))
    adaptive = logits(whole, input_ids=ids())
    assert torch.equal(logits(model.eval(), input_ids=ids()), adaptive)
    acmoe.hf.set_blend(model, 0.0)
    assert torch.equal(logits(model, input_ids=ids()), plain)
    kept = acmoe.attach(build("mixtral"), blend_steps=3)
    kept.load_state_dict(model.state_dict())
    assert all(m.value == 0 for m in kept.modules() if isinstance(m, Blend))


def test_half_a_blend_is_half_of_each_input() -> None:
    model = acmoe.attach(build("mixtral"), AdaptiveConfig(statistics="batch"), layers=[1])
    router = model.model.layers[1].mlp.gate
    read: list[Tensor] = []
    router.register_forward_pre_hook(lambda module, args: read.append(args[0].double()))
    for blend in (0.0, 0.5, 1.0):
        acmoe.hf.set_blend(model, blend)
        logits(model, input_ids=ids())
    torch.testing.assert_close(read[1], (read[0] + read[2]) / 2, atol=1e-6, rtol=1e-6)
    assert not torch.equal(read[0], read[2])


@pytest.mark.parametrize(
    ("name", "field"), [("phimoe", "input_jitter_noise"), ("dbrx", "moe_jitter_eps")]
)
def test_noise_that_a_router_adds_in_place_reaches_the_experts(name: str, field: str) -> None:
    model = build(name)
    routers = [found.module for stack in find_stacks(model) for found in stack.routers]
    for router in routers:
        setattr(router, field, 0.3)
    tokens = inputs(name)

    def trained() -> Tensor:
        torch.manual_seed(3)
        return logits(model.train(), **tokens)

    before = trained()
    acmoe.attach(model)  # M = I: the same draws give the same bits
    assert torch.equal(trained(), before)
    acmoe.detach(model)
    assert [getattr(router, field) for router in routers] == [0.3] * len(routers)
    assert torch.equal(trained(), before)
    for router in routers:
        setattr(router, field, None if name == "dbrx" else 0.0)
    assert not torch.equal(trained(), before)


@pytest.mark.parametrize("blend", [-0.1, 1.1, float("nan")])
def test_a_blend_outside_its_range_is_refused(blend: float) -> None:
    with pytest.raises(UserError, match=r"it must lie in \[0, 1\]"):
        acmoe.hf.set_blend(acmoe.attach(build("mixtral")), blend)
    with pytest.raises(UserError, match="has no attached router"):
        acmoe.hf.set_blend(build("mixtral"), 0.5)


def test_calibration_changes_the_running_average_and_nothing_else() -> None:
    model = acmoe.attach(build("mixtral"), blend_steps=5)
    model.train()(input_ids=ids())  # a batch that waits for its optimizer step
    model.model.layers[1].eval()
    held = {name: t.clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    batches = [ids(4, 24, 7), {"input_ids": ids(4, 24, 8)}]
    assert acmoe.calibrate(model, batches) is model
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    changed = {
        name.rsplit(".", 1)[1]
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if not torch.equal(tensor, held[name])
    }
    assert changed == {"dispersion", "weight", "running_scale"}


def test_calibration_is_training_steps_with_weights_that_stand_still() -> None:
    trained, measured = (acmoe.attach(build("mixtral")) for _ in range(2))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.0)
    for seed in (1, 2):
        trained.train()(input_ids=ids(4, 12, seed), labels=ids(4, 12, seed)).loss.backward()
        optimizer.step()
    acmoe.calibrate(measured, [ids(4, 12, 1), ids(4, 12, 2)])
    torch.testing.assert_close(averages(measured), averages(trained), atol=1e-6, rtol=0)


def test_calibration_that_cannot_be_is_refused() -> None:
    model = acmoe.attach(build("mixtral"))
    with pytest.raises(UserError, match="batches is empty"):
        acmoe.calibrate(model, [])
    with pytest.raises(UserError, match="batches holds a list"):
        acmoe.calibrate(model, [[1, 2, 3]])
    for batch in (ids(), {"input_ids": ids()}):
        with pytest.raises(UserError, match=r"which is one batch; pass a list, \[batch\]"):
            acmoe.calibrate(model, batch)
    for tensor in (ids()[0], ids().float()):
        with pytest.raises(UserError, match=r"of torch\.\w+; pass token ids \(B, L\)"):
            acmoe.calibrate(model, [tensor])
    for row, shown in ((ids()[0], r"a tensor \(10,\)"), (ids()[0].tolist(), "a list")):
        with pytest.raises(UserError, match=f"input_ids are {shown}, as in one row of a dataset"):
            acmoe.calibrate(model, [{"input_ids": row}])
    with pytest.raises(UserError, match="batches is a NoneType; pass a list of batches"):
        acmoe.calibrate(model, None)
    with pytest.raises(UserError, match="has no attached router"):
        acmoe.calibrate(build("mixtral"), [ids()])
    whole = acmoe.attach(build("mixtral"), AdaptiveConfig(statistics="batch"))
    with pytest.raises(UserError, match="statistics='batch' never read a running average"):
        acmoe.calibrate(whole, [ids()])


def test_one_graph_before_and_after_the_statistics_move() -> None:
    from torch._dynamo.testing import CompileCounter

    model = acmoe.attach(build("mixtral"), AdaptiveConfig(momentum=0.5), layers=[1], blend_steps=4)
    model.set_experts_implementation("batched_mm")  # grouped_mm has no fullgraph backward on a CPU
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    twin = copy.deepcopy(model)
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, fullgraph=True, backend=counter)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin)]
    for seed in (1, 2, 3):
        arguments = {"input_ids": ids(2, 6, seed), "labels": ids(2, 6, seed), "use_cache": False}
        for run, one, optimizer in zip((compiled, twin), (model, twin), optimizers, strict=True):
            one.train()
            optimizer.zero_grad()
            run(**arguments).loss.backward()
            optimizer.step()
    torch.testing.assert_close(averages(model), averages(twin), atol=1e-6, rtol=1e-6)
    assert all(found.any() for found in averages(model))
    assert {m.value.item() for m in model.modules() if isinstance(m, Blend)} == {0.75}
    assert counter.frame_count == 1
    assert all(part.context is None for part in attached_parts(model).values())
    torch._dynamo.reset()


def two_layers() -> nn.Module:
    """Mixtral with two of its four layers, each of which is a graph of its own."""
    plain: Any = build("mixtral")
    plain.model.layers = plain.model.layers[:2]
    plain.config.num_hidden_layers = 2
    return acmoe.attach(plain, AdaptiveConfig(momentum=0.5)).train()


@mostly_slow(("part", "limit"), [("", 8), ("", 1), ("mlp", 8), ("mlp.gate", 1)], keep={1, 3})
@torch.no_grad()
def test_layers_and_parts_of_layers_that_are_compiled_count_alike(part: str, limit: int) -> None:
    """Each layer by itself, as regional compilation does; its MoE block by itself. A layer's depth
    is a constant of its graph: with a limit of one graph, most functions of the second layer run as
    they are, and call others that are compiled."""
    plain = two_layers()
    plain(input_ids=ids())
    torch.compiler.reset()
    model = two_layers()
    for layer in model.model.layers:
        layer.get_submodule(part).compile(backend="eager")
    with torch._dynamo.config.patch(recompile_limit=limit):
        model(input_ids=ids())
    for one, other in zip(statistics(model), statistics(plain), strict=True):
        assert torch.equal(one.last_count, other.last_count)
    assert all(part.context is None for part in attached_parts(model).values())
    torch.compiler.reset()
