"""Read the type annotations of config dataclasses, and describe them for error messages."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from acmoe.errors import check


def field_types(config: type[Any]) -> dict[str, Any]:
    """Map each field to its annotation, in order of definition. Class variables are left out."""
    hints = get_type_hints(config)
    return {field.name: hints[field.name] for field in fields(config)}


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union, flattened, or the annotation itself as the only one."""
    if get_origin(annotation) in (Union, UnionType):
        return tuple(found for part in get_args(annotation) for found in members(part))
    return (annotation,)


def named_configs(annotation: Any) -> dict[str, type[Any]]:
    """Map `name` to each config class a field may hold; empty for fields of plain values.

    A subclass with its own name is allowed wherever its parent is.
    """
    classes: list[Any] = [part for part in members(annotation) if is_dataclass(part)]
    classes += [found for part in classes for found in _named_subclasses(part)]
    return {part.name: part for part in classes if has_tag(part)}


def _named_subclasses(config: type[Any]) -> list[type[Any]]:
    found = [child for child in config.__subclasses__() if "name" in vars(child)]
    return found + [deeper for child in found for deeper in _named_subclasses(child)]


def has_tag(config: Any) -> bool:
    """Return True where a config class has a class variable `name` that identifies it."""
    return isinstance(getattr(config, "name", None), str) and "name" not in {
        field.name for field in fields(config)
    }


def fits_int64(value: int) -> bool:
    """Return False for integers that no tensor, and in part no float, can hold."""
    return -(2**63) <= value < 2**63


def in_words(annotation: Any) -> str:
    """Describe the values that an annotation allows, to end an error message with."""
    parts = [part for part in members(annotation) if part is not NoneType]
    words = [_describe(part) for part in parts]
    if NoneType in members(annotation):
        words.append("none")
    return " or ".join(words)


def _describe(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        first, *rest = get_args(annotation)
        count = "a list" if rest == [...] else f"{1 + len(rest)} values"
        return f"{count} separated by commas, each {_describe(first)}"
    if is_dataclass(annotation):
        return f"a {annotation.__name__}"  # type: ignore[union-attr]
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[
        annotation
    ]


def check_types(config: Any) -> None:
    """Raise a UserError where a field of truth values or numbers holds another type."""
    for name, annotation, allowed in _plain_fields(config.__class__):
        value = getattr(config, name)
        if value is None and NoneType in members(annotation):
            continue
        check(allowed(value), f"{name}={value!r}; it must be {in_words(annotation)}")


@cache
def _plain_fields(kind: type[Any]) -> tuple[tuple[str, Any, Callable[[Any], bool]], ...]:
    """Return name, annotation and test of each field that holds truth values or numbers only."""
    found = []
    for name, annotation in field_types(kind).items():
        parts = [part for part in members(annotation) if part is not NoneType]
        if len(parts) == 1 and parts[0] in _TESTS:
            found.append((name, annotation, _TESTS[parts[0]]))
    return tuple(found)


_TESTS: dict[type, Callable[[Any], bool]] = {
    bool: lambda value: isinstance(value, bool),
    int: lambda value: isinstance(value, Integral) and not isinstance(value, bool),
    float: lambda value: isinstance(value, Real) and not isinstance(value, bool),
}
