"""Write configs as JSON and read them back. A router's config is identified by its `name`.

Reading rejects unknown fields, missing fields and values of a wrong type: a run that resumed under
a misread config would silently be a different run.
"""

from dataclasses import MISSING, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from acmoe.config.annotations import (
    field_types,
    fits_int64,
    has_tag,
    in_words,
    members,
    named_configs,
)
from acmoe.config.moved import import_hint
from acmoe.errors import UserError, check

FORMAT = 1  # raised when an older reader could no longer understand a stored config
READ = (FORMAT, 2)  # format 2 is the same with a checksum (acmoe.storage.sealed)

C = TypeVar("C")


def to_document(config: object) -> dict[str, Any]:
    """Return the content of a run's config.json."""
    return {"format": FORMAT, "config": encode(config)}


def from_document(document: object, kind: type[C], source: str) -> C:
    """Read a config of class `kind` as `to_document` wrote it; errors begin with `source`."""
    if not isinstance(document, dict):
        raise UserError(f"{source} is no JSON object; it was not written by acmoe")
    check(
        "format" in document or "model_type" not in document,
        f"{source} is that of a HuggingFace model, not of a run; `acmoe export FOLDER --to run "
        "DIR` makes a run of a model that `acmoe export` wrote",
    )
    check(
        document.get("format") in READ,
        f"{source} has format {document.get('format')!r}; this acmoe reads {READ}: use the "
        "version that wrote it",
    )
    check("config" in document, f"{source} lacks 'config'; it was not written by acmoe")
    return decode(document["config"], kind, source)


def encode(value: Any) -> Any:
    """Convert a config to JSON values; tuples become lists."""
    if is_dataclass(value) and not isinstance(value, type):
        tag = {"name": value.name} if has_tag(type(value)) else {}  # type: ignore[attr-defined]
        return tag | {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    return value


def decode(value: Any, kind: type[C], source: str) -> C:
    """Rebuild a config of class `kind` from the output of `encode`, with all its checks."""
    return cast(C, _read(value, kind, source, ""))


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten encoded values to dotted keys: {"model": {"dim": 8}} becomes {"model.dim": 8}."""
    if not isinstance(value, dict):
        return {prefix: value}
    parts = [flatten(item, f"{prefix}.{key}" if prefix else key) for key, item in value.items()]
    return {name: item for part in parts for name, item in part.items()}


def differences(stored: object, requested: object) -> list[str]:
    """List the settings in which two configs differ, as `key=stored, not requested`."""
    left, right = flatten(encode(stored)), flatten(encode(requested))
    shared = [key for key in left if key in right and left[key] != right[key]]
    # Where `name` differs, the classes differ too; their other fields would only repeat that.
    others = tuple(key.removesuffix("name") for key in shared if key.endswith(".name"))
    apart = [key for key in left.keys() ^ right.keys() if not key.startswith(others)]
    absent = "(absent)"
    return [
        f"{key}={left.get(key, absent)}, not {right.get(key, absent)}"
        for key in (*shared, *sorted(apart))
    ]


def _read(value: Any, annotation: Any, source: str, where: str) -> Any:
    if (named := named_configs(annotation)) and isinstance(value, dict):
        tag = str(value.get("name"))
        check(
            tag in named,
            f"{source}: {where} is {tag!r}; this acmoe knows {', '.join(named)}{import_hint(tag)}",
        )
        content = {key: item for key, item in value.items() if key != "name"}
        kind, content = _migrated(named[tag], content, source)
        return _read_fields(content, kind, source, where)
    for part in members(annotation):
        if is_dataclass(part) and isinstance(value, dict):
            return _read_fields(value, cast("type[Any]", part), source, where)
        if _fits(value, part):
            return _as_tuple(value)
    raise UserError(f"{source}: {where}={value!r}; expected {in_words(annotation)}")


def _migrated(
    kind: type[Any], content: dict[str, Any], source: str
) -> tuple[type[Any], dict[str, Any]]:
    """Class and fields after the class's `migrated`, if it has one, has read old spellings."""
    if not hasattr(kind, "migrated"):
        return kind, content
    try:
        found: tuple[type[Any], dict[str, Any]] = kind.migrated(content)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    return found


def _read_fields(value: dict[str, Any], kind: type[Any], source: str, where: str) -> Any:
    types = field_types(kind)
    inside = f"{where}." if where else ""
    for key in value:
        check(
            key in types,
            f"{source} has an unknown setting {inside}{key}; it was written by another version: "
            "use that version of acmoe",
        )
    for field in fields(kind):
        needed = field.default is MISSING and field.default_factory is MISSING
        check(
            field.name in value or not needed,
            f"{source} lacks the setting {inside}{field.name}; it was written by another version: "
            "use that version of acmoe",
        )
    content = {
        key: _read(item, types[key], source, f"{inside}{key}") for key, item in value.items()
    }
    return kind(**content)


def _fits(value: Any, annotation: Any) -> bool:
    """Return True where a JSON value has the annotated type, which is not a config class."""
    if annotation is NoneType:
        return value is None
    if get_origin(annotation) is Literal:
        return value in get_args(annotation)
    if get_origin(annotation) is tuple:
        first, *rest = get_args(annotation)
        return (
            isinstance(value, list)
            and (rest == [...] or len(value) == 1 + len(rest))
            and all(_fits(item, first) for item in value)
        )
    if isinstance(value, bool) or annotation is bool:
        return isinstance(value, bool) and annotation is bool
    if isinstance(value, int) and not fits_int64(value):
        return False
    if annotation is float:
        return isinstance(value, int | float)
    return annotation in (int, str) and isinstance(value, annotation)


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value
