"""Configs that a module outside the core defines, and the fields that moved there.

Version 0.1 had nine fields in `AdaptiveConfig` that go beyond the paper. They are now fields of its
subclass named "adaptive-variant", which exists once `acmoe.lab.variants` has been imported; the
core never imports it. The functions here convert old configs to it, or name the module to import.
"""

import warnings
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, ClassVar, Self

from acmoe.config.annotations import named_configs
from acmoe.errors import UserError

VARIANT = "adaptive-variant"
# The module that defines a config name; it has to be imported before the name is known.
DEFINED_IN = {VARIANT: "acmoe.lab.variants"}

# The fields of version 0.1 that moved from "adaptive" to "adaptive-variant", with their defaults.
VARIANT_FIELDS: dict[str, Any] = {
    "power": 1.0,
    "part": "both",
    "center": False,
    "match": False,
    "strength_end": None,
    "strength_steps": None,
    "learn_strength": False,
    "gain": True,
    "read": "normed",
}


def import_hint(name: str) -> str:
    """Return the end of an error message about an unknown config name: the module to import."""
    module = DEFINED_IN.get(name)
    return "" if module is None else f"; {name} needs `import {module}`"


class WithMovedFields:
    """The base of `AdaptiveConfig`; it knows which fields moved to a subclass."""

    name: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __new__(cls, **given: Any) -> Self:
        """Create an instance of the subclass, with a warning, if a moved field is given."""
        kind = cls
        if moved := cls._moved(given):
            kind = cls._variant(moved)
            _warn(f"{cls.__name__}({moved[0]}=...)", f"{kind.__name__}({moved[0]}=...)")
        return super().__new__(kind)

    @classmethod
    def migrated(cls, stored: dict[str, Any]) -> tuple[type[Self], dict[str, Any]]:
        """Return class and fields of a config that any version stored under this class's name.

        Moved fields are left out where all of them have their defaults.
        """
        moved = cls._moved(stored)
        if any(stored[name] != VARIANT_FIELDS[name] for name in moved):
            return cls._variant(moved), stored
        return cls, {name: value for name, value in stored.items() if name not in moved}

    def accepting(self, names: Iterable[str], key: str) -> Self:
        """Return this config, or its copy in the subclass if one of the field names moved there.

        `key` is the setting that holds the config, such as model.router.
        """
        moved = self._moved(names)
        if not moved:
            return self
        kind = self._variant(moved)
        _warn(f"{key}.{moved[0]} with {key}={self.name}", f"{key}={VARIANT} {key}.{moved[0]}=...")
        return kind(**{one.name: getattr(self, one.name) for one in fields(self)})

    @classmethod
    def _moved(cls, names: Iterable[str]) -> list[str]:
        own = cls.__dataclass_fields__
        return [name for name in names if name in VARIANT_FIELDS and name not in own]

    @classmethod
    def _variant(cls, moved: Iterable[str]) -> type[Self]:
        found = named_configs(cls).get(VARIANT)
        if found is None:
            raise UserError(
                f"{', '.join(moved)}: beyond the paper, and no longer a setting of {cls.__name__}; "
                f"`import {DEFINED_IN[VARIANT]}`, whose VariantConfig has it"
            )
        return found


def _warn(old: str, new: str) -> None:
    """Warn the caller of the function that calls this one."""
    warnings.warn(
        f"{old} is now spelled {new}; the old spelling goes with version 0.3",
        FutureWarning,
        stacklevel=3,
    )
