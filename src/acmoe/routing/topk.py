"""The plain top-k router, and the gate that all token-choice routers share.

T tokens, D features, E experts, K experts per token.
"""

import logging
import math

import torch
from torch import Tensor, nn

from acmoe.config.routing import LossConfig, SMoEConfig
from acmoe.errors import check
from acmoe.ops.dispatch import log_once
from acmoe.ops.route import Route, ScaledTokens, route
from acmoe.ops.route.reference import best_first, first_chosen, linear_affinity, load
from acmoe.ops.statistics.dispersion import accumulation_dtype
from acmoe.ops.statistics.pending import record_count
from acmoe.ops.unit import unit_rows
from acmoe.routing.losses import (
    balance_of,
    common_losses,
    importance_loss,
    load_loss,
    over_group,
)
from acmoe.routing.router import Router, flat_mask
from acmoe.routing.state import Routing
from acmoe.routing.statistics.step import StepStatistics

ROUNDING = 4  # errors of rounding by which the length of a row that was just set may be off


def init_embeddings(embeddings_ED: Tensor, init: str = "uniform") -> None:
    """Draw (E, D) expert embeddings: uniform in +-1/sqrt(D), or orthogonal rows of norm 0.32."""
    if init == "orthogonal":
        init_orthogonal(embeddings_ED, gain=0.32)
    else:
        bound = 1 / math.sqrt(embeddings_ED.shape[1])
        nn.init.uniform_(embeddings_ED, -bound, bound)


@torch.no_grad()
def init_orthogonal(rows_ED: Tensor, *, gain: float) -> None:
    """Draw orthogonal rows of norm `gain`, in float32 at least: torch factorises no bf16 matrix."""
    drawn_ED = torch.empty_like(rows_ED, dtype=accumulation_dtype(rows_ED.dtype))
    rows_ED.copy_(nn.init.orthogonal_(drawn_ED, gain=gain))


def select(affinity_TE: Tensor, top_k: int, gate: str) -> tuple[Tensor, Tensor]:
    """Return the k experts of highest affinity, best first, and their gates, both (T, K)."""
    expert_ids_TK = best_first(affinity_TE, top_k)
    if over_selected(gate, top_k):
        return expert_ids_TK, affinity_TE.gather(1, expert_ids_TK).softmax(-1)
    return expert_ids_TK, affinity_TE.softmax(-1).gather(1, expert_ids_TK)


def over_selected(gate: str, top_k: int) -> bool:
    """Return True for a softmax over the chosen k (Eqn. 2), False for one over all E experts.

    "auto" takes all E for k = 1, because the softmax of a single value has no gradient.
    """
    return gate == "selected" or (gate == "auto" and top_k > 1)


class SelectionBias(StepStatistics):
    """Loss-free balancing: a bias per expert that rises while the expert gets too few tokens.

    The bias is added to the scores for the choice of experts, not for the gate, so it has no
    gradient. `last_load` counts the tokens of all training forwards since the last update.
    """

    pending_names = (None, "last_load")
    bias: Tensor
    last_load: Tensor

    def __init__(self, num_experts: int, step: float) -> None:
        super().__init__()
        self.step = step
        self.register_buffer("bias", torch.zeros(num_experts))
        self.register_buffer("last_load", torch.zeros(num_experts), persistent=False)

    def select(self, affinity_TE: Tensor, top_k: int, gate: str) -> tuple[Tensor, Tensor]:
        gate_TE = affinity_TE.softmax(-1)
        expert_ids_TK = best_first(gate_TE.detach() + self.bias, top_k)
        if over_selected(gate, top_k):
            return expert_ids_TK, affinity_TE.gather(1, expert_ids_TK).softmax(-1)
        return expert_ids_TK, gate_TE.gather(1, expert_ids_TK)

    @torch.no_grad()
    def record(self, expert_ids_TK: Tensor, token_mask_T: Tensor | None) -> None:
        record_count(
            self.pending_buffer("last_load"), load(expert_ids_TK, self.bias.numel(), token_mask_T)
        )
        self.count_forward()

    @torch.no_grad()
    def update(self) -> None:
        self.bias.add_(self.step * (self.last_load.mean() - self.last_load).sign())
        self.last_load.zero_()


class EmbeddingLength(StepStatistics):
    """Set the stored embeddings of a router to one length, after every step of its optimizer.

    A row that has this length up to rounding keeps its bits.
    """

    def __init__(self, router: "TopKRouter", length: float) -> None:
        super().__init__()
        self.owner = [router]  # a list: the router must not become a submodule of its own
        self.length = length
        self.update()

    @property
    def seen(self) -> bool:
        """Return False: steps of other optimizers leave it alone, as if it were on no process.

        A router that no optimizer holds may be an average of the weights, whose rows are shorter.
        """
        return False

    @torch.no_grad()
    def update(self) -> None:
        if "embedding" not in self.owner[0]._parameters:
            log_once(
                f"embedding_length={self.length} is not restored: it sets the stored embeddings of "
                "a router, and a parametrization or a pruning mask computes these from others",
                logging.WARNING,
            )
            return
        embedding_ED = self.owner[0].embedding
        number = torch.finfo(embedding_ED.dtype)
        length_E1 = embedding_ED.norm(dim=-1, keepdim=True)
        factor_E1 = self.length / length_E1.clamp(min=number.tiny)
        kept_E1 = (factor_E1 - 1).abs() <= ROUNDING * number.eps
        embedding_ED.mul_(factor_E1.masked_fill(kept_E1, 1.0))


class TopKRouter(Router):
    """Choose the k experts of highest affinity x . e_k (+ b_k) (Eqn. 1)."""

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
        self.embedding = nn.Parameter(torch.empty(num_experts, dim))
        self.bias: nn.Parameter | None = None
        if config.bias:
            self.bias = nn.Parameter(torch.empty(num_experts))
        self.fixed_length: EmbeddingLength | None = None
        TopKRouter.reset_parameters(self)  # a subclass has not made its own parameters yet
        self.selection: SelectionBias | None = None
        if config.bias_balancing > 0:
            self.selection = SelectionBias(num_experts, config.bias_balancing)
        if config.embedding_length is not None:
            self.fixed_length = EmbeddingLength(self, config.embedding_length)

    def reset_parameters(self) -> None:
        """Draw the expert embeddings anew, and the bias uniform in +-1/sqrt(D)."""
        init_embeddings(self.embedding, self.config.init)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -1 / math.sqrt(self.dim), 1 / math.sqrt(self.dim))
        if self.fixed_length is not None:
            self.fixed_length.update()

    def directions(self, x: Tensor) -> Tensor:
        """Return the (E, D) expert embeddings, normalised if the config says so.

        Normalised ones have the accumulation dtype of x.
        """
        if not self.config.normalize_embeddings:
            return self.embedding
        return unit_rows(self.embedding.to(accumulation_dtype(x.dtype)))

    def affinity(self, x_TD: Tensor) -> Tensor:
        """Return (T, E): x . e_k + b_k, without noise."""
        return linear_affinity(x_TD, self.directions(x_TD), self.bias)

    def noise(self, x_TD: Tensor) -> Tensor | None:
        """Draw the (T, E) noise that is added to affinities in training; None if there is none."""
        if not self.training or self.config.noise == 0:
            return None
        shape, dtype = (x_TD.shape[0], self.num_experts), accumulation_dtype(x_TD.dtype)
        return torch.randn(shape, dtype=dtype, device=x_TD.device) * self.noise_std

    def route(
        self,
        tokens: ScaledTokens,
        *,
        token_mask: Tensor | None = None,
        token_ids: Tensor | None = None,
    ) -> Routing:
        mask_T = flat_mask(token_mask)
        balances = self.losses.balance != 0 and self.selection is None
        found = self.choose(
            tokens,
            noise_TE=self.noise(tokens.rows()),
            mask_T=mask_T,
            temperature=self.config.balance_temperature if balances else None,
        )
        expert_ids_TK, gate_TK, first_T = found.expert_ids, found.gate, found.first
        if self.selection is not None:
            expert_ids_TK, gate_TK = self.selection.select(
                found.affinity, self.top_k, self.config.gate
            )
            first_T = first_chosen(found.affinity, expert_ids_TK)
            if self.training:
                self.selection.record(expert_ids_TK, mask_T)
        loss = self.loss(found, expert_ids_TK, mask_T)
        return Routing(expert_ids_TK, gate_TK, found.affinity, loss, first_T, found.x)

    def choose(
        self,
        tokens: ScaledTokens,
        *,
        noise_TE: Tensor | None,
        mask_T: Tensor | None,
        temperature: float | None,
    ) -> Route:
        """Choose the experts of highest affinity (Eqn. 1) by the op `route`."""
        weight = self.losses.balance
        return route(
            tokens,
            self.directions(tokens.x),
            self.bias,
            top_k=self.top_k,
            over_selected=over_selected(self.config.gate, self.top_k),
            token_mask=mask_T,
            temperature=temperature,
            noise=noise_TE,
            balance_weight=None if self.loss_group and weight else weight,
        )

    def decide(
        self, x: Tensor, *, token_mask: Tensor | None = None, token_ids: Tensor | None = None
    ) -> Routing:
        return self.route(ScaledTokens(x), token_mask=token_mask, token_ids=token_ids)

    @property
    def noise_std(self) -> float:
        return self.config.noise / self.num_experts

    def loss(self, found: Route, expert_ids_TK: Tensor, mask_T: Tensor | None) -> Tensor:
        """Return the weighted sum of the auxiliary losses, a scalar."""
        weights, temperature = self.losses, self.config.balance_temperature
        balance = found.balance
        if balance is None and found.load is not None and found.gate_sum is not None:
            balance = weights.balance * self._balance(
                found.load, found.gate_sum, expert_ids_TK.shape[0], mask_T
            )
        total = common_losses(
            weights,
            found.clean,
            expert_ids_TK,
            mask_T,
            temperature=temperature,
            balance=balance,
            group=self.loss_group,
        )
        if weights.importance_load:
            # Without a selection bias the last choice has the k-th largest affinity.
            biased = self.selection is not None
            expected = load_loss(
                *(found.clean, found.affinity, self.top_k, self.noise_std, mask_T),
                tutel=weights.tutel,
                kth_T1=None if biased else found.affinity.gather(1, expert_ids_TK[:, -1:]),
            )
            both = importance_loss(found.clean, mask_T) + expected
            total = total + weights.importance_load * both / 2
        return total

    def _balance(
        self, load_E: Tensor, gate_sum_E: Tensor, rows: int, mask_T: Tensor | None
    ) -> Tensor:
        """Return the balance loss from the sums that the op `route` computed."""
        if self.loss_group:
            tokens = load_E.new_full((), rows) if mask_T is None else mask_T.sum()
            return balance_of(*over_group(load_E, gate_sum_E, tokens, self.loss_group))
        count = max(rows, 1) if mask_T is None else mask_T.sum().clamp(min=1)
        return balance_of(load_E, gate_sum_E / count)
