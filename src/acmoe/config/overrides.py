"""Apply `key=value` overrides with dotted keys to a config, parsed by the type of each field.

    steps=200 model.dim=64 model.router=adaptive model.router.statistics=prefix betas=0.9,0.98

All overrides are applied before any config is checked, so two fields that must agree can be changed
together, in any order.
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from types import NoneType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from acmoe.config.annotations import field_types, fits_int64, in_words, members, named_configs
from acmoe.config.moved import import_hint
from acmoe.errors import UserError, check, suggest

C = TypeVar("C")

# (config, field, name) -> the config that name stands for in that field
Named = Callable[[Any, str, str], Any]


@dataclass
class _Node:
    """Overrides of one field: a new value for the field, and overrides of the fields inside it."""

    value: str | None = None
    inside: "dict[str, _Node]" = field(default_factory=dict)


def override(config: C, pairs: Sequence[str], *, named: Named | None = None) -> C:
    """Return `config` with every `key=value` of `pairs` applied.

    A field that may hold one of several config classes takes the `name` of one. `named` builds the
    config for such a name; by default the class is built with its default values.
    """
    root = _Node()
    for pair in pairs:
        key, sign, value = pair.partition("=")
        check(
            bool(sign and key),
            f"{pair!r} is no setting; write key=value, such as seed=1",
        )
        node = root
        for part in key.split("."):
            node = node.inside.setdefault(part, _Node())
        check(node.value is None, f"{key} is given twice, as {node.value} and {value}; choose one")
        node.value = value
    return cast(C, _apply(config, root, "", config, named or _defaults))


def keys(config: object, prefix: str = "") -> list[str]:
    """List every dotted key that `override` accepts for this config."""
    found = []
    for name in field_types(type(config)):
        value = getattr(config, name)
        own = f"{prefix}{name}"
        group = is_dataclass(value)
        if not group or named_configs(field_types(type(config))[name]):
            found.append(own)
        if group:
            found += keys(value, f"{own}.")
    return found


def _defaults(owner: Any, name: str, value: str) -> Any:
    return named_configs(field_types(type(owner))[name])[value]()


def _apply(config: Any, node: _Node, path: str, root: object, named: Named) -> Any:
    if hasattr(config, "accepting"):  # it may know old names of settings
        config = config.accepting(node.inside, path.removesuffix("."))
    types = field_types(type(config))
    changes = {}
    for name, inside in node.inside.items():
        if name not in types:
            raise UserError(_unknown_key(name, config, path, root))
        changes[name] = _override_field(
            config, name, types[name], inside, f"{path}{name}", root, named
        )
    return replace(config, **changes) if changes else config


def _override_field(
    owner: Any, name: str, annotation: Any, node: _Node, path: str, root: object, named: Named
) -> Any:
    value = getattr(owner, name)
    choices = named_configs(annotation)
    optional = NoneType in members(annotation)
    if choices and optional and (node.value or "").lower() == "none":
        value = None
    elif node.value is not None and choices:
        check(
            node.value in choices,
            f"{path}={node.value!r} is unknown; {suggest(node.value, choices)}"
            f"{import_hint(node.value)}",
        )
        value = named(owner, name, node.value)
    elif node.value is not None and is_dataclass(value):
        first = next(iter(field_types(type(value))))
        raise UserError(
            f"{path}={node.value}: {path} is a group; set a part, such as {path}.{first}"
        )
    elif node.value is not None:
        value = parse(node.value, annotation, path)
    if node.inside:
        part = next(iter(node.inside))
        check(is_dataclass(value), f"{path}.{part} is unknown: {path} is one value, set {path}=...")
        value = _apply(value, node, f"{path}.", root, named)
    return value


def _unknown_key(name: str, config: Any, path: str, root: object) -> str:
    """Error message for an unknown key.

    Suggests similar fields of the same config, or else fields of that name anywhere in the run.
    """
    neighbours = list(field_types(type(config)))
    near = [f"{path}{other}" for other in difflib.get_close_matches(name, neighbours)]
    if not near:
        near = [key for key in keys(root) if key.rpartition(".")[2] == name]
    if f"{path}{name}" in near:  # a field of the value that another setting has replaced
        return (
            f"setting {path}{name} does not exist in {type(config).__name__}, which "
            f"{path.rstrip('.')}=... chose; it has {', '.join(neighbours) or 'no settings'}"
        )
    if near:
        return f"setting {path}{name} is unknown; did you mean {' or '.join(near)}?"
    where = path.rstrip(".") or "the run"
    return f"setting {path}{name} is unknown; {where} has {', '.join(neighbours)}"


def parse(text: str, annotation: Any, key: str) -> Any:
    """Parse a text as a value of the annotated type; `key` names the field in the error."""
    # str comes last because every text is a valid str: "2,3" is a tuple and "none" is None where
    # the annotation allows those.
    for part in sorted(members(annotation), key=lambda part: part is str):
        try:
            return _parse_one(text, part)
        except ValueError:
            continue
    size = " that fits into 64 bits" if int in members(annotation) and _is_whole(text) else ""
    raise UserError(f"{key}={text!r}; it must be {in_words(annotation)}{size}")


def _is_whole(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


_WORDS: dict[type, dict[str, bool | None]] = {
    NoneType: {"none": None},
    bool: {"true": True, "false": False},
}


def _parse_one(text: str, annotation: Any) -> Any:
    """Parse a text as one type that is no union; raise ValueError where it does not fit."""
    if annotation in _WORDS and text.lower() in _WORDS[annotation]:
        return _WORDS[annotation][text.lower()]
    if get_origin(annotation) is Literal and text in get_args(annotation):
        return text
    if get_origin(annotation) is tuple:
        first, *rest = get_args(annotation)
        items = tuple(_parse_one(item.strip(), first) for item in text.split(","))
        if rest == [...] or len(items) == 1 + len(rest):
            return items
    if annotation in (int, float, str):
        value = annotation(text)
        if not (isinstance(value, int) and not fits_int64(value)):
            return value
    raise ValueError(text)
