"""torchtitan's DeepSeek-V3 and Qwen3 with adaptive routers, on one CPU process."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from acmoe.errors import UserError
from acmoe.routing.statistics.registry import parameters_around

pytest.importorskip("torchtitan", reason="needs torchtitan: pip install 'acmoe[titan]'")
pytestmark = pytest.mark.filterwarnings("default")  # warnings of torchtitan and its packages

OVERRIDES = ("acmoe.adapters.titan.adaptive_block", "acmoe.adapters.titan.final_norm")
VOCABULARY, LENGTH = 256, 32


def small_config(family: str, flavor: str) -> Any:
    """Three layers of a debug model with a small vocabulary."""
    import importlib

    config = importlib.import_module(f"torchtitan.models.{family}").model_registry(flavor).model
    config.vocab_size, config.layers = VOCABULARY, config.layers[:3]
    config.tok_embeddings.num_embeddings = config.lm_head.out_features = VOCABULARY
    return config


def with_overrides(config: Any, *imports: Any) -> Any:
    """Apply overrides as torchtitan's trainer does."""
    from torchtitan.config.override import OverrideConfig, apply_overrides

    apply_overrides(OverrideConfig(imports=list(imports)), config)
    return config


def sdpa(self: Any, q: Any, k: Any, v: Any, *, scale: Any = None, **rest: Any) -> torch.Tensor:
    """Causal attention without a compiler, which flex attention needs on a CPU."""
    heads = (one.transpose(1, 2) for one in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        *heads, is_causal=True, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def grouped(self: Any, *, A: Any, B_t: Any, offs: Any) -> torch.Tensor:
    """The grouped GEMM in float32: many CPUs have no bf16 instructions."""
    starts = [0, *offs.tolist()]
    parts = [
        A[begin:end].float() @ weight.float()
        for begin, end, weight in zip(starts, starts[1:], B_t, strict=False)
    ]
    return torch.cat([*parts, A.new_zeros(len(A) - starts[-1], B_t.shape[-1]).float()])


@pytest.fixture(autouse=True)
def quick_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.common.moe import GroupedExperts

    monkeypatch.setattr(FlexAttention, "forward", sdpa)
    monkeypatch.setattr(GroupedExperts, "_grouped_mm", grouped)


def build(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = config.build()
    model.init_states()
    model.verify_module_protocol()
    return model.float().train()


def run(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    out: torch.Tensor = model(tokens, positions=positions, attention_masks=None)
    return out


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def statistics_of(model: Any) -> list[Any]:
    return [layer.moe.statistics for layer in model.layers.values() if layer.moe_enabled]


@pytest.mark.parametrize(
    ("family", "flavor"),
    [
        ("deepseek_v3", "debugmodel"),
        pytest.param("qwen3", "debugmodel_moe", marks=pytest.mark.slow),
    ],
)
def test_m_is_the_identity_until_a_step_and_then_moves(
    family: str, flavor: str, tokens: torch.Tensor, tmp_path: Path
) -> None:
    import torch.distributed.checkpoint as dcp

    config = small_config(family, flavor)
    base = build(copy.deepcopy(config))
    adaptive_config = with_overrides(config, *OVERRIDES)
    model = build(adaptive_config, seed=1)
    missing, unexpected = model.load_state_dict(base.state_dict(), strict=False)
    assert not unexpected
    assert {name.rpartition(".")[2] for name in missing} == {"dispersion", "weight"}

    # The same logits while M = I; the base model itself repeats its logits to 2e-6 on a CPU.
    plain, first = run(base, tokens), run(model, tokens)
    assert (first - plain).abs().max() < 2e-6 * max(1.0, float(plain.abs().max()))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    first.logsumexp(-1).mean().backward()
    optimizer.step()  # moves the statistics, and with lr=0 nothing else
    early, *late = statistics_of(model)
    # The first MoE layer has no layer before it, so no clusters.
    assert early.weight.sum() == 0 and torch.equal(
        early.average_scale(), torch.ones_like(early.dispersion)
    )
    # The others have seen every token once, but for clusters of one token.
    for one in late:
        assert 0 < one.weight.sum() <= tokens.numel()
        assert one.weight.sum() == one.weight[one.weight >= 2].sum()
        scale = one.average_scale()
        assert (scale[one.weight >= 2] != 1).any()
        torch.testing.assert_close(scale.mean(1), torch.ones(len(scale)))
    after = run(model, tokens)
    assert (after - first).abs().max() > 1e-4

    # A checkpoint holds the statistics.
    dcp.save({"model": model.state_dict()}, checkpoint_id=str(tmp_path / "step"), no_dist=True)
    again = build(adaptive_config, seed=2)
    state = {"model": again.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path / "step"), no_dist=True)
    again.load_state_dict(state["model"])
    for one, other in zip(statistics_of(model), statistics_of(again), strict=True):
        assert torch.equal(one.dispersion, other.dispersion)
        assert torch.equal(one.average_scale(), other.average_scale())
    assert (run(again.eval(), tokens) - run(model.eval(), tokens)).abs().max() < 1e-5


def test_a_token_sees_nothing_of_later_ones(tokens: torch.Tensor) -> None:
    model = build(with_overrides(small_config("deepseek_v3", "debugmodel"), *OVERRIDES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run(model, tokens).logsumexp(-1).mean().backward()
    optimizer.step()
    changed = tokens.clone()
    changed[:, LENGTH // 2 :] = (changed[:, LENGTH // 2 :] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = run(model, tokens), run(model, changed)
    half = LENGTH // 2
    assert (before[:, :half] - after[:, :half]).abs().max() < 1e-5
    assert (before[:, half:] - after[:, half:]).abs().max() > 1e-2


def test_the_cluster_is_the_best_expert_and_not_the_first_column(tokens: torch.Tensor) -> None:
    model = build(with_overrides(small_config("deepseek_v3", "debugmodel"), *OVERRIDES))
    found: dict[str, Any] = {}
    moe = model.layers["1"].moe
    moe.router.register_forward_hook(lambda *call: found.update(router=call[2]))
    moe.register_forward_hook(lambda *call: found.update(moe=call[2]))
    run(model, tokens)
    (_, ids, scores), (_, cluster) = found["router"], found["moe"]
    # Without a bias the chosen experts have the greatest scores, so the best one is the argmax.
    assert torch.equal(cluster, scores.argmax(-1))
    assert (ids == cluster[..., None]).any(-1).all()


def test_options_are_fields_of_the_router_and_others_are_refused() -> None:
    block, norm = OVERRIDES
    config = small_config("deepseek_v3", "debugmodel")
    model = with_overrides(config, (block, {"momentum": 0.5, "measure": "variance"}), norm)
    adaptive = model.layers[-1].moe.adaptive
    assert (adaptive.momentum, adaptive.measure) == (0.5, "variance")
    assert (adaptive.statistics, adaptive.statistics_of) == ("running", "current")
    with pytest.raises(UserError, match="statistics cannot be set; choose from measure"):
        with_overrides(
            small_config("deepseek_v3", "debugmodel"), (block, {"statistics": "batch"}), norm
        )


def test_statistics_are_float32_and_begin_empty_however_the_trainer_builds() -> None:
    config = with_overrides(small_config("deepseek_v3", "debugmodel"), *OVERRIDES)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = config.build()
    finally:
        torch.set_default_dtype(torch.float32)
    model.to_empty(device="cpu")
    model.init_states()
    for one in statistics_of(model):
        assert {buffer.dtype for buffer in one.buffers()} == {torch.float32}
        assert one.weight.sum() == 0
        assert torch.equal(one.average_scale(), torch.ones_like(one.dispersion))


def test_one_override_without_the_other_is_refused(tokens: torch.Tensor) -> None:
    model = build(with_overrides(small_config("deepseek_v3", "debugmodel"), OVERRIDES[1]))
    with pytest.raises(UserError, match=r"name acmoe\.adapters\.titan\.adaptive_block"):
        run(model, tokens)


def test_statistics_know_the_parameters_of_their_layer() -> None:
    """The mesh of these parameters tells which processes the averages are pooled over."""
    model = build(with_overrides(small_config("deepseek_v3", "debugmodel"), *OVERRIDES))
    layer = next(layer for layer in model.layers.values() if layer.moe_enabled)
    found = parameters_around(layer.moe.statistics)
    assert set(map(id, found)) == set(map(id, layer.moe.parameters()))


@pytest.mark.slow
def test_blocks_sharded_by_fsdp_hand_their_clusters_on(tokens: torch.Tensor) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    config = with_overrides(small_config("deepseek_v3", "debugmodel"), *OVERRIDES)
    plain = build(config)
    loss = run(plain, tokens).logsumexp(-1).mean()
    loss.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = build(config)
        for layer in model.layers.values():
            fully_shard(layer)
        fully_shard(model)
        sharded = run(model, tokens).logsumexp(-1).mean()
        sharded.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        torch.testing.assert_close(sharded, loss, rtol=1e-5, atol=1e-5)
        for one, other in zip(statistics_of(model), statistics_of(plain), strict=True):
            torch.testing.assert_close(one.dispersion, other.dispersion, rtol=1e-4, atol=1e-5)
        after = run(model, tokens).logsumexp(-1).mean()
        torch.testing.assert_close(after, run(plain, tokens).logsumexp(-1).mean())
    finally:
        dist.destroy_process_group()
