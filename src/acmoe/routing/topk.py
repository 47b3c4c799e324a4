"""The plain top-k router, and the gate all token-choice routers share.

T tokens, D features, E experts, K experts per token.
"""

import math

import torch
from torch import Tensor, nn

from acmoe.config.routing import LossConfig, SMoEConfig
from acmoe.errors import check
from acmoe.ops.dispatch import Option, choose, triton_obstacle
from acmoe.ops.route.op import fused_route
from acmoe.ops.sort.op import Clusters
from acmoe.ops.statistics.dispersion import accumulation_dtype
from acmoe.routing.cache import StatisticsSlot
from acmoe.routing.losses import (
    balance_loss,
    balance_of,
    importance_loss,
    load,
    load_loss,
    z_loss,
)
from acmoe.routing.router import Router, flat
from acmoe.routing.state import Routing, RoutingState
from acmoe.routing.step import StepStatistics


def expert_embeddings(num_experts: int, dim: int, init: str = "uniform") -> nn.Parameter:
    """(E, D) parameter: uniform in +-1/sqrt(d), or orthogonal rows of length 0.32."""
    embeddings_ED = torch.empty(num_experts, dim)
    if init == "orthogonal":
        nn.init.orthogonal_(embeddings_ED, gain=0.32)
    else:
        nn.init.uniform_(embeddings_ED, -1 / math.sqrt(dim), 1 / math.sqrt(dim))
    return nn.Parameter(embeddings_ED)


def select(affinity_TE: Tensor, top_k: int, gate: str) -> tuple[Tensor, Tensor]:
    """The k experts of highest affinity, best first, and their gate."""
    best_TK, expert_ids_TK = affinity_TE.topk(top_k, dim=-1)
    if over_selected(gate, top_k):
        return expert_ids_TK, best_TK.softmax(-1)
    return expert_ids_TK, affinity_TE.softmax(-1).gather(1, expert_ids_TK)


def over_selected(gate: str, top_k: int) -> bool:
    """Softmax over the chosen k (Eqn. 2), or over all E: one value alone has no gradient."""
    return gate == "selected" or (gate == "auto" and top_k > 1)


class SelectionBias(StepStatistics):
    """Loss-free balancing: a bias on each expert's score, raised while it gets too few tokens.

    It enters the choice of experts only, never the gate, so it adds no gradient.
    """

    bias: Tensor
    last_load: Tensor

    def __init__(self, num_experts: int, step: float) -> None:
        super().__init__()
        self.step = step
        self.register_buffer("bias", torch.zeros(num_experts))
        self.register_buffer("last_load", torch.zeros(num_experts), persistent=False)

    def select(self, affinity_TE: Tensor, top_k: int, gate: str) -> tuple[Tensor, Tensor]:
        gate_TE = affinity_TE.softmax(-1)
        expert_ids_TK = (gate_TE.detach() + self.bias).topk(top_k, dim=-1).indices
        if over_selected(gate, top_k):
            return expert_ids_TK, affinity_TE.gather(1, expert_ids_TK).softmax(-1)
        return expert_ids_TK, gate_TE.gather(1, expert_ids_TK)

    @torch.no_grad()
    def note(self, expert_ids_TK: Tensor, token_mask_T: Tensor | None) -> None:
        self.last_load.copy_(load(expert_ids_TK, self.bias.numel(), token_mask_T))

    @torch.no_grad()
    def fold(self) -> None:
        self.bias.add_(self.step * (self.last_load.mean() - self.last_load).sign())
        self.last_load.zero_()


class TopKRouter(Router):
    """affinity = x . e_k (+ b_k); the k highest win (Eqn. 1)."""

    def __init__(
        self,
        config: SMoEConfig,
        *,
        dim: int,
        num_experts: int,
        top_k: int,
        losses: LossConfig | None = None,
    ) -> None:
        super().__init__(dim=dim, num_experts=num_experts, top_k=top_k, losses=losses)
        check(
            self.losses.importance_load == 0 or config.noise > 0,
            f"importance_load={self.losses.importance_load} takes the expected load under the "
            "router's noise; set the router's noise above 0 (Swin-MoE: 1.0)",
        )
        self.config = config
        self.embedding = expert_embeddings(num_experts, dim, config.init)
        self.bias: nn.Parameter | None = None
        if config.bias:
            bound = 1 / math.sqrt(dim)
            self.bias = nn.Parameter(torch.empty(num_experts).uniform_(-bound, bound))
        self.selection: SelectionBias | None = None
        if config.bias_balancing > 0:
            self.selection = SelectionBias(num_experts, config.bias_balancing)

    def affinity(self, x_TD: Tensor) -> Tensor:
        bias_E = None if self.bias is None else self.bias.to(x_TD.dtype)
        return nn.functional.linear(x_TD, self.directions(x_TD).to(x_TD.dtype), bias_E)

    def directions(self, x: Tensor) -> Tensor:
        """(E, D) embeddings; normalised ones in the dtype in which tokens like x are routed."""
        if not self.config.normalize_embeddings:
            return self.embedding
        return nn.functional.normalize(self.embedding.to(accumulation_dtype(x.dtype)), dim=-1)

    def noise(self, x_TD: Tensor) -> Tensor | None:
        """(T, E) what training adds to the affinities of these tokens; a constant."""
        if not self.training or self.config.noise == 0:
            return None
        shape, dtype = (x_TD.shape[0], self.num_experts), accumulation_dtype(x_TD.dtype)
        return torch.randn(shape, dtype=dtype, device=x_TD.device) * self.noise_std

    def decide(
        self, x: Tensor, *, token_mask: Tensor | None = None, token_ids: Tensor | None = None
    ) -> Routing:
        mask_T = None if token_mask is None else token_mask.reshape(-1)
        x_TD = flat(x)
        clean_TE, noise_TE = self.affinity(x_TD), self.noise(x_TD)
        noisy_TE = clean_TE if noise_TE is None else clean_TE + noise_TE
        expert_ids_TK, gate_TK = self.select(noisy_TE, mask_T)
        loss = self.loss(clean_TE, noisy_TE, expert_ids_TK, mask_T)
        return Routing(expert_ids_TK, gate_TK, noisy_TE, loss)

    def select(self, affinity_TE: Tensor, mask_T: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.selection is None:
            return select(affinity_TE, self.top_k, self.config.gate)
        expert_ids_TK, gate_TK = self.selection.select(affinity_TE, self.top_k, self.config.gate)
        if self.training:
            self.selection.note(expert_ids_TK, mask_T)
        return expert_ids_TK, gate_TK

    def route(
        self,
        x: Tensor,
        state: RoutingState,
        *,
        token_mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        cache: StatisticsSlot | None = None,
    ) -> tuple[Routing, Tensor]:
        if self.fuses(x):
            return self.fused(x, None, None, token_mask)
        return super().route(x, state, token_mask=token_mask, token_ids=token_ids, cache=cache)

    def inner_products(self, x_TD: Tensor) -> Tensor:
        """(T, E) affinities without the experts' biases."""
        affinity_TE = self.affinity(x_TD)
        return affinity_TE if self.bias is None else affinity_TE - self.bias.to(x_TD.dtype)

    def fuses(self, x: Tensor, other: str | None = None) -> bool:
        """Whether the whole decision is one kernel for this call; `other` is what else hinders."""
        obstacle = triton_obstacle(x) if x.numel() else "there are no tokens"
        obstacle = obstacle or other
        if obstacle is None and (self.num_experts > 512 or self.top_k > 16):
            obstacle = f"it serves 512 experts and k = 16, not {self.num_experts} and {self.top_k}"
        return choose("router", (Option("triton", obstacle), Option("torch", None))) == "triton"

    def fused(
        self,
        x: Tensor,
        scale_CD: Tensor | None,
        assignment_T: Tensor | None,
        token_mask: Tensor | None,
        clusters: Clusters | None = None,
    ) -> tuple[Routing, Tensor]:
        """`decide`, on tokens rescaled by `scale_CD[assignment_T]`, reading x once; and x."""
        mask_T = None if token_mask is None else token_mask.reshape(-1)
        x_TD = x.reshape(-1, self.dim)
        noise_TE = self.noise(x_TD)
        found = fused_route(
            x_TD,
            self.directions(x),
            self.bias,
            scale_CD,
            assignment_T,
            self.top_k,
            over_selected(self.config.gate, self.top_k),
            mask_T,
            self.config.balance_temperature,
            clusters,
            noise_TE,
        )
        chosen, clean_TE, balance = (found.expert_ids, found.gate), found.affinity, None
        if self.selection is not None:
            chosen = self.select(found.affinity, mask_T)
        if noise_TE is not None:
            clean_TE = found.affinity - noise_TE  # the affinities before the noise, to rounding
        elif self.losses.balance and self.selection is None:
            # The kernel's sums are of the affinities it chose from, and of its own choice.
            tokens = found.load.sum() / self.top_k
            balance = balance_of(found.load, found.gate_sum / tokens.clamp(min=1))
        loss = self.loss(clean_TE, found.affinity, chosen[0], mask_T, balance)
        return Routing(*chosen, found.affinity, loss, found.first[:, None]), found.x.view(x.shape)

    @property
    def noise_std(self) -> float:
        return self.config.noise / self.num_experts

    def loss(
        self,
        clean_TE: Tensor,
        noisy_TE: Tensor,
        expert_ids_TK: Tensor,
        mask_T: Tensor | None,
        balance: Tensor | None = None,
    ) -> Tensor:
        """The weighted auxiliary losses; `balance` is that of them which may be known."""
        weights, temperature = self.losses, self.config.balance_temperature
        total = common_losses(
            weights, clean_TE, expert_ids_TK, mask_T, temperature=temperature, balance=balance
        )
        if weights.importance_load:
            # The last choice has the k-th affinity, unless a selection bias had its say.
            biased = self.selection is not None
            expected = load_loss(
                *(clean_TE, noisy_TE, self.top_k, self.noise_std, mask_T),
                tutel=weights.tutel,
                kth_T1=None if biased else noisy_TE.gather(1, expert_ids_TK[:, -1:]),
            )
            both = importance_loss(clean_TE, mask_T) + expected
            total = total + weights.importance_load * both / 2
        return total


def common_losses(
    weights: LossConfig,
    affinity_TE: Tensor,
    expert_ids_TK: Tensor,
    mask_T: Tensor | None,
    *,
    temperature: float = 1.0,
    balance: Tensor | None = None,
) -> Tensor:
    """Balance and z-loss, for every router that has affinities; `balance` if it is known."""
    total = affinity_TE.new_zeros((), dtype=torch.float32)
    if weights.balance:
        if balance is None:
            balance = balance_loss(affinity_TE, expert_ids_TK, mask_T, temperature=temperature)
        total = total + weights.balance * balance
    if weights.z:
        total = total + weights.z * z_loss(affinity_TE, mask_T)
    return total


def only_z(losses: LossConfig) -> LossConfig:
    """For a router that balances by other means than the common loss."""
    return LossConfig(balance=0.0, z=losses.z)


def no_noise_losses(losses: LossConfig | None, router: str) -> LossConfig:
    """The loss weights, for a router that draws no noise and so has no expected load."""
    losses = losses or LossConfig()
    check(
        losses.importance_load == 0,
        f"importance_load={losses.importance_load} needs a noisy top-k router, not "
        f"router={router!r}; use balance instead",
    )
    return losses
