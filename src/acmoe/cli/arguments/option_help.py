"""Format options on a help page: one paragraph of text, and no `None` where nothing is given."""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable
from types import NoneType
from typing import Annotated, Any, cast, get_args, get_type_hints

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)


def registry() -> ConstructorRegistry:
    """Return rules that replace tyro's own for the commands and their optional values."""
    rules = ConstructorRegistry()
    rules.struct_rule(_command)
    rules.primitive_rule(_optional)
    return rules


def _command(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Read a command's options from its dataclass, with their texts as one paragraph each."""
    command = info.type
    if not dataclasses.is_dataclass(command) or not command.__module__.startswith("acmoe.cli."):
        return None
    hints, texts = get_type_hints(command, include_extras=True), option_texts(cast(type, command))
    fields = []
    for field in dataclasses.fields(command):
        kind, default = hints[field.name], field.default
        if default is dataclasses.MISSING:
            default = tyro.MISSING
        elif default is None or isinstance(default, bool) or default in ((), ""):  # not given
            kind = Annotated[kind, tyro.conf.arg(help_behavior_hint="")]
        text = texts.get(field.name, "")
        fields.append(StructFieldSpec(field.name, kind, default, helptext=text))
    return StructConstructorSpec(cast(Callable[..., Any], command), tuple(fields))


def option_texts(command: type) -> dict[str, str]:
    """Return the text of each option of a command, with single spaces for line breaks.

    It is the string below the field, or for an option that commands share the help of its type.
    """
    hints = get_type_hints(command, include_extras=True)
    shared = {
        name: note.help
        for name, hint in hints.items()
        for note in getattr(hint, "__metadata__", ())
        if getattr(note, "help", None)
    }
    return shared | _texts_below(command)


def _texts_below(command: type) -> dict[str, str]:
    """Return the string below each field of a class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(command))).body
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(field.target, ast.Name) and isinstance(below.value, ast.Constant)
            texts[field.target.id] = " ".join(str(below.value.value).split())
    return texts


def _optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Show an `int | None` as INT. The word None is still accepted, as if nothing were given."""
    kinds = get_args(info.type)
    if NoneType not in kinds or len(kinds) != 2:
        return None
    (kind,) = (one for one in kinds if one is not NoneType)
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, info.markers))
    if not isinstance(spec, PrimitiveConstructorSpec) or spec.nargs != 1:
        return None
    return dataclasses.replace(
        spec,
        instance_from_str=lambda words: (
            None if words == ["None"] else spec.instance_from_str(words)
        ),
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: [] if value is None else spec.str_from_instance(value),
        choices=None if spec.choices is None else (*spec.choices, "None"),
    )
