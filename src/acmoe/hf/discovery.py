"""Find the MoE routers of a transformers model from what the model itself declares.

A model of transformers names the modules whose outputs it can record. The entry
`_can_record_outputs["router_logits"]` names the router class and the place of its logits. Older
versions declare fewer routers; there the name of the class tells, ...TopKRouter.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from acmoe.errors import UserError, check
from acmoe.hf.checkpoints.wrappers import check_adapter, unwrapped_name
from acmoe.hf.families import (
    FAMILIES,
    CheckedReader,
    Family,
    Jitter,
    Reader,
    TupleReader,
    family_of,
)

KEY = "router_logits"
ROUTER_NAMES = ("gate", "router", "gating", "switch")  # names of routers in models
COPIED = "original_module"  # beside it, PEFT keeps the copy of the module that it trains


@dataclass(frozen=True)
class FoundRouter:
    """One router of a stack, and how to read it."""

    name: str  # dotted, from the model
    module: nn.Module
    layer: nn.Module  # the decoder layer that calls it
    num_experts: int  # columns of its scores
    dim: int  # features that it reads
    read: Reader  # its output -> scores (T, E), higher is better, and chosen ids (T, K) or None
    adaptable: bool  # False: it does not choose by its input; it only tells its clusters
    note: str | None = None  # a warning to users who adapt this router
    jitter: Jitter | None = None


@dataclass(frozen=True)
class RouterStack:
    """Decoder layers that one submodel runs in order, with the routers inside them."""

    name: str  # dotted, from the model; "" for the model itself
    stack: nn.Module
    layers: tuple[nn.Module, ...]
    routers: tuple[FoundRouter, ...]


class _Recorder(NamedTuple):
    """The part of transformers' OutputRecorder that is used here; it moved between versions."""

    target_class: type[nn.Module] | None
    place: int
    layer_name: str | None
    class_name: str | None

    def matches(self, name: str, module: nn.Module) -> bool:
        by_class = self.target_class is not None and isinstance(module, self.target_class)
        by_name = self.class_name is not None and f".{name}".endswith(self.class_name)
        inside = self.layer_name is None or f".{self.layer_name.strip('.')}." in f".{name}."
        return (by_class or by_name) and inside


class _Candidate(NamedTuple):
    name: str
    module: nn.Module
    path: tuple[tuple[str, nn.Module], ...]  # from the model down to the router
    place: int  # index of the scores in its output, as declared
    family: Family | None
    elsewhere: bool  # its family names another place in the model


def find_stacks(model: nn.Module) -> list[RouterStack]:
    """Return the stacks of decoder layers of `model` that hold MoE routers.

    Each router is listed once, with the innermost submodel around it. Raise `UserError` where
    there is no router, or where one cannot be adapted or understood.
    """
    candidates = _without_blocks(list(_candidates(model)))
    stacks: dict[str, list[_Candidate]] = {}
    for one in candidates:
        if one.family is not None and one.family.refusal is not None:
            raise UserError(
                f"{type(model).__name__}: {type(one.module).__name__} cannot be made adaptive: "
                f"{one.family.refusal}"
            )
        check(
            COPIED not in one.name.split("."),
            f"{one.name} is one of two copies: modules_to_save of PEFT names it, or a module "
            "around it; name the router's weight in target_parameters instead",
        )
        check_adapter(one.name, one.path[-2][1])
        stacks.setdefault(_stack_of(one)[0], []).append(one)
    check(bool(stacks), _nothing_found(model))
    return [_stack(name, found) for name, found in stacks.items()]


def _candidates(model: nn.Module) -> Iterator[_Candidate]:
    """Yield the modules that a recorder or the table of families names, outermost first."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        parts = name.split(".") if name else []
        prefixes = [".".join(parts[:end]) for end in range(len(parts) + 1)]
        path = tuple((prefix, modules[prefix]) for prefix in prefixes if prefix in modules)
        plain_name = unwrapped_name(name)
        family = family_of(module, plain_name)
        elsewhere = family is not None and not plain_name.endswith(family.ends_with)
        index = next(
            (one.place for one in _recorders_above(path) if one.matches(name, module)), None
        )
        named = type(module).__name__.lower().endswith("topkrouter")
        if family is not None or index is not None or named:
            yield _Candidate(name, module, path, index or 0, family, elsewhere)


def _recorders_above(path: tuple[tuple[str, nn.Module], ...]) -> list[_Recorder]:
    """Return the recorders of router logits for the last module of the path.

    They are those of the innermost transformers model around it that declares any.
    """
    for _, module in reversed(path[:-1]):
        if isinstance(module, PreTrainedModel):
            declared = (getattr(module, "_can_record_outputs", None) or {}).get(KEY)
            if declared is not None:
                declared = declared if isinstance(declared, list | tuple) else [declared]
                return [_recorder(one) for one in declared]
    return []


def _recorder(declared: Any) -> _Recorder:
    """Read an OutputRecorder, or a bare class or class name, whose logits then stand second."""
    if isinstance(declared, str):
        return _Recorder(None, 1, None, declared)
    if isinstance(declared, type):
        return _Recorder(declared, 1, None, None)
    layer_name, class_name = (getattr(declared, a, None) for a in ("layer_name", "class_name"))
    return _Recorder(declared.target_class, declared.index, layer_name, class_name)


def _without_blocks(candidates: list[_Candidate]) -> list[_Candidate]:
    """Drop MoE blocks, in which the router stands, and routers that a family leaves out."""
    return [
        one
        for one in candidates
        if one.name and not one.elsewhere and not _is_block(one, candidates)
    ]


def _is_block(one: _Candidate, candidates: list[_Candidate]) -> bool:
    """Return True if a candidate holds another.

    A module that a family leaves out, such as an nn.Linear in another place, may also be a part of
    a router; then the one around it has no experts, or a family of its own.
    """
    inside = [other for other in candidates if other.name.startswith(f"{one.name}.")]
    if all(other.elsewhere for other in inside):
        return bool(inside) and one.family is None and _holds_experts(one.module)
    return True


def _stack_of(one: _Candidate) -> tuple[str, nn.Module]:
    """Return the innermost PreTrainedModel around a router, or the model itself."""
    inner = [step for step in one.path[:-1] if isinstance(step[1], PreTrainedModel)]
    return inner[-1] if inner else one.path[0]


def _stack(name: str, found: list[_Candidate]) -> RouterStack:
    stack = _stack_of(found[0])[1]
    routers, layers = [], dict[int, nn.Module]()
    for one in found:
        layer, siblings = _layer_of(one)
        routers.append(_found_router(one, layer))
        layers.update({id(sibling): sibling for sibling in siblings})
    return RouterStack(name, stack, tuple(layers.values()), tuple(routers))


def _layer_of(one: _Candidate) -> tuple[nn.Module, list[nn.Module]]:
    """Return the decoder layer around a router, and all layers of the list it stands in.

    The layer is an element of the outermost ModuleList inside the stack, unless a family names
    its class.
    """
    start = [module for _, module in one.path].index(_stack_of(one)[1])
    below = [module for _, module in one.path[start:]]
    if one.family is not None and one.family.layer is not None:
        named = [m for m in below if type(m).__name__ == one.family.layer]
        check(
            bool(named),
            f"{one.name} is not inside a {one.family.layer}, the layer class registered for "
            f"{type(one.module).__name__}; correct `layer` in acmoe.hf.register_family",
        )
        alike = [m for m in below[0].modules() if type(m).__name__ == one.family.layer]
        return named[0], alike
    for module, child in pairwise(below):
        if isinstance(module, nn.ModuleList):
            return child, list(module)
    raise UserError(
        f"{one.name} stands in no nn.ModuleList of {type(below[0]).__name__}, so its decoder layer "
        "is unknown; name the layer class by acmoe.hf.register_family("
        f"{type(one.module).__name__!r}, layer=...)"
    )


def _found_router(one: _Candidate, layer: nn.Module) -> FoundRouter:
    family = one.family or Family()
    check(
        one.family is not None or not _holds_experts(one.module),
        f"{one.name} is declared as the source of {KEY!r}, but it is a whole MoE block "
        f"({type(one.module).__name__}) and not a router; name the router class inside it by "
        "acmoe.hf.register_family(...)",
    )
    num_experts, dim = _sizes(one, family)
    read = family.read or TupleReader(scores=one.place, ids=2 if one.place == 0 else None)
    return FoundRouter(
        name=one.name,
        module=one.module,
        layer=layer,
        num_experts=num_experts,
        dim=dim,
        read=CheckedReader(read, one.name, num_experts),
        adaptable=family.adaptable,
        note=family.note,
        jitter=family.jitter,
    )


def _holds_experts(module: nn.Module) -> bool:
    children = any("expert" in name for name, _ in module.named_children())
    return children or any(p.dim() > 2 for p in module.parameters())


def _sizes(one: _Candidate, family: Family) -> tuple[int, int]:
    """Return (num_experts, dim) from attributes, from a Linear, or from a weight's shape.

    A quantised weight is packed, so that its shape comes last.
    """
    router = one.module
    linears = [m for m in router.modules() if isinstance(m, nn.Linear)]
    weights = [p for p in router.parameters() if p.dim() == 2 and p.is_floating_point()]
    rows = [m.out_features for m in linears[-1:]] + [p.shape[0] for p in weights[-1:]]
    columns = [m.in_features for m in linears[:1]] + [p.shape[1] for p in weights[:1]]
    experts = _size(router, family.num_experts, ("num_experts",), rows)
    dim = _size(router, family.dim, ("hidden_dim", "hidden_size", "input_size"), columns)
    check(
        experts is not None and dim is not None,
        f"{one.name} ({type(router).__name__}) shows neither num_experts nor a (experts, features) "
        "weight; give num_experts and dim to acmoe.hf.register_family(...)",
    )
    assert experts is not None and dim is not None
    return experts, dim


def _size(
    router: nn.Module, given: int | str | None, names: tuple[str, ...], shapes: list[int]
) -> int | None:
    if isinstance(given, int):
        return given
    values = (getattr(router, name, None) for name in ((given,) if given else names))
    return next((v for v in values if isinstance(v, int)), shapes[0] if shapes else None)


def _nothing_found(model: nn.Module) -> str:
    submodels = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    classes = sorted({type(m).__name__ for m in submodels} or {type(model).__name__})
    return (
        f"{type(model).__name__} has no MoE router: none of {', '.join(classes)} names a module "
        f"that it holds in _can_record_outputs[{KEY!r}], and none of the {len(FAMILIES)} "
        f"registered router classes is inside; {_remedy(model)} before attach"
    )


def _remedy(model: nn.Module) -> str:
    """Say how to register the first module that is named like a router, or any."""
    for name, module in model.named_modules():
        steps = unwrapped_name(name).split(".")
        if steps[-1] in ROUTER_NAMES:
            place = ".".join(step for step in steps[-2:] if not step.isdigit())
            call = f"acmoe.hf.register_family({type(module).__name__!r}, ends_with={place!r})"
            return f"if {name} is its router, call {call}"
    return "name its router class by acmoe.hf.register_family('MyRouter', ...)"
