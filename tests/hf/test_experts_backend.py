"""The experts implementation "acmoe" of transformers, against transformers' own loop (eager)."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from transformers.integrations.moe import batched_mm_experts_forward

import acmoe
import acmoe.hf
from acmoe.errors import UserError
from acmoe.hf import experts as backend
from acmoe.ops import dispatch
from expert_modules import FAMILIES, D, E, F, assert_near, experts_of, outcome, routed


@pytest.mark.parametrize("tokens", [13, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_output_and_gradients_are_those_of_eager(family: str, tokens: int) -> None:
    experts, call = experts_of(family), routed(tokens)
    wanted = outcome(experts, "eager", *call)
    assert wanted["out"].abs().max() > 0.1
    assert_near(outcome(experts, "acmoe", *call), wanted, 2e-6)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_no_tokens_give_no_output_and_no_gradient(family: str) -> None:
    found = outcome(experts_of(family), "acmoe", *routed(0))
    assert found["out"].shape == (0, D)
    assert not found["down_proj"].any()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "muse_spark"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_computes_in_the_dtype_of_the_weights(family: str, dtype: torch.dtype) -> None:
    experts, (x, ids, gate) = experts_of(family).to(dtype), routed(6)
    call = (x.to(dtype), ids, gate)  # routers may give float32 weights
    wanted, found = outcome(experts, "eager", *call), outcome(experts, "acmoe", *call)
    assert_near(found, wanted, 8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_autocast_runs_the_gemms_in_its_dtype(family: str) -> None:
    experts, call = experts_of(family), routed(6)
    exact = outcome(experts, "acmoe", *call)
    with torch.autocast("cpu", torch.bfloat16):
        wanted, found = outcome(experts, "eager", *call), outcome(experts, "acmoe", *call)
    assert found["out"].dtype == torch.float32
    assert not torch.equal(found["out"], exact["out"])
    assert_near(found, wanted, 8 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "muse_spark"])
def test_an_id_of_another_device_contributes_nothing(family: str) -> None:
    experts, (x, ids, gate) = experts_of(family), routed(7)
    experts._is_expert_parallel = True  # type: ignore[assignment]
    away = torch.zeros_like(ids, dtype=torch.bool)
    away[2] = away[4, 0] = True
    found = outcome(experts, "acmoe", x, ids.masked_fill(away, E), gate)
    wanted = outcome(experts, "eager", x, ids, gate.masked_fill(away, 0.0))
    assert not found["out"][2].any() and not found["gate"][away].any()
    wanted["gate"] = wanted["gate"].masked_fill(away, 0.0)
    assert_near(found, wanted, 2e-6)


class WeightCopies(TorchDispatchMode):
    """Count operators that copy as many numbers as a weight has, and the weights GEMMs read."""

    COPIES = ("clone", "copy_", "_to_copy", "contiguous")

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.copies, self.read = size, [], set()  # type: ignore[var-annotated]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.COPIES and args[0].numel() >= self.size:
            self.copies.append(name)
        if name == "grouped_linear":
            self.read.add(args[1].data_ptr())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["gpt_oss", "aria", "qwen3_moe"])
def test_weights_are_read_where_they_lie_and_gradients_written_as_they_lie(family: str) -> None:
    experts, (x, ids, gate) = experts_of(family), routed(3)
    with WeightCopies(E * D * F) as seen:
        experts(x.requires_grad_(), ids, gate).sum().backward()
    assert seen.copies == []
    up, down = experts.gate_up_proj, experts.down_proj
    assert seen.read == {up.data_ptr(), down.data_ptr()}
    assert up.grad.is_contiguous() and down.grad.is_contiguous()  # type: ignore[union-attr, operator]


@pytest.fixture
def batched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Run calls on a CPU as on a GPU; list the rows of calls that `batched_mm` serves."""
    calls: list[int] = []

    def recorded(module: nn.Module, x: Tensor, ids: Tensor, gate: Tensor) -> Tensor:
        calls.append(ids.numel())
        return batched_mm_experts_forward(module, x, ids, gate)

    monkeypatch.setattr(backend, "_on_gpu", lambda _: True)
    monkeypatch.setattr(backend, "batched_mm_experts_forward", recorded)
    return calls


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "muse_spark"])
def test_few_rows_without_gradients_go_to_batched_gemms(family: str, batched: list[int]) -> None:
    experts, (x, ids, gate) = experts_of(family), routed(3)
    wanted = outcome(experts, "eager", x, ids, gate)["out"]
    outcome(experts, "acmoe", x, ids, gate)
    assert not batched  # the weights train
    with torch.no_grad():
        assert torch.allclose(experts(x, ids, gate), wanted, atol=2e-6)
        assert batched == [ids.numel()]
        experts(*routed(backend.FEW_ROWS))  # tokens, of several rows each
    assert len(batched) == 1


def test_few_rows_of_experts_that_kernels_know_run_fused(
    batched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "triton_unsupported", lambda x: None)
    experts, call = experts_of("qwen3_moe"), routed(3)
    experts.config._experts_implementation = "acmoe"  # type: ignore[union-attr]
    with torch.no_grad():
        experts(*call)
        assert not batched
        with torch.autocast("cpu", torch.bfloat16):  # the fused kernels would cast all weights
            experts(*call)
    assert len(batched) == 1


class LowRank(nn.Module):
    """W + B A for every expert: LoRA on a stacked weight, as peft's target_parameters adds it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.a = nn.Parameter(torch.randn(E, 1, weight.shape[2], generator=generator))
        self.b = nn.Parameter(torch.randn(E, weight.shape[1], 1, generator=generator) * 0.1)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_parametrized_weights_train_their_own_parameters(family: str) -> None:
    experts, call = experts_of(family), routed(6)
    plain = outcome(experts, "acmoe", *call)["out"]
    for name in ("gate_up_proj", "down_proj"):
        parametrize.register_parametrization(experts, name, LowRank(getattr(experts, name)))
    wanted, found = outcome(experts, "eager", *call), outcome(experts, "acmoe", *call)
    assert (found["out"] - plain).abs().max() > 0.01
    assert any(name.endswith(".b") for name in found)
    assert_near(found, wanted, 5e-6)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "family",
    [pytest.param("qwen3_moe", marks=pytest.mark.slow), "gpt_oss"],
)
def test_a_compiled_training_step_is_one_graph(family: str) -> None:
    torch.compiler.reset()
    experts, call = experts_of(family), routed(6)
    wanted = outcome(experts, "acmoe", *call)
    experts.forward = torch.compile(experts.forward, fullgraph=True, backend="aot_eager")
    assert_near(outcome(experts, "acmoe", *call), wanted, 1e-6)


def tiny_model(**options: Any) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        pad_token_id=0,
        initializer_range=0.3,
        **options,
    )
    return Qwen3MoeForCausalLM(config)


@pytest.fixture
def log_again() -> Iterator[None]:
    dispatch._logged.clear()
    yield
    dispatch._logged.clear()


def test_a_model_takes_it_by_name_decodes_the_same_tokens_and_trains_checkpointed() -> None:
    model, ids = tiny_model().eval(), torch.arange(3, 15).view(2, 6)
    tokens, gradients = {}, {}
    for implementation in ("eager", "acmoe"):
        model.set_experts_implementation(implementation)
        assert model.config._experts_implementation == implementation
        mask = torch.ones_like(ids)
        tokens[implementation] = model.generate(
            ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False
        )
        gradients[implementation] = gradients_of(model, ids)
    assert torch.equal(tokens["acmoe"], tokens["eager"])
    assert_near(gradients["acmoe"], gradients["eager"], 5e-6)
    model.gradient_checkpointing_enable()
    model.train()
    again = gradients_of(model, ids)
    assert all(torch.equal(again[name], one) for name, one in gradients["acmoe"].items())


def test_an_attached_model_takes_it_also_where_its_plain_class_was_never_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers remembers for each class whether its experts can be dispatched; a new process,
    or one that loads with "eager", has not asked. Only a file with experts answers with yes."""
    from transformers import AutoModelForCausalLM

    kind = type(tiny_model())
    acmoe.attach(tiny_model()).save_pretrained(tmp_path)
    for one in (kind, acmoe.hf.adaptive_class(kind)):
        monkeypatch.delattr(one, "_can_set_experts_implementation_cached_value", raising=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._experts_implementation == "grouped_mm"  # as for the plain class
    loaded.set_experts_implementation("acmoe")
    assert loaded.config._experts_implementation == "acmoe"


def gradients_of(model: Any, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters()}


REASONS = {
    "qwen3_moe-gelu": "no kernel knows the activation GELUActivation with a gate",
    "nemotron_h": "no kernel knows the activation ReLUSquaredActivation without a gate",
    "gpt_oss": "its clamped gate has a kernel of its own",
    "aria": "its weights are (E, in, out)",
    "muse_spark": "a norm follows the experts",
}


@pytest.mark.parametrize("family", REASONS)
def test_the_reason_for_another_form_is_told_and_logged(
    family: str, log_again: None, caplog: pytest.LogCaptureFixture
) -> None:
    experts = experts_of(family)
    assert REASONS[family] in (acmoe.hf.experts_reason(experts) or "")
    with caplog.at_level(logging.INFO, logger="acmoe"):
        experts(*routed(3))
    assert f"{type(experts).__name__} runs on grouped GEMMs: {REASONS[family]}" in caplog.text


def test_hooks_of_an_activation_run() -> None:
    experts, call = experts_of("qwen3_moe"), routed(6)
    experts.act_fn.register_forward_hook(lambda module, args, out: 2 * out)  # type: ignore[union-attr, operator]
    plain = outcome(experts_of("qwen3_moe"), "acmoe", *call)
    found = outcome(experts, "acmoe", *call)
    # The output is linear in the activation.
    assert_near(found, {name: 2 * value for name, value in plain.items()}, 2e-6)
    assert "SiLUActivation has hooks" in (acmoe.hf.experts_reason(experts) or "")


def test_an_activation_or_gate_of_ones_own_is_called() -> None:
    class SiLU(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros_like(x)

    experts, call = experts_of("qwen3_moe"), routed(6)
    experts.act_fn = SiLU()
    assert not outcome(experts, "acmoe", *call)["out"].any()
    experts = experts_of("qwen3_moe")
    experts._apply_gate = lambda h: torch.zeros_like(h[:, : h.shape[1] // 2])  # type: ignore[assignment]
    assert not outcome(experts, "acmoe", *call)["out"].any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the kernels run")
def test_without_a_gpu_the_device_is_the_reason() -> None:
    reason = acmoe.hf.experts_reason(experts_of("qwen3_moe"))
    assert reason in ("its kernels need a CUDA device, not cpu", "triton is not installed")


def test_what_it_cannot_compute_is_refused() -> None:
    with pytest.raises(UserError, match="Linear is no experts module"):
        acmoe.hf.experts_reason(nn.Linear(2, 2))
    experts = experts_of("qwen3_moe")
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name).detach().to(torch.float8_e4m3fn)
        setattr(experts, name, nn.Parameter(weight, requires_grad=False))
    with pytest.raises(UserError, match="float8_e4m3fn weights"):
        experts(*routed(3))


MIXTURES = ("MixtralConfig", "OlmoeConfig", "GraniteMoeConfig", "GptOssConfig")


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_whole_models_have_the_logits_and_gradients_of_eager(name: str) -> None:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, name)(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts_per_tok=2,
        pad_token_id=0,
        **{"num_experts" if name == "OlmoeConfig" else "num_local_experts": 4},
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.arange(3, 27).view(2, 12)
    model.set_experts_implementation("eager")
    wanted = gradients_of(model, ids)
    model.set_experts_implementation("acmoe")
    assert_near(gradients_of(model, ids), wanted, 1e-5)
