"""The layer's benchmark: what is checked, what is refused, what is counted."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from acmoe.errors import UserError
from acmoe.lab.bench.harness.options import BOTH, FORWARD
from acmoe.lab.bench.harness.table import cells
from acmoe.lab.bench.implementations.check import Errors, WrongResultError, compare, reference
from acmoe.lab.bench.implementations.ours import build_moe, build_ours, plain_state
from acmoe.lab.bench.implementations.plain import activate, route
from acmoe.lab.bench.implementations.registry import (
    IMPLEMENTATIONS,
    Implementation,
    find_implementations,
)
from acmoe.lab.bench.implementations.weights import Weights
from acmoe.lab.bench.layers.layer import LayerConfig, bench_layer, draw_trial
from acmoe.lab.bench.shapes import SHAPES, Shape, find_shape, find_shapes
from acmoe.recipes.nano import switch_nano
from acmoe.routing.state import RoutingState

CPU = torch.device("cpu")
SHARED = ("assignment", "membership", "scale", "order", "origin")  # all fields but aux_loss


def entrant(name: str, change: Callable[[Tensor], Tensor]) -> Implementation:
    """Our layer with a changed output."""

    def build(shape: Shape, weights: Weights) -> Callable[[Tensor], Tensor]:
        layer = build_ours(shape, weights, "torch")
        return lambda x: change(layer(x))

    return Implementation(name=name, unsupported=lambda shape, x: None, build=build)


def fail(y: Tensor) -> Tensor:
    raise RuntimeError("no such kernel\nwith a long story")


def test_a_contestant_whose_output_is_a_tenth_too_large_gets_no_time() -> None:
    entrants = [entrant("right", lambda y: y), entrant("wrong", lambda y: 1.1 * y)]
    config = LayerConfig(shapes=("tiny",), repeat=2, device="cpu")
    rows = bench_layer(config, implementations=entrants).rows
    (wrong,) = [row for row in rows if row["contestant"] == "wrong"]
    # 1.1 y is off by a tenth of y, and so is its gradient
    assert "1.0e-01 forward, 1.0e-01 gradient" in wrong["refused"]
    assert wrong["ms"] is None and wrong["tflops"] is None
    right = [row for row in rows if row["contestant"] == "right"]
    assert [row["part"] for row in right] == [FORWARD, BOTH]
    assert all(row["ms"] > 0 and row["refused"] is None for row in right)


def test_forward_alone_runs_no_backward_and_checks_no_gradient() -> None:
    recorded = []

    def watch(y: Tensor) -> Tensor:
        recorded.append(y.requires_grad)
        return y

    bent = entrant("bent", lambda y: y.detach() + 0.9 * (y - y.detach()))  # a wrong gradient
    entrants = [entrant("watched", watch), bent, entrant("wrong", lambda y: 1.1 * y)]
    config = LayerConfig(shapes=("tiny",), repeat=2, device="cpu", forward=True)
    report = bench_layer(config, implementations=entrants)
    dense, watched, right, wrong = report.rows
    assert recorded and not any(recorded)
    assert report.kind == "layer-forward" and report.arguments["forward"] is True
    assert dense["contestant"] == "dense matmul"
    assert [row["part"] for row in (watched, right, wrong)] == [FORWARD] * 3
    assert right["ms"] > 0 and right["gradient_error"] is None
    assert wrong["refused"] == "WrongResultError: relative error 1.0e-01 forward; 1e-03 is allowed"
    assert wrong["ms"] is None
    # 512 rows of 32 features to 96 gate and up units, and 48 back to 32, as in both passes
    operations = 2 * 512 * (32 * 96 + 48 * 32)
    assert watched["tflops"] == pytest.approx(operations / watched["ms"] / 1e9)
    assert cells(report)[1][7] == f"{watched['forward_error']:.1e}"


def test_a_layer_that_is_wrong_without_gradients_only_is_refused() -> None:
    """Without gradients other kernels may run, and the forward pass is timed so."""
    config = LayerConfig(shapes=("tiny",), repeat=2, device="cpu")
    bad = entrant("bad", lambda y: y if torch.is_grad_enabled() else 1.1 * y)
    *_, row = bench_layer(config, implementations=[bad]).rows
    assert "relative error 1.0e-01 forward; " in row["refused"] and row["ms"] is None


def test_our_layer_is_timed_behind_another_plain_one() -> None:
    """It gets the state of the layer before and hands its tensors on, as in a model."""
    shape, weights = SHAPES["tiny"], draw_trial(SHAPES["tiny"], LayerConfig(), CPU).weights
    moe, x = build_moe(shape, weights), torch.randn(shape.tokens, shape.dim)
    given, passed_on = plain_state(shape, CPU), moe(x)[1]
    for name, mine, theirs in zip(given._fields, given, passed_on, strict=True):
        assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype, name
    after = moe(x, given)[1]
    assert all(getattr(after, name) is getattr(given, name) for name in SHARED)
    made_by_hand = RoutingState.before(x, num_clusters=shape.num_experts)
    assert moe(x, made_by_hand)[1].scale is not made_by_hand.scale


def test_a_contestant_with_the_right_output_and_a_wrong_gradient_is_refused() -> None:
    bent = entrant("bent", lambda y: y.detach() + 0.9 * (y - y.detach()))
    config = LayerConfig(shapes=("tiny-relu",), repeat=2, device="cpu", dtype="fp32")
    *_, row = bench_layer(config, implementations=[bent]).rows
    assert "1.0e-01 gradient" in row["refused"] and row["ms"] is None


def test_a_contestant_that_fails_or_gives_nan_does_not_end_the_run() -> None:
    broken = [entrant("broken", fail), entrant("nan", lambda y: y * float("nan"))]
    config = LayerConfig(shapes=("tiny",), repeat=2, device="cpu")
    _, first, second = bench_layer(config, implementations=broken).rows
    assert first["refused"] == "RuntimeError: no such kernel"
    assert "nan forward" in second["refused"]


def test_on_a_cpu_rivals_are_listed_with_what_they_lack() -> None:
    lacking = ("acmoe+compile", "grouped_mm", "scattermoe", "sonicmoe", "liger")
    rows = bench_layer(LayerConfig(shapes=("tiny",), rivals=lacking, repeat=2, device="cpu")).rows
    absent = {row["contestant"]: row["absent"] for row in rows if row["absent"]}
    assert "CUDA" in absent["acmoe+compile"]
    assert set(lacking) == set(absent)
    assert {row["contestant"] for row in rows if row["ms"]} == {"dense matmul", "acmoe"}


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["tiny", "tiny-relu"])  # gated; not gated, with biases
def test_on_a_cpu_the_experts_of_transformers_take_part(shape: str) -> None:
    pytest.importorskip("transformers")
    rows = bench_layer(LayerConfig(shapes=(shape,), repeat=2, device="cpu")).rows
    timed = {row["contestant"] for row in rows if row["ms"]}
    assert timed == {"dense matmul", "acmoe", "transformers", "transformers-eager"}


def test_a_cpu_measures_in_float32_unless_told_otherwise() -> None:
    assert LayerConfig().torch_dtype(CPU) == torch.float32
    assert LayerConfig().torch_dtype(torch.device("cuda")) == torch.bfloat16
    assert LayerConfig(dtype="fp16").torch_dtype(CPU) == torch.float16
    with pytest.raises(UserError, match="dtype"):
        LayerConfig(dtype="fp8")


def test_nano_is_the_layer_of_the_recipe() -> None:
    run, nano = switch_nano(), SHAPES["nano"]
    sizes = (nano.dim, nano.hidden, nano.num_experts, nano.top_k)
    model = run.model
    assert sizes == (model.dim, model.hidden, model.num_experts, model.top_k)
    assert nano.tokens == run.batch * model.block


def test_rates_follow_from_the_time_and_the_operations() -> None:
    config = LayerConfig(shapes=("tiny",), rivals=("torch",), repeat=2, device="cpu")
    rows = bench_layer(config).rows
    dense, forward, both = rows[:3]
    # 256 tokens, 2 experts each: 512 rows of 32 features to 96 gate and up units, and 48 back to 32
    operations = 2 * 512 * (32 * 96 + 48 * 32)
    assert forward["tflops"] == pytest.approx(operations / forward["ms"] / 1e9)
    assert both["tflops"] == pytest.approx(3 * operations / both["ms"] / 1e9)
    assert both["of_ceiling"] == pytest.approx(both["tflops"] / dense["tflops"])


def test_skewed_weights_send_nearly_half_of_the_tokens_to_one_expert() -> None:
    config = LayerConfig(shapes=("tiny",), rivals=("torch",), repeat=2, device="cpu", skew=True)
    row = bench_layer(config).rows[1]
    assert 0.38 < row["busiest_load"] < 0.52
    balanced = bench_layer(replace(config, skew=False)).rows[1]
    assert balanced["busiest_load"] < 0.35  # 2 of 8 experts is a quarter
    both = bench_layer(replace(config, skew=False, shapes=("tiny+skew",), tokens=(64, 256))).rows
    loads = {one["shape"]: one["busiest_load"] for one in both if one["busiest_load"]}
    assert list(loads) == ["tiny+skew@64", "tiny+skew@256"]
    assert loads["tiny+skew@256"] == row["busiest_load"] and loads["tiny+skew@64"] > 0.35
    with pytest.raises(UserError, match=r"'tiny\+odd': the load after \+ is unknown; write \+skew"):
        bench_layer(replace(config, shapes=("tiny+odd",)))


def test_an_even_load_gives_every_expert_the_same_number_of_rows() -> None:
    for name in ("tiny+even", "96x24x32x24x3-relu+even"):
        shape = find_shape(name)
        config = LayerConfig(shapes=(name,), rivals=("torch",), repeat=2, device="cpu")
        trial = draw_trial(shape, config, torch.device("cpu"))
        affinity_TE = trial.x.detach().double() @ trial.weights.embedding.detach().double().T
        load_E = affinity_TE.topk(shape.top_k).indices.flatten().bincount()
        assert load_E.tolist() == [shape.rows // shape.num_experts] * shape.num_experts
        assert bench_layer(config).rows[1]["busiest_load"] == shape.top_k / shape.num_experts
    few = LayerConfig(shapes=("8x4x4x6x1+even",), rivals=("torch",), repeat=2, device="cpu")
    with pytest.raises(UserError, match="6 experts and 4 features; an even load needs at least"):
        bench_layer(few)
    with pytest.raises(UserError, match=r"'tiny\+even' has an even load"):
        bench_layer(replace(config, shapes=("tiny+even",), skew=True))


@pytest.mark.parametrize("name", ["tiny", "tiny-relu"])
def test_the_reference_is_the_layer_one_token_at_a_time(name: str) -> None:
    trial = draw_trial(SHAPES[name], LayerConfig(dtype="fp32"), CPU)
    weights = [None if one is None else one.detach().double() for one in trial.weights]
    embedding, up, down, up_bias, down_bias = weights
    place = 3
    x = trial.x[int(trial.wanted.token[place])].detach().double().requires_grad_()
    affinity = embedding @ x
    chosen = affinity.argsort(descending=True)[: trial.shape.top_k]
    share = affinity[chosen].softmax(0) if len(chosen) > 1 else affinity.softmax(0)[chosen]
    y = torch.zeros_like(x)
    for weight, expert in zip(share, chosen, strict=True):
        h = up[expert] @ x + (0 if up_bias is None else up_bias[expert])
        out = down[expert] @ activate(h, trial.shape.activation)
        y = y + weight * (out + (0 if down_bias is None else down_bias[expert]))
    cotangent = trial.cotangent[int(trial.wanted.token[place])].double()
    (grad,) = torch.autograd.grad(y, x, cotangent)
    torch.testing.assert_close(trial.wanted.y[place], y)
    torch.testing.assert_close(trial.wanted.grad[place], grad)


def test_the_rivals_router_decides_as_ours() -> None:
    trial = draw_trial(SHAPES["tiny"], LayerConfig(dtype="fp32"), CPU)
    expert_ids, gate = route(trial.x, trial.weights.embedding, 2)
    affinity = trial.x @ trial.weights.embedding.T
    assert torch.equal(expert_ids, affinity.topk(2).indices)
    torch.testing.assert_close(gate, affinity.topk(2).values.softmax(-1))


def test_a_scale_enters_the_reference_router_and_not_its_experts() -> None:
    trial = draw_trial(SHAPES["tiny"], LayerConfig(dtype="fp32"), CPU)
    ones = torch.ones_like(trial.x)
    same = reference(trial.x, trial.cotangent, trial.weights, trial.shape, scale_TD=ones)
    assert torch.equal(same.y, trial.wanted.y)
    # Scaled by 1e-9 all affinities vanish: each of the two chosen experts gets half.
    faint = reference(trial.x, trial.cotangent, trial.weights, trial.shape, scale_TD=1e-9 * ones)
    token = int(faint.token[0])
    affinity = trial.weights.embedding.detach().double() @ trial.x[token].detach().double()
    y = torch.zeros(trial.shape.dim, dtype=torch.float64)
    for expert in affinity.topk(2).indices:
        h = trial.weights.up[expert].detach().double() @ trial.x[token].detach().double()
        y += 0.5 * (trial.weights.down[expert].detach().double() @ activate(h, "swiglu"))
    torch.testing.assert_close(faint.y[0], y, rtol=1e-6, atol=1e-6)


def test_errors_are_relative_and_nan_is_never_small() -> None:
    trial = draw_trial(SHAPES["tiny"], LayerConfig(dtype="fp32"), CPU)
    y = torch.zeros_like(trial.x).double()
    y[trial.wanted.token] = 1.5 * trial.wanted.y
    grad = torch.zeros_like(y)
    errors = compare(y, grad, trial.wanted)
    assert errors == pytest.approx(Errors(0.5, 1.0))
    Errors(0.01, 0.01).require(0.02)
    for bad in (Errors(float("nan"), 0.0), Errors(0.0, float("nan")), Errors(0.02, 0.0)):
        with pytest.raises(WrongResultError):
            bad.require(0.02)


def test_the_published_shapes_have_the_published_operations() -> None:
    # 32768 tokens x 8 experts = 262,144 rows; 3 matrices of 2048 x 1024; 2 operations; x 3
    olmoe = SHAPES["olmoe"]
    assert olmoe.flops(backward=True) == 3 * 2 * 262_144 * 3 * 2048 * 1024
    # relu experts have 2 matrices
    assert SHAPES["switch"].flops(backward=False) == 2 * 49_152 * 2 * 352 * 352


def test_a_shape_may_be_given_by_its_sizes() -> None:
    (own, gated) = find_shapes(["192x24x32x4x1-relu", "8192x4096x14336x8x2"], CPU)
    assert own == replace(SHAPES["tiny-relu"], name="192x24x32x4x1-relu")
    assert gated == replace(SHAPES["mixtral"], name="8192x4096x14336x8x2")


def test_a_shape_may_have_other_numbers_of_tokens() -> None:
    few, many = find_shapes(["dsv2lite"], CPU, [2048, 32768])
    assert few == replace(SHAPES["dsv2lite"], name="dsv2lite@2048", tokens=2048)
    assert (many.rows, many.name) == (32768 * 6, "dsv2lite@32768")
    assert find_shapes(["dsv2lite@2048"], CPU) == [few]
    assert find_shapes([], CPU, [5])[0] == replace(SHAPES["tiny"], name="tiny@5", tokens=5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tiny@", "give a number of tokens after @"),
        ("tiny@32+skew", r"the load before it, as in tiny\+skew@32$"),
        ("tiny@0", "cannot have 0 tokens"),
        ("8192x4096x14336x8", "give your own as TOKENSxFEATURES"),
        ("8192x4096x14336x8xtwo", "give your own as TOKENSxFEATURES"),
        ("8192x4096x14336x8x-2", "give your own as TOKENSxFEATURES"),
        ("8192x4096x14336x8x2-tanh", "activation 'tanh' is unknown; choose relu, gelu, swiglu"),
        ("8192x4096x14336x8x2-", "activation '' is unknown"),
        ("8192x0x14336x8x2", "holds a zero"),
        (f"8x{10**18}x16x4x2", "holds the size 1000000000000000000; give at most 18 digits"),
        (f"tiny@{10**30}", "holds the size 10+; give at most 18 digits"),
        (f"tiny@{'9' * 5000}", "give at most 18 digits"),
        ("8192x4096x14336x2x8", "to 8 of 2 experts"),
    ],
)
def test_sizes_that_are_no_layer_are_refused(name: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        find_shapes([name], CPU)


@pytest.mark.parametrize("name", ["1x8x8x2x1", "37x20x12x3x3-gelu"])
def test_a_layer_of_any_size_is_checked_and_timed(name: str) -> None:
    """One token, and sizes that no block divides."""
    report = bench_layer(LayerConfig(shapes=(name,), repeat=2, dtype="fp32", device="cpu"))
    (row,) = [row for row in report.rows if row["contestant"] == "acmoe" and row["part"] == BOTH]
    assert row["shape"] == name and row["ms"] > 0 and row["refused"] is None


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"shape 'olm' is unknown; choose among olmoe"):
        find_shapes(["olm"], CPU)
    with pytest.raises(UserError, match=r"rival 'sonic' is unknown; choose among acmoe"):
        find_implementations(["sonic"])
    with pytest.raises(UserError, match=r"dtype='int8' is unknown"):
        LayerConfig(dtype="int8")
    with pytest.raises(UserError, match="CUDA graphs"):
        bench_layer(LayerConfig(graph=True, device="cpu"))


def test_the_reference_backend_takes_part_only_when_named() -> None:
    default = [one.name for one in find_implementations([])]
    assert "torch" not in default and default[0] == "acmoe"
    assert [one.name for one in find_implementations(["torch"])] == ["acmoe", "torch"]
    assert len({one.name for one in IMPLEMENTATIONS}) == len(IMPLEMENTATIONS)


def test_a_report_on_the_rival_that_is_slow_to_start_has_a_name_of_its_own():
    assert LayerConfig().kind == "layer"
    assert LayerConfig(rivals=("grouped_mm+compile", "scattermoe")).kind == "layer"
    assert LayerConfig(rivals=("grouped_mm+compile",), graph=True).kind == "layer-graph"
    assert LayerConfig(rivals=("sonicmoe",)).kind == "layer-sonicmoe"
    assert (
        LayerConfig(rivals=("sonicmoe",), skew=True, graph=True).kind == "layer-sonicmoe-skew-graph"
    )
    assert LayerConfig(skew=True, forward=True, graph=True).kind == "layer-skew-forward-graph"
