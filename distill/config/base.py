"""What every section of settings is made of: a frozen model that refuses names and values that it does not have."""

from collections.abc import Iterable, Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Self, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from distill.runtime.errors import SettingError
from distill.runtime.files import expanded

EMPTY = "empty (a shell variable that is not set?)"
SEEDS = 2**63 - 1
STEPS = 10**9  # more than any run has
BATCH = 65_536  # sequences: ten times what a large machine holds of short ones
ROWS = 10**12
# The unit of a setting, and its range.
IN_STEPS: dict[str, Any] = {"unit": "steps", "ge": 1, "le": STEPS}
IN_SEQUENCES: dict[str, Any] = {"unit": "sequences", "ge": 1, "le": ROWS}

Refusal = tuple[str, Any, str, str]  # a setting, its value (None: not shown), what is wrong with it, and the cure


def refuse(refusals: Iterable[Refusal]) -> None:
    """Raises SettingError for the first of these."""
    for setting, value, problem, cure in refusals:
        shown = str(value).lower() if isinstance(value, bool) else value
        raise SettingError(problem, setting=setting, value=shown, cure=cure)


def _expanded(path: str) -> str:
    try:
        return expanded(path)
    except SettingError:
        problem = "begins with a user that this machine does not have; give ./{path} for a folder of that name here"
        raise PydanticCustomError("refused", problem, {"path": path}) from None


# The path of a file or a folder, or a name on the Hub in its place; what stands behind `~` is read here alone.
LocalPath = Annotated[str, AfterValidator(_expanded)]


class Settings(BaseModel):
    """One section: its fields are its settings, and the only place that knows their defaults and ranges."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True, arbitrary_types_allowed=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _is_what_was_meant(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse an empty text; take no truth value for a number, and no broken number for a whole one that fits."""
        field = cls.model_fields[str(info.field_name)]
        if isinstance(value, str) and not value.strip() and value != field.default:
            takes_null = NoneType in kinds_of(field.annotation)
            raise PydanticCustomError("refused", f"{EMPTY}; give a value{', or null for none' if takes_null else ''}")
        kinds = kinds_of(field.annotation)
        if isinstance(value, bool) and not kinds & {bool, Any} and kinds & {int, float}:
            raise PydanticCustomError("no_number", "a truth value is no number")
        if isinstance(value, float) and int in kinds and not kinds & {float, Any}:
            raise PydanticCustomError("int_type", "a whole number is needed")
        return value

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        refuse(self.refusals())
        return self

    def refusals(self) -> Iterator[Refusal]:
        """What these settings may not be together; a name that begins with a dot is one of this section."""
        yield from ()

    def given(self, *names: str) -> dict[str, Any]:
        """Those of these settings that do not have their defaults."""
        fields = type(self).model_fields
        values = {name: getattr(self, name) for name in names}
        return {name: one for name, one in values.items() if one != fields[name].get_default(call_default_factory=True)}

    def changed(self, **values: Any) -> Self:
        """The same settings with other values for some of them, which are checked like those of a command line."""
        kept = {name: value for name, value in self if name in self.model_fields_set}
        return self.model_validate(kept | values, by_alias=True, by_name=True)


def setting(default: Any, description: str, *, unit: str | None = None, **limits: Any) -> Any:
    """A field: its default, one sentence that says what it does, its unit, and its limits as pydantic takes them.

    Args:
        default: a value, or a class or function that makes it.
    """
    made = {"default_factory" if callable(default) else "default": default}
    return Field(**made, description=description, json_schema_extra={"unit": unit} if unit else None, **limits)


def kinds_of(annotation: Any) -> set[Any]:
    """The types that a field takes: `int | None` gives int and NoneType."""
    if get_origin(annotation) in (Union, UnionType):
        return {kind for member in get_args(annotation) for kind in kinds_of(member)}
    if get_origin(annotation) is Annotated:
        return kinds_of(get_args(annotation)[0])
    return {annotation}


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names; lists stay lists."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value
    return flat
