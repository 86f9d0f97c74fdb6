"""Command-line options from the fields of pydantic models."""

import argparse
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ValidationError
from pydantic.fields import FieldInfo

M = TypeVar("M", bound=BaseModel)


def _check_new(path: Path) -> Path:
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{path} is a directory" if path.is_dir() else f"there is no directory {path.parent}")
    return path


# A file to write. It is refused before the measurements begin.
NewFile = Annotated[Path, AfterValidator(_check_new)]


def add_options(group: argparse._ActionsContainer, fields: Mapping[str, FieldInfo]) -> None:
    """Add an option for every field. Values stay text, which `make` converts and checks."""
    for name, field in fields.items():
        group.add_argument(flag(name), dest=name, **_settings(field))


def flag(name: str) -> str:
    """The option of a field; `json_` is `--json`."""
    return f"--{name.rstrip('_').replace('_', '-')}"


def make(model: type[M], arguments: argparse.Namespace) -> M:
    """A model from parsed options. Raises ValueError, which names the option."""
    given = {name: value for name, value in vars(arguments).items() if name in model.model_fields}
    try:
        return model(**given)
    except ValidationError as error:
        problem = error.errors()[0]
        place = flag(str(problem["loc"][0])) + ": " if problem["loc"] else ""
        raise ValueError(place + problem["msg"].removeprefix("Value error, ")) from None


def _settings(field: FieldInfo) -> dict[str, Any]:
    """Arguments of `add_argument`."""
    kind, default = _without_none(field.annotation), field.get_default()
    several = get_origin(kind) in (list, tuple)
    text = (field.description or "").replace("%", "%%")
    settings: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text + _default_text(default, field)}
    if several:
        settings["nargs"] = "*"
        kind = _without_none(get_args(kind)[0])
    if kind is bool:
        settings["action"] = argparse.BooleanOptionalAction if default else "store_true"
    elif get_origin(kind) is Literal:
        settings["choices"] = get_args(kind)
    else:
        settings["metavar"] = _metavar(kind)
    return settings


def _default_text(default: Any, field: FieldInfo) -> str:
    if field.is_required() or field.default_factory or default is None or default is False or default in ((), ""):
        return ""
    shown = " ".join(map(str, default)) if isinstance(default, (list, tuple)) else str(default)
    return f" (default: {shown})".replace("%", "%%")


def _without_none(annotation: Any) -> Any:
    """The type behind `X | None` and `Annotated[X, ...]`."""
    if get_origin(annotation) is Annotated:
        return _without_none(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return _without_none(next(arg for arg in get_args(annotation) if arg is not type(None)))
    return annotation


def _metavar(kind: Any) -> str:
    return {Path: "FILE", int: "N", float: "X", str: "TEXT"}.get(kind, getattr(kind, "__name__", "VALUE").upper())
