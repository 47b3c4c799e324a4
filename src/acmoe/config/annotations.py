"""Reading the type annotations of config dataclasses: what a field may hold, and in which words."""

from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def field_types(config: type[Any]) -> dict[str, Any]:
    """Annotation of each field, in order; class variables are no fields."""
    hints = get_type_hints(config)
    return {field.name: hints[field.name] for field in fields(config)}


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the annotation alone."""
    if get_origin(annotation) in (Union, UnionType):
        return tuple(found for part in get_args(annotation) for found in members(part))
    return (annotation,)


def named_configs(annotation: Any) -> dict[str, type[Any]]:
    """Config classes a field may hold, by the class variable `name`; empty for plain values."""
    classes: list[Any] = [part for part in members(annotation) if is_dataclass(part)]
    return {part.name: part for part in classes if has_tag(part)}


def has_tag(config: Any) -> bool:
    """Whether a config class is told from its alternatives by a class variable `name`."""
    return isinstance(getattr(config, "name", None), str) and "name" not in {
        field.name for field in fields(config)
    }


def in_words(annotation: Any) -> str:
    """What a value must be, as the end of an error message."""
    parts = [part for part in members(annotation) if part is not NoneType]
    words = [_one_in_words(part) for part in parts]
    if NoneType in members(annotation):
        words.append("none")
    return " or ".join(words)


def _one_in_words(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        first, *rest = get_args(annotation)
        count = "a list" if rest == [...] else f"{1 + len(rest)} values"
        return f"{count} separated by commas, each {_one_in_words(first)}"
    if is_dataclass(annotation):
        return f"a {annotation.__name__}"  # type: ignore[union-attr]
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[
        annotation
    ]
