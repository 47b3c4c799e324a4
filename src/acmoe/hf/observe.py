"""Hooks that record what the routers of a transformers model read and choose, attached or plain.

They change nothing: a plain model, and one that `acmoe.attach` made adaptive, compute the same
bits with and without them.

T tokens of a call, S of them whose router input is kept, D features, E experts, K per token.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from acmoe.errors import UserError, check
from acmoe.hf.adaptive import AdaptivePart
from acmoe.hf.discovery import FoundRouter, RouterStack
from acmoe.hf.hooks import PLACE
from acmoe.routing.adaptive import AdaptiveRouter
from acmoe.routing.token_scale import token_scale


@dataclass(frozen=True, kw_only=True)
class RouterCall:
    """One call of one router. Tensors are on the CPU, floating-point ones in float32."""

    scores: Tensor  # (T, E) higher is better
    ids: Tensor  # (T, K) chosen experts; E: none of this machine's
    weights: Tensor | None  # (T, K) of the chosen experts; None if the output does not tell
    input: Tensor  # (S, D) hidden states before a rescaling
    scaled: Tensor  # (S, D) what the router itself read
    scale: Tensor | None  # (S, D) diagonal of each token's M; None: a plain router

    def select(self, index: Tensor) -> "RouterCall":
        """Return the call with the choices of the tokens at `index`; kept inputs stay."""
        weights = None if self.weights is None else self.weights[index]
        return replace(self, scores=self.scores[index], ids=self.ids[index], weights=weights)


Calls = dict[str, RouterCall]  # by the router's dotted name
Rows = Mapping[str, Tensor]  # by the router's dotted name: (S,) indices of the tokens to keep


@contextmanager
def observed(stacks: Sequence[RouterStack], rows: Rows, *, tokens: int) -> Iterator[Calls]:
    """Record one forward pass over `tokens` tokens inside the `with` block."""
    calls: Calls = {}
    watches = [
        _Watch(found, rows[found.name], tokens, calls)
        for stack in stacks
        for found in stack.routers
    ]
    try:
        yield calls
    finally:
        for watch in watches:
            watch.remove()


def called_stack(stacks: Sequence[RouterStack], calls: Calls) -> RouterStack:
    """Return the stack whose routers were called; raise unless it is one, and all of them."""
    reached = [one for one in stacks if any(found.name in calls for found in one.routers)]
    check(bool(reached), "the forward pass called no MoE router; analyze a model with MoE layers")
    if len(reached) > 1:
        names = ", ".join(one.name or type(one.stack).__name__ for one in reached)
        raise UserError(
            f"the forward pass runs through {len(reached)} stacks of MoE layers ({names}), whose "
            "tokens differ; analyze a model with one stack"
        )
    missing = [found.name for found in reached[0].routers if found.name not in calls]
    if missing:
        raise UserError(
            f"{missing[0]} was not called in a forward pass over text; {len(missing)} of "
            f"{len(reached[0].routers)} routers were left out: analyze a model that calls them all"
        )
    return reached[0]


def is_adaptive(router: nn.Module) -> bool:
    """Return whether `attach` made this router read rescaled tokens."""
    return _reader(router) is not None


def _reader(router: nn.Module) -> AdaptiveRouter | None:
    part = getattr(router, PLACE, None)
    return part.reader if isinstance(part, AdaptivePart) else None


class _Watch:
    """The hooks on one router."""

    def __init__(self, found: FoundRouter, rows_S: Tensor, tokens: int, calls: Calls) -> None:
        self.found, self.rows, self.tokens, self.calls = found, rows_S, tokens, calls
        self.input: Tensor | None = None
        self.scaled: Tensor | None = None
        self.scale: Tensor | None = None
        router = found.module
        # The hooks of `attach` stand between these two.
        self.handles = [
            router.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True),
            router.register_forward_pre_hook(self.at_entry, with_kwargs=True),
            router.register_forward_hook(self.after, prepend=True),
        ]
        self.reader = _reader(router)
        if self.reader is not None:
            # An instance attribute hides the method. The M that is used is recorded, not a second
            # computation of it, which prefix statistics would take for more tokens.
            vars(self.reader)["cluster_scale"] = self.recording(self.reader.cluster_scale)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        if self.reader is not None:
            del vars(self.reader)["cluster_scale"]

    def before(self, router: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        check(
            self.found.name not in self.calls,
            f"{self.found.name} was called twice in one forward pass; analyze a model whose layers "
            "are called once",
        )
        x = _hidden_states(args, named)
        seen = x.numel() // x.shape[-1]
        check(
            seen == self.tokens,
            f"{self.found.name} reads {seen} of {self.tokens} tokens; an analysis needs every "
            "router to see all tokens of a call",
        )
        self.input = self.kept(x)

    def recording(self, cluster_scale: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def record(x_BLD: Tensor, state: Any, *rest: Any) -> Tensor:
            scale = cluster_scale(x_BLD, state, *rest)
            part = getattr(self.found.module, PLACE)
            blend = part.blend.value.float()
            M_BLD = token_scale(scale, state, x_BLD).float()
            self.scale = self.kept(torch.lerp(torch.ones_like(M_BLD), M_BLD, blend))
            return scale

        return record

    def at_entry(self, router: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.scaled = self.kept(_hidden_states(args, named))

    def after(self, router: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        scores_TE, ids_TK = self.found.read(output)
        weights_TK = None if ids_TK is None else _weights(output, ids_TK)
        E = scores_TE.shape[-1]
        if ids_TK is None:
            top_k = getattr(router, "top_k", 1)
            ids_TK = scores_TE.topk(top_k if isinstance(top_k, int) else 1).indices
        ids_TK = torch.where((ids_TK >= 0) & (ids_TK < E), ids_TK.long(), E)
        assert self.input is not None and self.scaled is not None
        self.calls[self.found.name] = RouterCall(
            scores=_cpu_copy(scores_TE),
            ids=_cpu_copy(ids_TK),
            weights=None if weights_TK is None else _cpu_copy(weights_TK),
            input=self.input,
            scaled=self.input if self.reader is None else self.scaled,
            scale=self.scale,
        )

    def kept(self, x: Tensor) -> Tensor:
        x_TD = x.detach().reshape(-1, x.shape[-1])
        return _cpu_copy(x_TD[self.rows.to(x.device)])


def _hidden_states(args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    x = args[0] if args else named["hidden_states"]
    assert isinstance(x, Tensor)
    return x


def _weights(output: Any, ids_TK: Tensor) -> Tensor | None:
    """Return the only floating-point tensor of the output with the shape of the ids, if any."""
    alike = [
        one
        for one in (output if isinstance(output, tuple | list) else ())
        if isinstance(one, Tensor) and one.is_floating_point() and one.shape == ids_TK.shape
    ]
    return alike[0] if len(alike) == 1 else None


def _cpu_copy(value: Tensor) -> Tensor:
    """Copy to the CPU, since the model may overwrite its own tensor later."""
    return value.detach().to("cpu", torch.float32 if value.is_floating_point() else None, copy=True)
