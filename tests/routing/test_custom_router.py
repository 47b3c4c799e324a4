"""A router that another package defines works wherever a router of this library does."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import acmoe
from acmoe import AdaptiveConfig, CustomConfig, MoE, Router, Routing, UserError
from acmoe.config.overrides import override
from acmoe.routing.adaptive import AdaptiveRouter
from acmoe.routing.build import new_router

SIZES = {"dim": 4, "num_experts": 3, "top_k": 2}


@dataclass(frozen=True, kw_only=True)
class NearestConfig(CustomConfig):
    name: ClassVar[str] = "test-nearest"
    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True)
class OrphanConfig(CustomConfig):
    name: ClassVar[str] = "test-orphan"


class NearestRouter(Router):
    """Choose the experts whose centers are nearest to the token."""

    def __init__(self, config: NearestConfig, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.config = config
        self.centers = nn.Parameter(torch.randn(self.num_experts, self.dim))

    def decide(
        self, x: Tensor, *, token_mask: Tensor | None = None, token_ids: Tensor | None = None
    ) -> Routing:
        distance_TE = torch.cdist(x.reshape(-1, self.dim), self.centers.to(x.dtype))
        affinity_TE = -distance_TE / self.config.temperature
        best_TK, ids_TK = affinity_TE.topk(self.top_k)
        return Routing(ids_TK, best_TK.softmax(-1), affinity_TE, affinity_TE.new_zeros(()))


new_router.register(NearestConfig, NearestRouter)


def test_it_is_built_by_name_by_config_and_below_an_adaptive_router() -> None:
    config = NearestConfig(temperature=2.0)
    assert isinstance(acmoe.build_router("test-nearest", **SIZES), NearestRouter)
    assert MoE(**SIZES, hidden=8, router=config).router.config == config
    adaptive = acmoe.build_router(AdaptiveConfig(base=config, statistics="batch"), **SIZES)
    x, cluster = torch.randn(6, 4), torch.tensor([0, 0, 1, 1, 2, -1])
    scale = torch.tensor([[2.0, 1.0, 0.5, 0.5], [1.0, 1.0, 1.0, 1.0], [0.1, 1.9, 1.0, 1.0]])
    state = acmoe.RoutingState.identity(num_tokens=6, num_clusters=3, dim=4)
    state = state._replace(assignment=cluster[:, None], scale=scale)
    rescaled = torch.stack([h * scale[k] if k >= 0 else h for h, k in zip(x, cluster, strict=True)])
    for found, wanted in zip(adaptive(x, state)[:3], adaptive.base(rescaled)[:3], strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_model_with_it_trains_and_is_saved_and_loaded(tmp_path: Any) -> None:
    config = AdaptiveConfig(base=NearestConfig(temperature=2.0))
    model = acmoe.create_model("switch-nano", router=config)
    tokens = torch.randint(model.config.vocab_size, (2, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = model(tokens[:, :-1], tokens[:, 1:])
    (out.loss + out.aux_loss).backward()
    optimizer.step()
    acmoe.save(model, tmp_path / "model")
    loaded = acmoe.load(tmp_path / "model")
    assert loaded.config.router == config
    changed = override(model.config, ["router=test-nearest", "router.temperature=3"])
    assert changed.router == NearestConfig(temperature=3.0)
    assert torch.equal(loaded.eval()(tokens).logits, model.eval()(tokens).logits)


def test_a_config_without_a_router_and_one_of_no_kind_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"OrphanConfig has no router; register one with new_router"
    ):
        acmoe.build_router(OrphanConfig(), **SIZES)
    with pytest.raises(UserError, match=r"router='nearst' is unknown; .* metric, .*test-nearest"):
        acmoe.build_router("nearst", **SIZES)


class Spoiled(NearestRouter):
    """Return what `spoil` makes of a right decision."""

    def decide(self, x: Tensor, **arguments: Any) -> Any:
        return self.spoil(super().decide(x, **arguments))


SPOILED = {
    "a tuple": (lambda r: tuple(r), "Spoiled.decide returned a tuple; return acmoe.Routing"),
    "an id": (lambda r: r._replace(expert_ids=r.expert_ids + 1), "expert_ids holds id 3; ids must"),
    "no expert": (lambda r: r._replace(expert_ids=r.expert_ids - 1), "expert_ids holds id -1"),
    "ids": (lambda r: r._replace(expert_ids=r.expert_ids.float()), "expert_ids of torch.float32"),
    "k": (
        lambda r: r._replace(expert_ids=r.expert_ids[:, :1]),
        r"of shape \(6, 1\); return \(6, 2",
    ),
    "tokens": (
        lambda r: r._replace(affinity=r.affinity[1:]),
        r"affinity of shape \(5, 3\); return",
    ),
    "loss": (lambda r: r._replace(loss=torch.zeros(6)), r"loss of shape \(6,\); return \(\)"),
    "no loss": (lambda r: r._replace(loss=None), r"loss=None; return affinity.new_zeros\(\(\)\)"),
}


@pytest.mark.parametrize("case", SPOILED)
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_decision_of_the_wrong_form_is_refused(case: str, adaptive: bool) -> None:
    spoil, message = SPOILED[case]
    router: Router = Spoiled(NearestConfig(), **SIZES)
    router.spoil = spoil
    if adaptive:
        router = AdaptiveRouter(AdaptiveConfig(base=NearestConfig()), router)
    x = torch.randn(2, 3, 4)
    x[0, 0] = 10 * (router.base if adaptive else router).centers[0].detach()
    x[0, 1] = 10 * (router.base if adaptive else router).centers[2].detach()
    with pytest.raises(UserError, match=message):
        MoE(**SIZES, hidden=8, router=router)(x)


def test_a_router_may_choose_fewer_experts_if_it_says_so() -> None:
    router = Spoiled(NearestConfig(), **SIZES)
    nowhere = torch.tensor([[0, 3], [1, 3], [2, 3]])  # 3 of 3 experts: none
    router.spoil = lambda r: r._replace(
        expert_ids=nowhere, gate=torch.tensor([[0.5, 0.0]]).expand(3, 2)
    )
    x = torch.randn(3, 4)
    moe = MoE(**SIZES, hidden=8, router=router)
    with pytest.raises(UserError, match="expert_ids holds id 3"):
        moe(x)
    router.always_k = False
    up, down = moe.experts.up, moe.experts.down
    wanted = [
        0.5 * (down[k] @ (up[k] @ x[k] + moe.experts.up_bias[k]).relu() + moe.experts.down_bias[k])
        for k in range(3)
    ]
    torch.testing.assert_close(moe(x)[0], torch.stack(wanted))
