"""Models built on the meta device: emptied and initialised, or loaded with assign=True.

Every module that owns parameters or buffers has `reset_parameters`, the convention of FSDP.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from acmoe import (
    AdaptiveConfig,
    CosineConfig,
    ExpertChoiceConfig,
    MetricConfig,
    MoE,
    RoutingState,
    SMoEConfig,
    SoftConfig,
    SoftMoE,
    StableConfig,
    ThresholdConfig,
    create_model,
)
from acmoe.lab.variants import VariantConfig

ROUTERS = {
    "smoe": SMoEConfig(bias=True, bias_balancing=0.1),
    "length": SMoEConfig(normalize_embeddings=True, embedding_length=1.5),
    "cosine": CosineConfig(),
    "threshold": ThresholdConfig(learnable=True),
    "expert-choice": ExpertChoiceConfig(),
    "metric": MetricConfig(),
    "adaptive": AdaptiveConfig(),
    "current": AdaptiveConfig(statistics="batch", statistics_of="current"),
    "learned": VariantConfig(strength=0.5, learn_strength=True),
    "centred": VariantConfig(statistics_of="current", center=True, match=True),
    "scheduled": VariantConfig(strength=0.5, strength_end=2.0, strength_steps=3),
}
SIZES = {
    "switch-nano": {"position": "relative"},
    "glam-nano": {},
    "swin-nano": {"position": "table"},
    "softmoe-nano": {},
}


def layer(name: str) -> MoE:
    return MoE(dim=6, hidden=8, num_experts=4, top_k=2, router=ROUTERS[name])


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def reset(module: nn.Module) -> None:
    """Children first, in the order in which they were built."""
    for child in module.children():
        reset(child)
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    assert not own or hasattr(module, "reset_parameters"), type(module)
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def emptied(module: nn.Module) -> nn.Module:
    module = module.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in tensors(module).values():
            tensor.fill_(7)
    return module


@pytest.mark.parametrize("name", ROUTERS)
def test_a_reset_layer_has_the_values_of_one_built_with_the_same_seed(name: str) -> None:
    torch.manual_seed(0)
    wanted = tensors(layer(name))
    with torch.device("meta"):
        found = layer(name)
    found = emptied(found)
    torch.manual_seed(0)
    reset(found)
    assert tensors(found).keys() == wanted.keys()
    for key, value in tensors(found).items():
        assert torch.equal(value, wanted[key]), key


def test_a_reset_soft_layer_and_a_stable_router_have_their_values_too() -> None:
    def soft() -> SoftMoE:
        router = AdaptiveConfig(base=SoftConfig(), mix=2)
        return SoftMoE(dim=6, hidden=8, num_experts=4, router=router)

    torch.manual_seed(0)
    wanted = tensors(soft())
    found = emptied(soft())
    torch.manual_seed(0)
    reset(found)
    assert tensors(found).keys() == wanted.keys()
    for key, value in tensors(found).items():
        assert torch.equal(value, wanted[key]), key
    stable = emptied(
        MoE(dim=6, hidden=8, num_experts=4, top_k=1, router=StableConfig(vocab_size=9))
    )
    reset(stable)
    # Orthogonal rows of norm 0.32.
    embedding = stable.router.embedding
    torch.testing.assert_close(embedding @ embedding.T, 0.32**2 * torch.eye(4))


@pytest.mark.parametrize(
    "name",
    [
        "switch-nano",
        "swin-nano",
        pytest.param("glam-nano", marks=pytest.mark.slow),
        pytest.param("softmoe-nano", marks=pytest.mark.slow),
    ],
)
def test_a_reset_model_is_distributed_as_a_new_one(name: str) -> None:
    torch.manual_seed(0)
    wanted = tensors(create_model(name, router="adaptive", **SIZES[name]))
    with torch.device("meta"):
        found = create_model(name, router="adaptive", **SIZES[name])
    found = emptied(found)
    torch.manual_seed(0)
    reset(found)
    assert tensors(found).keys() == wanted.keys()
    for key, value in tensors(found).items():
        other = wanted[key]
        if other.numel() < 2 or other.float().std() == 0 or not other.is_floating_point():
            assert torch.equal(value, other), key
        elif other.numel() > 100:
            std = other.std().item()
            assert value.std().item() == pytest.approx(std, rel=0.2), key
            assert value.mean().item() == pytest.approx(other.mean().item(), abs=0.5 * std), key


@pytest.mark.parametrize("name", ["adaptive", "current", "smoe", "scheduled"])
def test_a_meta_layer_runs_on_tensors_that_are_assigned(name: str) -> None:
    source = layer(name)
    state = RoutingState.identity(num_tokens=20, num_clusters=4, dim=6)
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
    source(torch.randn(20, 6), state)[0].sum().backward()
    optimizer.step()
    with torch.device("meta"):
        found = layer(name)
    found.load_state_dict(source.state_dict(), assign=True)
    assert not any(tensor.is_meta for tensor in tensors(found).values())
    x = torch.randn(20, 6)
    for training in (True, False):
        a, b = (moe.train(training)(x, state) for moe in (source, found))
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1].scale, b[1].scale)


@pytest.mark.parametrize("position", ["table", "mlp"])
def test_a_meta_image_model_computes_its_constants_when_tensors_are_assigned(position: str) -> None:
    source = create_model("swin-nano", router="adaptive", position=position).eval()
    with torch.device("meta"):
        found = create_model("swin-nano", router="adaptive", position=position).eval()
    found.load_state_dict(source.state_dict(), assign=True)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(found(images).logits, source(images).logits)


@pytest.mark.parametrize("position", ["table", "mlp"])
def test_an_emptied_image_model_has_its_constants_and_needs_weights_alone(position: str) -> None:
    source = create_model("swin-nano", router="adaptive", position=position).eval()
    with torch.device("meta"):
        found = create_model("swin-nano", router="adaptive", position=position).eval()
    found.to_empty(device="cpu").load_state_dict(source.state_dict())
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(found(images).logits, source(images).logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_constants_of_an_image_model_are_exact_again_after_a_cast_and_back(
    dtype: torch.dtype,
) -> None:
    source = create_model("swin-nano", position="mlp")
    exact = {name: value.clone() for name, value in source.named_buffers()}
    assert any(name.endswith("position.offsets") for name in exact)
    source.to(dtype).float()
    for name, value in source.named_buffers():
        assert torch.equal(value, exact[name]), name


def test_averages_that_a_file_holds_in_low_precision_become_float32() -> None:
    with torch.device("meta"):
        found = layer("adaptive")
    low = {key: value.bfloat16() for key, value in layer("adaptive").state_dict().items()}
    found.load_state_dict(low, assign=True)
    statistics = found.next_state.statistics
    assert {buffer.dtype for buffer in statistics.buffers()} == {torch.float32}


@pytest.mark.parametrize(
    ("name", "options"),
    [("swin-nano", {"position": "table"}), ("swin-nano", {}), ("softmoe-nano", {})],
)
def test_image_models_of_fake_tensors_are_built_and_trained(
    name: str, options: dict[str, Any]
) -> None:
    with FakeTensorMode():
        model = create_model(name, router="adaptive", **options).train()
        out = model(torch.randn(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64))
        (out.loss + out.aux_loss).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert out.logits.shape == (2, model.config.num_classes)


def test_a_padded_batch_of_fake_tensors_has_a_loss() -> None:
    with FakeTensorMode():
        model = create_model("switch-nano", router="adaptive")
        tokens = torch.zeros(2, 4, dtype=torch.int64)
        out = model(tokens, tokens, token_mask=tokens == 0)
    assert out.loss.shape == ()
