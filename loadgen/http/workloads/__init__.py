"""Workloads by name: every subclass of Workload in a module of this folder. `FewShot` is `--workload few-shot`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from importlib import import_module
from inspect import isabstract
from pkgutil import iter_modules
from typing import Annotated, Any, get_type_hints

from pydantic import BeforeValidator, Field, PlainSerializer

from loadgen.http.lengths import NOTATION, Distribution
from loadgen.http.workloads.base import Source, Workload


def _find() -> dict[str, type[Workload]]:
    found: dict[str, type[Workload]] = {}
    for module in iter_modules(__path__):
        for kind in vars(import_module(f"{__name__}.{module.name}")).values():
            if isinstance(kind, type) and issubclass(kind, Workload) and not isabstract(kind):
                found[re.sub(r"(?<=[a-z])(?=[A-Z])", "-", kind.__name__).lower()] = kind
    return dict(sorted(found.items()))


WORKLOADS = _find()
_DISTRIBUTION = Annotated[Distribution, BeforeValidator(Distribution.of), PlainSerializer(str)]


def fields_of(*names: str) -> dict[str, Any]:
    """The options of workloads as fields of a pydantic model. None is the workload's own default."""
    types: dict[str, Any] = {}
    texts: dict[str, list[str]] = {}
    for name in names:
        hints = get_type_hints(WORKLOADS[name])
        for field in fields(WORKLOADS[name]):  # type: ignore[arg-type]
            kind = hints[field.name]
            types[field.name] = (_DISTRIBUTION if kind is Distribution else kind) | None
            texts.setdefault(field.name, []).append(name if field.default is MISSING else f"{name} {field.default}")
    extra: Any = {"group": f"workload, with defaults by name; {NOTATION}"}
    return {
        name: (kind, Field(None, description=", ".join(texts[name]), json_schema_extra=extra))
        for name, kind in types.items()
    }


def make_workloads(names: Sequence[str], given: Mapping[str, Any]) -> dict[str, Workload]:
    """Workloads by name; each takes the options that it has. Raises ValueError for a foreign or a missing option."""
    found, left = {}, set(given)
    for name in names:
        kind = WORKLOADS[name]
        own = {field.name: field.default for field in fields(kind)}  # type: ignore[arg-type]
        if missing := [option for option, default in own.items() if default is MISSING and option not in given]:
            raise ValueError(f"the workload {name} needs --{missing[0]}")
        found[name] = kind(**{option: value for option, value in given.items() if option in own})
        left -= own.keys()
    if left:
        raise ValueError(f"--{min(left).replace('_', '-')}: not an option of {', '.join(names)}")
    return found


__all__ = ["WORKLOADS", "Source", "Workload", "fields_of", "make_workloads"]
