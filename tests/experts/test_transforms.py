"""`torch.func` and second derivatives of MoE layers (docs/design.md, Transforms), in float64."""

import pytest
import torch
from torch.func import functional_call, grad, jacrev, jvp, stack_module_state, vmap

import acmoe
from acmoe import AdaptiveConfig, MoE, RoutingState, SoftConfig, SoftMoE, UserError
from acmoe.ops.cross_entropy.op import chunked_cross_entropy
from acmoe.ops.dispatch import transforming

B, L, D, E = 2, 5, 4, 3
ROUTERS = {
    "smoe": "smoe",
    "batch": AdaptiveConfig(statistics="batch", statistics_of="current", detach=False),
    "detached": AdaptiveConfig(statistics="batch", statistics_of="current"),
    "strength": AdaptiveConfig(
        statistics="batch", statistics_of="current", detach=False, strength=0.5
    ),
    "running": AdaptiveConfig(),
    "sequence": AdaptiveConfig(statistics="sequence", detach=False, mix=2),
    "prefix": AdaptiveConfig(statistics="prefix", detach=False),
    "cosine": "cosine",
    "threshold": "threshold",
    "expert-choice": "expert-choice",
    "soft": AdaptiveConfig(
        base=SoftConfig(), statistics="batch", statistics_of="current", detach=False, mix=2
    ),
}


def layer_of(name):
    torch.manual_seed(0)
    if name == "soft":
        return SoftMoE(dim=D, hidden=6, num_experts=E, router=ROUTERS[name]).double().eval()
    options = {"dim": D, "hidden": 6, "num_experts": E, "top_k": 2, "activation": "gelu"}
    return MoE(router=ROUTERS[name], **options).double().eval()


def state_of(moe, sequences):
    tokens, mix = sequences * L, moe.router.mix
    state = RoutingState.identity(
        num_tokens=tokens, num_clusters=E, dim=D, mix=mix, dtype=torch.float64
    )
    cluster = (torch.arange(tokens)[:, None] + torch.arange(mix)) % E
    membership = torch.full((tokens, mix), 1 / mix, dtype=torch.float64)
    return state._replace(assignment=cluster, membership=membership)


def tokens(generator):
    return torch.randn(B, L, D, dtype=torch.float64, generator=generator)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's, of jvp
@pytest.mark.parametrize("name", ROUTERS)
def test_transforms_are_autograd_slopes_and_loops(name, generator):
    moe, x = layer_of(name), tokens(generator)
    parameters = {key: value.detach() for key, value in moe.named_parameters()}
    state = state_of(moe, B)

    def loss(x, parameters):
        y, after = functional_call(moe, parameters, (x, state))
        return y.pow(3).sum() + after.aux_loss

    found = grad(loss, argnums=(0, 1))(x, parameters)
    leaves = {key: value.clone().requires_grad_() for key, value in parameters.items()}
    at = x.clone().requires_grad_()
    wanted = torch.autograd.grad(
        loss(at, leaves), [at, *leaves.values()], allow_unused=True, materialize_grads=True
    )
    for one, other in zip([found[0], *found[1].values()], wanted, strict=True):
        torch.testing.assert_close(one, other)

    direction = torch.randn(x.shape, dtype=x.dtype, generator=generator)
    _, tangent = jvp(lambda x: loss(x, parameters), (x,), (direction,))
    torch.testing.assert_close(tangent, (wanted[0] * direction).sum())
    if name != "detached":
        step = 1e-6 * direction
        slope = (loss(x + step, parameters) - loss(x - step, parameters)) / 2e-6
        torch.testing.assert_close(tangent, slope, rtol=1e-6, atol=1e-8)

    alone = state_of(moe, 1)
    with torch.no_grad():
        batched = vmap(lambda x_LD: moe(x_LD[None], alone)[0][0])(x)
        looped = torch.stack([moe(x_LD[None], alone)[0][0] for x_LD in x])
    torch.testing.assert_close(batched, looped)


def test_vmap_of_a_layer_with_a_capacity_is_a_loop_without_warnings(generator):
    moe = MoE(dim=D, hidden=6, num_experts=E, top_k=2, capacity_factor=0.5).double().eval()
    x = tokens(generator)
    with torch.no_grad():
        batched = vmap(lambda x_LD: moe(x_LD)[0])(x)
        torch.testing.assert_close(batched, torch.stack([moe(x_LD)[0] for x_LD in x]))


def test_the_jacobian_is_that_of_autograd(generator):
    moe, x = layer_of("prefix"), tokens(generator)
    state = state_of(moe, B)
    found = jacrev(lambda x: moe(x, state)[0].sum((0, 2)))(x)
    wanted = torch.autograd.functional.jacobian(lambda x: moe(x, state)[0].sum((0, 2)), x)
    torch.testing.assert_close(found.detach(), wanted)


@pytest.mark.parametrize("name", ["smoe", pytest.param("batch", marks=pytest.mark.slow)])
def test_second_derivatives_of_tokens_and_experts(name, generator):
    moe, x = layer_of(name), tokens(generator)[:1, :3].requires_grad_()
    state = state_of(moe, 1)
    state = state._replace(assignment=state.assignment[:3], membership=state.membership[:3])
    up = moe.experts.up[:, :2].detach().requires_grad_()
    rest = {key: value.detach() for key, value in moe.named_parameters()}

    def run(x, up):
        whole = torch.cat([up, rest["experts.up"][:, 2:]], 1)
        return functional_call(moe, {**rest, "experts.up": whole}, (x, state))[0]

    assert torch.autograd.gradgradcheck(run, (x, up))
    found = grad(lambda x: grad(lambda x: run(x, up).pow(3).sum())(x).square().sum())(x.detach())
    (first,) = torch.autograd.grad(run(x, up).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    torch.testing.assert_close(found, second)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_batched_backward_is_a_loop_of_backwards(name, generator):
    moe, x = layer_of(name), tokens(generator).requires_grad_()
    y, _ = moe(x, state_of(moe, B))
    given_GBLD = torch.randn(3, *y.shape, dtype=y.dtype, generator=generator)
    inputs = [x, *moe.parameters()]
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}

    def backward(given):
        return torch.autograd.grad(y, inputs, given, **options)

    batched = torch.autograd.grad(y, inputs, given_GBLD, is_grads_batched=True, **options)
    mapped = vmap(backward)(given_GBLD)
    looped = zip(*map(backward, given_GBLD), strict=True)
    for one, two, wanted in zip(batched, mapped, looped, strict=True):
        torch.testing.assert_close(one, torch.stack(wanted))
        torch.testing.assert_close(two, torch.stack(wanted))


def test_a_batched_backward_of_experts_with_biases_is_a_loop_of_backwards(generator):
    moe = MoE(dim=D, hidden=6, num_experts=E, top_k=1, bias=True).double()
    y, _ = moe(tokens(generator))
    given_GBLD = torch.randn(3, *y.shape, dtype=y.dtype, generator=generator)
    experts = list(moe.experts.parameters())
    batched = torch.autograd.grad(y, experts, given_GBLD, is_grads_batched=True, retain_graph=True)
    for index, given in enumerate(given_GBLD):
        for one, wanted in zip(
            batched, torch.autograd.grad(y, experts, given, retain_graph=True), strict=True
        ):
            torch.testing.assert_close(one[index], wanted)


@pytest.mark.parametrize("loss", [False, True])
def test_a_batched_backward_of_a_language_model_is_a_loop_of_backwards(loss, generator):
    torch.manual_seed(0)
    model = acmoe.create_model("switch-nano", router="adaptive")
    words = torch.randint(0, 50, (2, 8), generator=generator)
    found = model(words, targets=words).loss if loss else model(words).logits
    given = torch.randn(2, *found.shape, generator=generator)
    learned = [one for one in model.parameters() if one.requires_grad]
    options = {"retain_graph": True, "materialize_grads": True}
    batched = torch.autograd.grad(found, learned, given, is_grads_batched=True, **options)
    for index in range(2):
        wanted = torch.autograd.grad(found, learned, given[index], **options)
        for one, other in zip(batched, wanted, strict=True):
            torch.testing.assert_close(one[index], other, rtol=1e-4, atol=5e-6)


def test_the_vectorized_hessian_is_that_of_autograd(generator):
    moe, x = layer_of("smoe"), tokens(generator)[0, :3]

    def loss(x):
        return moe(x)[0].square().sum()

    found = torch.autograd.functional.hessian(loss, x, vectorize=True)
    torch.testing.assert_close(found, torch.autograd.functional.hessian(loss, x))


def test_a_language_model_has_gradients_for_each_sequence(generator):
    torch.manual_seed(0)
    model = acmoe.create_model("switch-nano", router=AdaptiveConfig(statistics="prefix")).eval()
    words = torch.randint(0, 50, (2, 8), generator=generator)
    parameters = {key: value.detach() for key, value in model.named_parameters()}

    def loss(parameters, words):
        return functional_call(model, parameters, (words[None],), {"targets": words[None]}).loss

    found = vmap(grad(loss), in_dims=(None, 0))(parameters, words)
    for n in range(2):
        model.zero_grad()
        model(words[n : n + 1], targets=words[n : n + 1]).loss.backward()
        for key, parameter in model.named_parameters():
            wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found[key][n], wanted, rtol=1e-3, atol=1e-6)


def test_a_second_derivative_of_the_chunked_loss_raises_and_torch_func_has_it(generator):
    x = torch.randn(4, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(5, 3, dtype=torch.float64, generator=generator)
    targets = torch.tensor([0, 4, 2, 2])
    loss = chunked_cross_entropy(x, weight, None, targets)
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        first.square().sum().backward()

    def plain(x):
        return torch.nn.functional.cross_entropy(x @ weight.T, targets)

    def chunked(x):
        return chunked_cross_entropy(x, weight, None, targets)

    at = x.detach()
    torch.testing.assert_close(
        torch.func.hessian(chunked)(at), torch.autograd.functional.hessian(plain, at)
    )


def test_transforms_are_seen_from_inside_and_only_there():
    seen = []
    x = torch.ones(())

    def note(x):
        seen.append(transforming())
        return x * 2

    note(x)
    grad(note)(x)
    vmap(note)(x[None])
    with torch.autograd.forward_ad.dual_level():
        note(x)
    note(x)
    assert seen == [False, True, True, True, False]


def test_an_ensemble_of_layers_reads_the_statistics_of_each(generator):
    layers = [layer_of("running") for _ in range(2)]
    for index, moe in enumerate(layers):
        statistics = moe.next_state.statistics
        statistics.dispersion.copy_(torch.rand(E, D, generator=generator) + 0.1)
        statistics.weight.fill_(10.0 + index)
    x = tokens(generator)[0]
    parameters, buffers = stack_module_state(layers)

    def call(values):
        y, state = functional_call(layers[0], values, (x,))
        return y, state.scale

    y, scale = vmap(call)((parameters, buffers))
    for index, moe in enumerate(layers):
        own, state = moe(x)
        torch.testing.assert_close(y[index], own)
        torch.testing.assert_close(scale[index], state.scale)
    assert not torch.equal(scale[0], scale[1])


@pytest.mark.parametrize("name", ["batch", "running", "sequence", "prefix", "soft"])
def test_a_transform_of_a_layer_in_training_names_the_fix_and_records_nothing(name, generator):
    moe, x = layer_of(name).train(), tokens(generator)
    state = state_of(moe, 1)
    before = {key: value.clone() for key, value in moe.named_buffers()}
    with pytest.raises(UserError, match=r"call layer\.eval\(\), or give the buffers"):
        vmap(lambda x_LD: moe(x_LD[None], state)[0])(x)
    with pytest.raises(UserError, match=r"call layer\.eval\(\), or give the buffers"):
        grad(lambda x_LD: moe(x_LD[None], state)[0].sum())(x[0])
    for key, value in moe.named_buffers():
        assert torch.equal(value, before[key]), key
    moe.eval()
    assert vmap(lambda x_LD: moe(x_LD[None], state)[0])(x).shape == (B, 1, L, D)


@pytest.mark.parametrize("router", ["metric", acmoe.SMoEConfig(bias_balancing=0.1)])
def test_routers_with_statistics_of_their_own_name_the_same_fix(router, generator):
    moe = MoE(dim=D, hidden=6, num_experts=E, top_k=2, router=router).double()
    with pytest.raises(UserError, match=r"call layer\.eval\(\), or give the buffers"):
        vmap(lambda x_LD: moe(x_LD)[0])(tokens(generator))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, of lerp_
@pytest.mark.parametrize("name", ["batch", "running"])
def test_an_ensemble_in_training_records_the_statistics_of_each(name, generator):
    layers = [layer_of(name).train() for _ in range(2)]
    x, state = tokens(generator), state_of(layers[0], 1)
    parameters, buffers = stack_module_state(layers)

    def call(values, x_LD):
        return functional_call(layers[0], values, (x_LD[None], state))[0]

    found = vmap(call)((parameters, buffers), x)
    for index, moe in enumerate(layers):
        torch.testing.assert_close(found[index], moe(x[index][None], state)[0])
        for key, value in moe.named_buffers():
            torch.testing.assert_close(buffers[key][index], value)
    counts = [value for key, value in buffers.items() if key.endswith("last_count")]
    assert len(counts) == 1
    assert counts[0].any()
