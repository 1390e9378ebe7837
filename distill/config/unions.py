"""Sections that are one of several classes, by a kind: each class has what its kind reads, and nothing else."""

from collections.abc import Collection
from typing import Any, get_args

from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from distill.config.errors import parse, shown
from distill.config.model import Settings
from distill.runtime.errors import SettingError, did_you_mean

CUSTOM = "custom"  # the kind of a callable of the user's, which `_target_` chooses and which has no name to be given


class Kinds:
    """The classes of a section, and the setting that chooses one of them."""

    def __init__(self, classes: Any, by: str) -> None:
        """`classes`: a union of them; `by`: the name of the field that has the kind, a Literal in each of them."""
        self.classes: tuple[type[Settings], ...] = get_args(classes)
        self.by = by

    @property
    def fields(self) -> dict[str, FieldInfo]:
        """All fields of all of them but the kind, by name; of several with one name the first."""
        fields = {name: field for section in reversed(self.classes) for name, field in section.model_fields.items()}
        return {name: field for name, field in fields.items() if name not in (self.by, CUSTOM)}

    def defaults(self) -> dict[str, Any]:
        """The defaults of all fields, as the command line starts from them."""
        defaults = {name: field.get_default(call_default_factory=True) for name, field in self.fields.items()}
        return {name: to_jsonable_python(default) for name, default in defaults.items()}

    def is_given(self, name: str, value: Any) -> bool:
        """Whether a setting has another value than its default."""
        return value not in (None, self.defaults().get(name))

    def parse(self, values: dict[str, Any], setting: str, named: Collection[str]) -> Any:
        """The section of the kind that is chosen.

        Args:
            setting: what the command line calls the section.
            named: dotted names that are refused where the kind does not read them; others were set for any kind, by a
                recipe say, and are left out.

        Raises:
            SettingError: there is no such kind, or it does not read what was named, or refuses a value.
        """
        chosen = self._chosen(values, setting)
        for dotted in sorted(named):
            name = dotted.partition(".")[0]
            if name in self.fields and name not in chosen.model_fields and self.is_given(name, values.get(name)):
                raise SettingError(
                    f"not read with {setting}.{self.by}={values[self.by]}",
                    setting=f"{setting}.{dotted}",
                    value=shown(_value_at(values, dotted)),
                    cure=self._cure(name, setting),
                )
        read = {name: value for name, value in values.items() if name in chosen.model_fields or name not in self.fields}
        return parse(chosen, read, setting)

    def optional(self, section: type[Settings], values: dict[str, Any], named: Collection[str]) -> tuple[str, ...]:
        """The names that a callable of the user's gets only where it takes them.

        Those are what its section reads itself, and what a recipe, say, has set for any kind.
        """
        used_names = {
            name for name in (dotted.partition(".")[0] for dotted in named) if self.is_given(name, values.get(name))
        }
        return tuple(name for name in self.fields if name in section.model_fields or name not in used_names)

    def kinds_of(self, section: type[Settings]) -> tuple[str, ...]:
        """The values that choose this class."""
        return get_args(section.model_fields[self.by].annotation)

    def _chosen(self, values: dict[str, Any], setting: str) -> type[Settings]:
        by_kind = {kind: section for section in self.classes for kind in self.kinds_of(section)}
        kind = values.get(self.by)
        if kind == CUSTOM and values.get(CUSTOM) is None:
            kind = None
        if kind not in by_kind:
            names = [name for name in by_kind if name != CUSTOM]
            raise SettingError(
                f"not known{did_you_mean(kind, names)}",
                setting=f"{setting}.{self.by}",
                value=shown(values.get(self.by)),
                cure=f"choose one of {', '.join(names)}, or name a callable of your own as {setting}._target_",
            )
        return by_kind[kind]

    def _cure(self, name: str, setting: str) -> str:
        reading = next(section for section in self.classes if name in section.model_fields)
        return f"choose {setting}.{self.by}={self.kinds_of(reading)[0]}, or leave it out"


def _value_at(values: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values
