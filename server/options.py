"""Command-line options, generated from the configuration tree."""

import argparse
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from runtime.config import Config, make_config

_UNSET = argparse.SUPPRESS
_HEADING = """\
# Options of `ramet serve`

A switch that is on by default has a `--no-` form. `make docs` writes these tables."""


def read_file(parser: argparse.ArgumentParser, name: str) -> str:
    """The text of a file that the command line names. Exits if it cannot be read."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"{name} cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}")


def add_options(parser: argparse.ArgumentParser, *sections: str, unlisted: Sequence[str] = ()) -> None:
    """Add the fields of some sections (default: all) as options. Field names are unique over all sections.

    Args:
        unlisted: further sections, whose options the help only mentions.
    """
    for name, section in Config.model_fields.items():
        if sections and name not in (*sections, *unlisted):
            continue
        model = section.annotation
        assert model is not None
        group = parser.add_argument_group(name, None if name in unlisted else model.__doc__)
        for field_name, field in model.model_fields.items():
            _add_option(group, field_name, field, name not in unlisted)
    if unlisted:
        parser.epilog = f"Options of `ramet serve` that also work here: those of {', '.join(unlisted)}."


def _add_option(group: argparse._ArgumentGroup, name: str, field: FieldInfo, listed: bool) -> None:
    kind, default = _inner(field.annotation), field.get_default(call_default_factory=True)
    shown = "" if default is None else f" (default: {default})"
    text = (field.description or "").replace("%", "%%") + shown
    options: dict[str, Any] = {"default": _UNSET, "help": text if listed else argparse.SUPPRESS}
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif get_origin(kind) is Literal:
        options["choices"] = get_args(kind)
    else:
        options["type"] = str  # pydantic converts and checks
        options["metavar"] = getattr(kind, "__name__", str(kind)).upper()
    group.add_argument("--" + name.replace("_", "-"), dest=name, **options)


def _inner(annotation: Any) -> Any:
    """The type behind `X | None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        return next(arg for arg in get_args(annotation) if arg is not type(None))
    return annotation


def config_from(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Config:
    """The configuration from parsed options. An invalid value ends the program with one line and status 2."""
    names = {name for section in Config.model_fields.values() for name in section.annotation.model_fields}  # type: ignore[union-attr]
    given = {name: value for name, value in vars(arguments).items() if name in names}
    try:
        config = make_config(**given)
    except ValueError as error:
        name, _, wrong = str(error).partition(": ")
        parser.error(f"argument --{name.replace('_', '-')}: {wrong}")
    if "disk_space" in given and config.tiers.disk_cache is None:
        parser.error("argument --disk-space: needs --disk-cache")
    return config


def options_page() -> str:
    """The text of OPTIONS.md: a table of options and defaults for each section."""
    tables = ("\n".join(_section_rows(section.annotation)) for section in Config.model_fields.values())
    return "\n\n".join((_HEADING, *tables))


def _section_rows(section: Any) -> Iterator[str]:
    yield from (f"**{section.__doc__.rstrip('.')}**", "", "| option | default | |", "| --- | --- | --- |")
    for name, field in section.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, Path):
            default = str(default).replace(str(Path.home()), "~")
        elif isinstance(default, bool):
            default = "on" if default else "off"
        shown = "" if default is None else f"`{default}`"
        kind = _inner(field.annotation)
        choices = f" ({', '.join(map(str, get_args(kind)))})" if get_origin(kind) is Literal else ""
        yield f"| `--{name.replace('_', '-')}` | {shown} | {field.description}{choices} |"
