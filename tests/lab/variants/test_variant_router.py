"""Stretching about the mean, powers and parts, in routers and layers.

T tokens, D features, E experts, C = E clusters.
"""

import warnings

import pytest
import torch
from filled_layers import see
from router_loops import dispersion, matrix, rows, scales
from variant_cases import taker
from variant_router_cases import PER_TOKEN, drawn, router_of

from acmoe import MoE, RoutingState, fold_statistics
from acmoe.lab.variants import VariantConfig
from slow_cases import mostly_slow


def loop_scale(x, cluster, clusters=3):
    return matrix(scales(dispersion(rows(x), cluster.tolist(), clusters), x.shape[1]))


@pytest.mark.parametrize("mode", ["batch", "running"])
@pytest.mark.parametrize("mix", [1, 2])
def test_centred_tokens_equal_a_loop(mode, mix):
    router = router_of(statistics=mode, statistics_of="current", center=True, momentum=0.0, mix=mix)
    x, state = drawn()
    if mix == 2:
        second = (state.assignment + 1) % 3
        share = torch.tensor([0.75, 0.25], dtype=torch.float64).expand(24, 2)
        state = state._replace(
            assignment=torch.cat([state.assignment, second], 1), membership=share
        )
    cluster = state.assignment[:, 0]
    if mode == "running":
        router.rescale(x, state)
        fold_statistics(router)
        router.eval()
    scale = loop_scale(x, cluster)
    means = [x[cluster == c].mean(0) for c in range(3)]
    wanted = []
    for t in range(24):
        token = torch.zeros(4, dtype=torch.float64)
        for c, share in zip(state.assignment[t].tolist(), state.membership[t], strict=True):
            token += share * (x[t] if c < 0 else scale[c] * (x[t] - means[c]) + means[c])
        wanted.append(token)
    tolerance = 1e-5 if mode == "running" else 1e-10  # running averages are float32
    torch.testing.assert_close(
        router.rescale(x, state).dense(), torch.stack(wanted), rtol=tolerance, atol=tolerance
    )


def test_centring_moves_no_clusters_mean():
    router = router_of(statistics="batch", statistics_of="current", center=True)
    plain = router_of(statistics="batch", statistics_of="current")
    x, state = drawn()
    cluster = state.assignment[:, 0]
    for c in range(3):
        before, after, moved = (
            tokens[cluster == c].mean(0)
            for tokens in (x, router.rescale(x, state).dense(), plain.rescale(x, state).dense())
        )
        torch.testing.assert_close(after, before)
        assert (moved - before).abs().max() > 0.1


def test_a_centred_running_router_knows_nothing_of_the_call():
    router = router_of(statistics_of="current", center=True, match=True)
    x, state = drawn()
    router(x, state)
    fold_statistics(router)
    router.eval()
    whole = router(x, state).affinity
    alone = [
        router(x[t : t + 1], state._replace(**{k: getattr(state, k)[t : t + 1] for k in PER_TOKEN}))
        for t in range(24)
    ]
    torch.testing.assert_close(torch.cat([found.affinity for found in alone]), whole)
    assert router.causal


def test_the_mean_has_a_gradient_only_where_the_scale_has():
    x, state = drawn()
    for detach in (True, False):
        router = router_of(statistics="batch", statistics_of="current", center=True, detach=detach)
        leaf = x.clone().requires_grad_()
        # Summed over a cluster the centred tokens are its sum, whatever M is; with a constant mean
        # the gradient is M instead of 1.
        router.rescale(leaf, state).dense()[state.assignment[:, 0] == 0].sum().backward()
        ones = leaf.grad[state.assignment[:, 0] == 0]
        assert torch.allclose(ones, torch.ones_like(ones)) is not detach


@pytest.mark.parametrize(
    "options", [{"match": True}, {"center": True, "statistics_of": "current", "match": True}]
)
def test_with_the_identity_a_variant_router_is_bitwise_its_base(options):
    x, _ = drawn()
    nothing = RoutingState.identity(num_tokens=24, num_clusters=3, dim=4, dtype=torch.float64)
    for mode in ("batch", "running"):
        router = router_of(statistics=mode, **options)
        assert torch.equal(router(x, nothing).affinity, router.base(x, nothing).affinity)


@torch.no_grad()
def test_decoding_goes_on_with_the_means_and_temperatures_of_the_prefill():
    router = router_of(statistics="batch", statistics_of="current", center=True, match=True).eval()
    x, state = drawn()
    slot = router.new_slot(1, device=None, dtype=torch.float64)
    first = router(x, state, cache=slot).affinity
    for t in range(3):
        one = state._replace(**{k: getattr(state, k)[t : t + 1] for k in PER_TOKEN})
        torch.testing.assert_close(router(x[t : t + 1], one, cache=slot).affinity[0], first[t])


@pytest.mark.parametrize("mode", ["batch", "running"])
@pytest.mark.parametrize(("power", "part"), [(0.5, "both"), (1.0, "own"), (0.25, "common")])
def test_statistics_give_the_reshaped_scale_of_their_dispersion(mode, power, part):
    statistics = taker(statistics=mode, power=power, part=part, momentum=0.0)
    x, state = drawn()
    cluster = state.assignment[:, 0]
    cluster = torch.where(cluster == 2, -1, cluster)  # cluster 2 stays empty
    see(statistics, x.float(), cluster)
    fold_statistics(statistics)
    found = see(statistics, x.float(), cluster).double()
    log = loop_scale(x, cluster)[:2].log()
    kept = {"both": log, "common": log.mean(0, keepdim=True), "own": log - log.mean(0)}[part]
    wanted = (power * kept).exp()
    wanted = (wanted / wanted.mean(1, keepdim=True)).expand(2, 4)
    torch.testing.assert_close(found[:2], wanted, rtol=1e-4, atol=1e-6)
    empty = wanted[0] if part == "common" else torch.ones(4, dtype=torch.float64)
    torch.testing.assert_close(found[2], empty, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["prefix", "sequence"])
def test_a_power_reaches_statistics_of_positions(mode):
    x, state = drawn()
    x, positions = x.view(2, 12, 4), state._replace(aux_loss=torch.zeros(()))
    found, paper = (
        router_of(statistics=mode, power=power).rescale(x, positions).dense() / x
        for power in (0.5, 1.0)
    )
    root = paper.sqrt()
    torch.testing.assert_close(found, root / root.mean(-1, keepdim=True))


VARIANTS = {
    "power": {"power": 0.5},
    "own": {"part": "own"},
    "matched": {"match": True},
    "centred": {"center": True, "statistics_of": "current"},
    "scheduled": {"strength": 1.0, "strength_end": 0.1, "strength_steps": 3},
    "learned": {"strength": 1.0, "learn_strength": True},
    "distance": {"distance": True},
}


@mostly_slow(
    ("name", "mode"),
    [(name, mode) for name in VARIANTS for mode in ("batch", "running")],
    keep={2 * n + n % 2 for n in range(len(VARIANTS))},  # each variant, in one mode
)
def test_three_steps_of_two_layers_stay_finite_and_differ_from_the_papers(name, mode):
    torch.manual_seed(0)
    outputs = []
    for options in (VARIANTS[name], {}):
        config = VariantConfig(statistics=mode, **options)
        torch.manual_seed(1)
        layers = torch.nn.ModuleList(
            MoE(dim=4, hidden=8, num_experts=3, top_k=2, router=config) for _ in range(2)
        )
        x = torch.randn(40, 4, generator=torch.Generator().manual_seed(2)) + 1
        for _ in range(3):
            layers.zero_grad()
            state = RoutingState.identity(num_tokens=40, num_clusters=3, dim=4)
            y = x
            for layer in layers:
                y, state = layer(y, state)
            y.square().sum().backward()
            fold_statistics(layers)
        grads = [p.grad for p in layers.parameters() if p.grad is not None]
        assert all(grad.isfinite().all() for grad in grads)
        outputs.append(y.detach())
    assert not torch.equal(*outputs)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["batch", "running"])
@pytest.mark.parametrize("name", ["own", "matched", "centred", "learned", "distance"])
def test_a_variant_layer_compiles_to_one_graph(name, mode):
    torch.manual_seed(0)
    config = VariantConfig(statistics=mode, **VARIANTS[name])
    moe = MoE(dim=4, hidden=8, num_experts=3, top_k=2, router=config)
    x, state = drawn()
    x, state = x.float(), state._replace(scale=state.scale.float(), membership=torch.ones(24, 1))
    gradients = []
    torch._dynamo.reset()
    for layer in (moe, torch.compile(moe, fullgraph=True, backend="aot_eager")):
        moe.zero_grad()
        with warnings.catch_warnings():  # of what dynamo itself does while it traces
            warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
            y, after = layer(x, state)
        (y.square().sum() + (after.scale * state.scale).sum()).backward()
        gradients.append([p.grad.clone() for p in moe.parameters() if p.grad is not None])
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_a_state_dict_of_version_0_1_is_read():
    options = {"statistics_of": "current", "center": True, "match": True}
    router, other = router_of(**options), router_of(**options, seed=1)
    x, state = drawn()
    router(x, state)
    fold_statistics(router)
    old = {
        f"remedies.{name}" if name.startswith(("means", "variances")) else name: value
        for name, value in router.state_dict().items()
    }
    assert "remedies.means.average" in old
    other.load_state_dict(old)
    found = [each.eval()(x, state).affinity for each in (router, other)]
    assert torch.equal(*found)
