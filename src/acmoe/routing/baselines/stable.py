"""StableMoE: learn a routing, distil it into a router of token ids, then freeze it.

T tokens, D features, E experts, K experts per token, P features of the light router.
"""

import torch
from torch import Tensor, nn

from acmoe.config.routing import LossConfig, StableConfig
from acmoe.errors import check
from acmoe.ops.checks import check_range
from acmoe.ops.embedding.op import Embedding
from acmoe.ops.route.reference import best_first
from acmoe.routing.losses import (
    distillation_loss,
    no_noise_losses,
    stable_balance_loss,
    weighted_z_loss,
)
from acmoe.routing.router import Router, flat, flat_mask, need_token_ids
from acmoe.routing.state import Routing
from acmoe.routing.topk import init_embeddings, init_orthogonal


class StableRouter(Router):
    """Stage 1 routes by x . c_k and trains a light router on token ids; stage 2 routes by that.

    The gate is sigmoid(x . c_k) in both stages, so the expert centroids c_k keep learning.
    Evaluation always uses the light router, as in the StableMoE paper. It was published for k = 1;
    with k > 1 every selected expert has its own sigmoid.
    """

    def __init__(
        self,
        config: StableConfig,
        *,
        dim: int,
        num_experts: int,
        top_k: int,
        losses: LossConfig | None = None,
    ) -> None:
        losses = no_noise_losses(losses, config.name)
        super().__init__(dim=dim, num_experts=num_experts, top_k=top_k, losses=losses)
        check(
            config.vocab_size is not None,
            "vocab_size=None; StableMoE's light router embeds token ids: give "
            "StableConfig(vocab_size=...), or legacy=True for the one-stage form",
        )
        assert config.vocab_size is not None
        self.config = config
        self.stage = 1
        self.embedding = nn.Parameter(torch.empty(num_experts, dim))
        init_embeddings(self.embedding, "orthogonal")
        self.light_tokens = Embedding(config.vocab_size, config.light_dim)
        self.light_experts = nn.Parameter(torch.empty(num_experts, config.light_dim))
        init_orthogonal(self.light_experts, gain=0.1)

    def reset_parameters(self) -> None:
        """Draw the embeddings of experts anew; `light_tokens` has its own reset_parameters."""
        init_embeddings(self.embedding, "orthogonal")
        init_orthogonal(self.light_experts, gain=0.1)

    def freeze(self) -> None:
        """Begin stage 2: the light router assigns tokens and stops learning."""
        self._enter(2)

    def _enter(self, stage: int) -> None:
        """Set the stage; the light router learns in stage 1 only.

        An optimizer leaves a parameter alone that has no gradient; one of zeros would still decay.
        """
        if stage != self.stage:
            self.stage = stage
            for parameter in (*self.light_tokens.parameters(), self.light_experts):
                parameter.requires_grad_(stage == 1)
                parameter.grad = None

    def get_extra_state(self) -> Tensor:
        """Return the stage as a tensor, which safetensors can store."""
        return torch.tensor(self.stage)

    def set_extra_state(self, state: Tensor) -> None:
        self._enter(int(state))

    def decide(
        self, x: Tensor, *, token_mask: Tensor | None = None, token_ids: Tensor | None = None
    ) -> Routing:
        """Route by the centroids in training stage 1, otherwise by the light router."""
        ids_T = need_token_ids(token_ids, x, self.config.name)
        mask_T = flat_mask(token_mask)
        if mask_T is not None:
            ids_T = ids_T.masked_fill(~mask_T, 0)  # padding may have an id outside the vocabulary
        check_range(ids_T, 0, self.light_tokens.num_embeddings, "token_ids")
        x_TD = flat(x)
        affinity_TE = x_TD @ self.embedding.to(x_TD.dtype).T
        light_TE = self.light_tokens(ids_T).to(x_TD.dtype) @ self.light_experts.to(x_TD.dtype).T
        learning = self.training and self.stage == 1
        chooser_TE = affinity_TE if learning else light_TE
        expert_ids_TK = best_first(chooser_TE, self.top_k)
        gate_TK = affinity_TE.gather(1, expert_ids_TK).sigmoid()
        # StableMoE's own balance loss, below, replaces the common one.
        loss = weighted_z_loss(self.losses, affinity_TE, mask_T)
        if learning:
            expert_T = affinity_TE.argmax(-1)
            score_T = affinity_TE.gather(1, expert_T[:, None])[:, 0]
            balance = stable_balance_loss(
                *(score_T, expert_T, self.num_experts, mask_T), group=self.loss_group
            )
            imitation = distillation_loss(light_TE, expert_T, mask_T)
            loss = loss + self.config.balance * balance + self.config.distill * imitation
        # A token's cluster is the expert it was sent to: in stage 2 the light router's choice.
        return Routing(expert_ids_TK, gate_TK, chooser_TE, loss, expert_ids_TK[:, 0].clone())


def freeze_stable_routers(model: nn.Module) -> bool:
    """Freeze every StableMoE router; return whether the model has any."""
    routers = [module for module in model.modules() if isinstance(module, StableRouter)]
    for router in routers:
        router.freeze()
    return bool(routers)
