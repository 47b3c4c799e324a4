"""Baseline routers: cosine (XMoE), random scale, hash, expert choice.

T tokens, D features, P projected features, E experts, C = E clusters, K experts per token.
"""

import math

import torch
from torch import Tensor, nn

from acmoe.config.routing import (
    CosineConfig,
    ExpertChoiceConfig,
    HashConfig,
    LossConfig,
    RandomConfig,
)
from acmoe.ops.bounded import bounded
from acmoe.ops.precision import wide_dtype
from acmoe.ops.route import ScaledTokens
from acmoe.ops.route.reference import best_first, first_chosen, linear_affinity
from acmoe.ops.statistics.dispersion import accumulation_dtype
from acmoe.ops.unit import unit_rows
from acmoe.routing.adaptive import gather_scale, mix_scales
from acmoe.routing.cache import StatisticsSlot
from acmoe.routing.router import Router, flat, need_token_ids, real_tokens, rows_for
from acmoe.routing.state import Routing, RoutingState, check_mix, check_state
from acmoe.routing.topk import (
    common_losses,
    init_embeddings,
    no_noise_losses,
    only_z,
    select,
)

_GREATEST_LOG_SCALE = math.log(
    100.0
)  # bound on log(1 / temperature), so that the gate cannot saturate


class CosineRouter(Router):
    """XMoE: affinity = cos(R x, e_k) / tau in a low dimension, with learned tau.

    `legacy` is the baseline of the published code: R x is not normalised and there is no tau.
    """

    def __init__(
        self,
        config: CosineConfig,
        *,
        dim: int,
        num_experts: int,
        top_k: int,
        losses: LossConfig | None = None,
    ) -> None:
        losses = no_noise_losses(losses, config.name)
        super().__init__(dim=dim, num_experts=num_experts, top_k=top_k, losses=losses)
        self.config = config
        proj_dim = config.proj_dim or max(1, num_experts // 2)
        self.project = nn.Parameter(torch.empty(proj_dim, dim))
        self.embedding = nn.Parameter(torch.empty(num_experts, proj_dim))
        self.log_scale: nn.Parameter | None = None
        if not config.legacy:
            self.log_scale = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw projection and embeddings anew; set the temperature of the config."""
        nn.init.uniform_(self.project, -1 / math.sqrt(self.dim), 1 / math.sqrt(self.dim))
        init_embeddings(self.embedding, "orthogonal")
        if self.log_scale is not None:
            nn.init.constant_(self.log_scale, -math.log(self.config.temperature))

    def affinity(self, x_TD: Tensor) -> Tensor:
        """Return the (T, E) cosine affinities."""
        reduced_TP = x_TD @ self.project.to(x_TD.dtype).T
        embedding_EP = unit_rows(self.embedding.to(x_TD.dtype))
        if self.log_scale is None:
            return reduced_TP @ embedding_EP.T
        scale = self.log_scale.to(x_TD.dtype).clamp(max=_GREATEST_LOG_SCALE).exp()
        return scale * unit_rows(reduced_TP) @ embedding_EP.T

    def decide(
        self, x: Tensor, *, token_mask: Tensor | None = None, token_ids: Tensor | None = None
    ) -> Routing:
        """Select the top K experts by cosine affinity."""
        mask_T = None if token_mask is None else token_mask.reshape(-1)
        affinity_TE = self.affinity(flat(x))
        expert_ids_TK, gate_TK = select(affinity_TE, self.top_k, self.config.gate)
        loss = common_losses(
            self.losses, affinity_TE, expert_ids_TK, mask_T, group=self.balance_group
        )
        return Routing(expert_ids_TK, gate_TK, affinity_TE, loss, expert_ids_TK[:, 0].clone())


class RandomRouter(Router):
    """The paper's ablation: M (C, D) is drawn at random in every call."""

    def __init__(self, config: RandomConfig, base: Router) -> None:
        super().__init__(
            dim=base.dim, num_experts=base.num_experts, top_k=base.top_k, losses=base.losses
        )
        check_mix(config.mix, base.num_experts)
        self.config = config
        self.base = base
        self.mix = config.mix
        self.causal = base.causal
        self.always_k = base.always_k

    def rescale(
        self,
        x: Tensor,
        state: RoutingState,
        *,
        token_mask: Tensor | None = None,
        cache: StatisticsSlot | None = None,
    ) -> ScaledTokens:
        """Multiply each token by the random scale of its clusters."""
        check_state(state, x, self.mix, self.num_experts, self.config)
        x_TD = flat(x)
        normal_CD = torch.randn(self.num_experts, self.dim, device=x.device, dtype=x_TD.dtype)
        scale_CD = (1 + self.config.std * normal_CD).clamp(min=0)
        if self.mix == 1:
            return ScaledTokens(x, scale_CD, state.assignment[:, 0], state.order)
        scale_TJD = gather_scale(scale_CD, state.assignment[None])
        scale_TJD = scale_TJD.masked_fill((state.assignment < 0)[None, ..., None], 1.0)
        scaled_TD = bounded(x_TD) * mix_scales(scale_TJD, state.membership[None])[0]
        return ScaledTokens(x, product=scaled_TD.view(x.shape))

    def route(
        self,
        tokens: ScaledTokens,
        *,
        token_mask: Tensor | None = None,
        token_ids: Tensor | None = None,
    ) -> Routing:
        return self.base.route(tokens, token_mask=token_mask, token_ids=token_ids)


class HashRouter(Router):
    """Each token id has its own fixed random experts, with equal gates.

    The router has no parameters, so the balance and z-loss that a model sets for all its layers
    have
    nothing to act on here: the loss is 0.
    """

    def __init__(
        self,
        config: HashConfig,
        *,
        dim: int,
        num_experts: int,
        top_k: int,
        losses: LossConfig | None = None,
    ) -> None:
        losses = no_noise_losses(losses, config.name)
        super().__init__(dim=dim, num_experts=num_experts, top_k=top_k, losses=losses)
        self.config = config

    def decide(
        self, x: Tensor, *, token_mask: Tensor | None = None, token_ids: Tensor | None = None
    ) -> Routing:
        """Select the K experts whose hash with the token id is largest."""
        ids_T = need_token_ids(token_ids, x, self.config.name)
        expert_E = torch.arange(self.num_experts, device=x.device)
        dtype = accumulation_dtype(x.dtype)
        key_TE = scramble(ids_T[:, None] * self.num_experts + expert_E, self.config.seed)
        affinity_TE = key_TE.to(dtype) / 2**31
        expert_ids_TK = best_first(key_TE, self.top_k)
        gate_TK = torch.full_like(expert_ids_TK, 1 / self.top_k, dtype=dtype)
        loss = x.new_zeros((), dtype=torch.float32)
        # Not the argmax of the affinity: float32 rounds the 31 bits of a key.
        return Routing(expert_ids_TK, gate_TK, affinity_TE, loss, expert_ids_TK[:, 0].clone())


def scramble(value: Tensor, seed: int) -> Tensor:
    """Hash integers to 31 bits: multiply, xor the high bits into the low ones, repeat."""
    value = value.long() + (seed * 0x9E3779B1 & 0x7FFFFFFF)
    for factor in (0x45D9F3B, 0x119DE1F3):
        value = (value ^ (value >> 16)) * factor & 0x7FFFFFFF
    return value ^ (value >> 15)


class ExpertChoiceRouter(Router):
    """Each expert selects its best tokens of the whole call: balanced, but not causal."""

    causal = False
    always_k = False

    def __init__(
        self,
        config: ExpertChoiceConfig,
        *,
        dim: int,
        num_experts: int,
        top_k: int,
        losses: LossConfig | None = None,
    ) -> None:
        losses = no_noise_losses(losses, config.name)
        super().__init__(dim=dim, num_experts=num_experts, top_k=top_k, losses=losses)
        self.config = config
        self.embedding = nn.Parameter(torch.empty(num_experts, dim))
        self.bias = nn.Parameter(torch.empty(num_experts)) if config.bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the expert embeddings anew and set the bias to 0."""
        init_embeddings(self.embedding)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def decide(
        self, x: Tensor, *, token_mask: Tensor | None = None, token_ids: Tensor | None = None
    ) -> Routing:
        """Let each expert select tokens by the softmax gate."""
        x_TD = flat(x)
        mask_T = None if token_mask is None else token_mask.reshape(-1)
        affinity_TE = linear_affinity(x_TD, self.embedding, self.bias)
        gate_TE = affinity_TE.softmax(-1)
        taken_TE = self.taken(gate_TE.detach(), mask_T)
        expert_E = torch.arange(self.num_experts, device=x.device)
        expert_ids_TE = torch.where(taken_TE, expert_E, self.num_experts)
        # The load is balanced by construction: only the z-loss applies.
        loss = common_losses(only_z(self.losses), affinity_TE, expert_ids_TE, mask_T)
        # A token's cluster is the expert of highest affinity that took it, and that of highest
        # affinity where none did, as for a token that an expert drops at its capacity.
        first_T = first_chosen(affinity_TE, expert_ids_TE)
        return Routing(expert_ids_TE, gate_TE * taken_TE, affinity_TE, loss, first_T)

    def taken(self, gate_TE: Tensor, mask_T: Tensor | None) -> Tensor:
        """Return (T, E) bool: the token is among the expert's `capacity` best."""
        if mask_T is not None:
            gate_TE = gate_TE.masked_fill(~mask_T[:, None], -1.0)
        # float64, and divide last: k * 21 / 7 must not become 3.0000002, whose ceiling is 4.
        factor = self.config.capacity_factor * self.top_k
        if wide_dtype(gate_TE.device) == torch.float64:
            capacity = (factor * real_tokens(gate_TE, mask_T) / self.num_experts).ceil()
        else:
            most = gate_TE.shape[0]  # an infinite factor has no ceiling
            capacity = rows_for(
                lambda n: math.ceil(min(factor * n / self.num_experts, most)), gate_TE, mask_T
            )
        rank_TE = gate_TE.argsort(dim=0, descending=True, stable=True).argsort(dim=0)
        return (rank_TE < capacity) & (gate_TE >= 0)
