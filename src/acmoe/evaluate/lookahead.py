"""Say where the routing of a language model looks ahead, which means: depends on later tokens."""

from collections.abc import Iterable

from acmoe.config.routing import AdaptiveConfig, ExpertChoiceConfig, RouterConfig, base_router

_SEEN = {
    "batch": "later tokens and other rows of the forward pass",
    "sequence": "later tokens of its row",
}


def lookahead_in_scores(router: RouterConfig, modes: Iterable[str]) -> list[str]:
    """Return a line for each statistics mode that looks ahead, or one if the base router does."""
    return _of_base(router) or [
        f"statistics={mode}: a token's experts depend on {_SEEN[mode]}, so that this score is no "
        "score of a causal model; --statistics running gives one"
        for mode in modes
        if mode in _SEEN
    ]


def lookahead_in_training(router: RouterConfig) -> list[str]:
    """Return a line for training, or one for validation alone, if the routing looks ahead there."""
    if _of_base(router) or not isinstance(router, AdaptiveConfig):
        return _of_base(router)
    train, valid = router.modes
    if train in _SEEN:
        then = "as in validation; `acmoe evaluate --statistics running` scores without them"
        if valid != train:
            then = f"validation has statistics={valid}"
        return [f"statistics={train}: a token's experts depend on {_SEEN[train]}; {then}"]
    if valid in _SEEN:
        return [
            f"eval_statistics={valid}: in validation a token's experts depend on {_SEEN[valid]}"
        ]
    return []


def _of_base(router: RouterConfig) -> list[str]:
    base = base_router(router)
    if not isinstance(base, ExpertChoiceConfig):
        return []
    return [
        f"router={base.name}: experts choose among all tokens of a forward pass, so that a token's "
        "experts depend on later tokens and other rows; the model cannot generate text, and its "
        "scores are no scores of a causal model"
    ]
